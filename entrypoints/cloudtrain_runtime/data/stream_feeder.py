"""Feeder of streams, whose number of remaining samples is unknown.

Each rank reads one step ahead, and the ranks sum up its samples meanwhile, so that each sample has the same weight. The
epoch ends when all ranks have run out of samples; until then a rank without samples uses placeholders.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from cloudtrain_runtime.data.feeder import Step
from cloudtrain_runtime.data.file_stream import FileSource
from cloudtrain_runtime.data.global_order import ORDER_VERSION
from cloudtrain_runtime.data.iterable_dataset import IterableSource
from cloudtrain_runtime.data.loader import (
    NO_BATCH,
    Collate,
    DevicePrefetcher,
    Loader,
    Loading,
    loader_options,
)
from cloudtrain_runtime.data.position import (
    DataState,
    GlobalBatch,
    MicroBatch,
    Position,
    ReaderShare,
    check_full_steps,
    plan_rank_batches,
    resolve_global_batch,
    seed_difference,
)
from cloudtrain_runtime.errors import CheckpointError, TaskError
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.seeds import IsolatedRandomState, random_number

StreamSource = FileSource | IterableSource


class _ReadBatch(NamedTuple):
    """A micro-batch from a reader."""

    # collated
    batch: Any
    # 0 for a placeholder
    samples: int
    # position of the source after it
    marks: Any
    # index of the reader among the rank's readers
    role: int


class _MicroBatchReader(IterableDataset[_ReadBatch]):
    """Reads a rank's micro-batches, in this process or in each of a loader's workers.

    Args:
        source: Source to read, at the position where the epoch starts or continues.
        counts: Samples of the micro-batches of a step.
        start: Epoch at the source's position, its seed, and the role of the next reader.
        seed: Seed of later epochs.
        is_alone: Whether no other rank waits for this one, so that placeholders are not needed.
    """

    def __init__(
        self,
        source: StreamSource,
        collate: Collate,
        counts: Sequence[int],
        start: tuple[int, int, int],
        *,
        seed: int,
        is_alone: bool,
    ) -> None:
        self._source = source
        self._collate = collate
        self._counts = counts
        self._start = start
        self._seed = seed
        self._is_alone = is_alone
        # Shared memory, because workers live for many epochs.
        self.epoch = torch.tensor([start[0]]).share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[_ReadBatch]:
        worker = get_worker_info()
        index, roles = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        epoch = int(self.epoch)
        entered, seed, turn = self._start
        if epoch != entered:
            self._source.restart()
            seed = self._seed
            turn = 0
        # The loader takes batches from workers in turn; after a resume the first worker continues
        # with the next role.
        role = (index + turn) % roles
        opened = self._source.open(seed, epoch, role, roles)
        return self._reads(opened, (seed, epoch), index, role, roles)

    def _reads(
        self, opened: Any, epoch: tuple[int, int], index: int, role: int, roles: int
    ) -> Iterator[_ReadBatch]:
        last: list[Any] = []
        # torch's collate function draws no random numbers.
        is_isolated = opened.is_isolated and self._collate is default_collate
        for turn in itertools.count(index, roles):
            # Random numbers depend on the position only, not on the process or on earlier reads.
            state: AbstractContextManager[None] = nullcontext()
            if not is_isolated:
                state = IsolatedRandomState(random_number(*epoch, *opened.key()) >> 1)
            with state:
                samples = opened.take(self._counts[turn % len(self._counts)])
                if not samples:
                    break
                batch = self._collate(samples)
            last = samples[-1:]
            yield _ReadBatch(batch=batch, samples=len(samples), marks=opened.marks(), role=role)
        if self._is_alone:
            return
        with IsolatedRandomState(random_number(*epoch, role) >> 1):
            last = last or opened.any_sample()
            placeholder = self._collate(last) if last else None
        if last:
            yield _ReadBatch(batch=placeholder, samples=0, marks=None, role=role)


class StreamFeeder:
    """Samples of a stream, step by step.

        while feeder.position.epoch < 3:
            for step in feeder.epoch():
                for micro, batch in step:
                    ...
                feeder.advance()

    The last steps of an epoch, after a rank has run out of samples, may have a smaller global batch.

    Attributes:
        position: Steps, epochs and samples done, as counted by `advance`.
        global_size: Samples of a full optimizer step, of all ranks.
        length: None: the samples of an epoch are unknown before its end.
    """

    length = None
    smallest_batch: int | None = None

    def __init__(
        self, source: StreamSource, context: Context, share: ReaderShare, loading: Loading
    ) -> None:
        self._source = source
        self._context = context
        self._share = share
        self._loading = loading
        self._workers = loading.workers or 0
        self._epoch_seed = loading.seed
        self.position = Position()
        self.global_size, _ = resolve_global_batch(
            None, loading.batch_size, loading.accumulate, share.size
        )
        self._turn = 0
        self._reader: _MicroBatchReader | None = None
        self._loader: Loader | None = None
        self._reads: Iterator[_ReadBatch] = iter(())
        self._queue: deque[Any] = deque()
        self._placeholder: Any = NO_BATCH
        self._present: _PendingStep | None = None
        self._ahead: _PendingStep | None = None
        # A separate group, so that its sums do not queue behind gradients.
        self._group = dist.new_group(backend="gloo") if context.world_size > 1 else None

    def epoch(self) -> Iterator[Step]:
        """Return the remaining steps of the current epoch; raise a TaskError if the dataset has no samples."""
        if self._loading.drop_last:
            check_full_steps(self.global_size, self._share.size)
        self._enter()
        queue = self._queue
        conveyor = DevicePrefetcher(
            lambda: queue.popleft() if queue else NO_BATCH, self._context.device, is_ahead=True
        )
        self._ahead = self._read_ahead()
        if not self._is_step(self._ahead):
            if self.position.samples == 0:
                few = "no samples"
                if self._loading.drop_last:
                    few = "fewer samples than a step (train.drop_last)"
                raise TaskError(f"the iterable dataset has {few}")
            # The run was interrupted after the last sample of the epoch.
            self.restart(Position(self.position.step, self.position.epoch + 1, 0))
        return self._steps(conveyor)

    def _steps(self, conveyor: DevicePrefetcher) -> Iterator[Step]:
        while (present := self._ahead) is not None and self._is_step(present):
            plan = self._plan(present)
            self._queue.extend(read.batch for read in present.reads)
            self._queue.extend(self._placeholder for micro in plan.micro_batches if not micro.count)
            ahead = self._read_ahead()
            self._present = present
            self._ahead = ahead
            yield Step(plan, conveyor)

    def _enter(self) -> None:
        self._queue.clear()
        self._placeholder = NO_BATCH
        at = self.position
        share = self._share
        if at.samples or self._reader is None:
            own = plan_rank_batches(
                self.global_size, share.rank, share.size, self._loading.batch_size
            ).micro_batches
            self._reader = _MicroBatchReader(
                self._source,
                self._loading.collate,
                # A rank without a share of a small global batch reads one sample nevertheless, or
                # it would never end.
                [micro.samples for micro in own],
                (at.epoch, self._epoch_seed, self._turn),
                seed=self._loading.seed,
                is_alone=share.size == 1,
            )
            self._micro_steps = len(own)
            if self._workers or self._context.device.type != "cpu":
                options = loader_options(self._context, self._workers)
                self.close_loader()
                self._loader = Loader(
                    self._reader, batch_size=None, collate_fn=lambda read: read, **options
                )
        self._reader.epoch[0] = at.epoch
        self._reads = iter(self._reader if self._loader is None else self._loader)

    def _read_ahead(self) -> _PendingStep:
        """Read the next step, and start to sum up its samples over all ranks."""
        reads: list[_ReadBatch] = []
        while len(reads) < self._micro_steps:
            read = next(self._reads, None)
            if read is None:
                break
            if read.samples:
                reads.append(read)
            else:
                self._placeholder = read.batch
        step = _PendingStep(
            reads=reads, samples=sum(read.samples for read in reads), micro_steps=len(reads)
        )
        if self._group is not None:
            has = [1] * len(reads) + [0] * (self._micro_steps - len(reads))
            step.totals = torch.tensor([step.samples, *has])
            step.work = dist.all_reduce(step.totals, group=self._group, async_op=True)
        return step

    def _settled(self, step: _PendingStep) -> _PendingStep:
        """Return a step with the numbers of all ranks, after waiting for them."""
        if step.work is not None and step.totals is not None:
            step.work.wait()
            step.work = None
            samples, *ranks_of_micro_steps = step.totals.tolist()
            step.samples = samples * self._share.size // self._context.world_size
            step.micro_steps = sum(ranks > 0 for ranks in ranks_of_micro_steps)
        return step

    def _is_step(self, step: _PendingStep) -> bool:
        least = self.global_size if self._loading.drop_last else 1
        return self._settled(step).samples >= least

    def _plan(self, step: _PendingStep) -> GlobalBatch:
        step = self._settled(step)
        counts = [read.samples for read in step.reads]
        counts += [0] * (step.micro_steps - len(counts))
        return GlobalBatch(step.samples, tuple(map(MicroBatch, counts)))

    def advance(self) -> None:
        """Count an optimizer step: move the position behind its samples, or to the start of the next epoch."""
        present = self._present
        ahead = self._ahead
        at = self.position
        if present is None or ahead is None:
            raise RuntimeError("advance() must be called after a step of epoch()")
        if not self._is_step(ahead):
            self.restart(Position(at.step + 1, at.epoch + 1, 0))
            return
        for read in present.reads:
            self._source.advance(read.marks)
            self._turn = (read.role + 1) % max(self._workers, 1)
        self.position = Position(at.step + 1, at.epoch, at.samples + self._settled(present).samples)

    def restart(self, position: Position) -> None:
        """Move to the start of an epoch."""
        self.position = position
        self._source.restart()
        self._turn = 0
        self._epoch_seed = self._loading.seed
        self._present = None

    def state(self) -> DataState:
        """Return the state for a checkpoint. All ranks call this together."""
        stream: dict[str, Any] = {"version": _VERSION}
        if self.position.samples:
            stream = self._stream_state()
        return DataState(
            **asdict(self.position),
            global_batch=self.global_size,
            batch_size=self._loading.batch_size,
            accumulate=self._loading.accumulate,
            world_size=self._share.size,
            seed=self._epoch_seed,
            length=0,
            stream=stream,
        )

    def _stream_state(self) -> dict[str, Any]:
        own = (self._share.rank, self._source.own_state(), [self._turn, self._workers])
        by_rank = {
            rank: (state, turn) for rank, state, turn in gather(own, self._context, self._group)
        }
        states, turns = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
        return {
            "version": _VERSION,
            "turns": list(turns),
            **self._source.global_state(list(states)),
        }

    def resume(self, saved: DataState) -> list[str]:
        """Continue from a saved position; return notes for the user, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        loading = self._loading
        self.restart(saved.position)
        self.close()
        notes = list(seed_difference(saved, loading.seed))
        size = self._share.size
        self.global_size, note = resolve_global_batch(
            saved, loading.batch_size, loading.accumulate, size
        )
        self._source.global_size = self.global_size
        if saved.samples:
            notes += self._enter_middle(saved)
        return [*notes, note] if note else notes

    def _enter_middle(self, saved: DataState) -> list[str]:
        state = saved.stream or {}
        if state.get("version") != _VERSION or saved.order != ORDER_VERSION:
            was = "of a dataset with a length" if saved.stream is None else "by another cloudtrain"
            raise CheckpointError(
                f"the checkpoint was saved {saved.samples:,} samples into epoch {saved.epoch} {was}: the remaining "
                "samples are unknown. Resume with the same data, from a checkpoint at the end of an epoch, or start a "
                "new run with checkpoint.resume: never"
            )
        notes = self._source.resume(state, saved.samples, saved.world_size)
        self._epoch_seed = saved.seed
        if saved.world_size == self._share.size:
            turn, workers = state["turns"][self._share.rank]
            self._turn = turn if workers == self._workers else 0
        return notes

    def close(self) -> None:
        """End the loader's workers; a later epoch starts new ones."""
        self._reader = None
        self.close_loader()
        self._reads = iter(())

    def close_loader(self) -> None:
        """End the workers of the present epoch."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None


_VERSION = 1
"""Version of a stream's part of a DataState."""


@dataclass
class _PendingStep:
    """A step that has been read, while its samples are summed up over all ranks."""

    reads: list[_ReadBatch]
    # of this rank, and once `work` is done of all ranks
    samples: int
    micro_steps: int
    # the sum over the ranks in progress: samples, and for each micro-step the ranks that have samples in it
    totals: torch.Tensor | None = None
    work: dist.Work | None = None
