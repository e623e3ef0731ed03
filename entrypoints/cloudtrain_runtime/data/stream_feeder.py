"""Feeding from what can only be read from the front: nobody knows how many samples are left, so the ranks tell it.

A step is read ahead of the one that is used, and the ranks sum up its samples meanwhile: each sample weighs the same,
and the epoch ends when all ranks have run out. Until then one that has run out keeps step with stand-ins.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from cloudtrain_runtime.data.feeder import Feeder, Step
from cloudtrain_runtime.data.global_order import ORDER_VERSION
from cloudtrain_runtime.data.loader import (
    NO_BATCH,
    Collate,
    DevicePrefetcher,
    loader_options,
)
from cloudtrain_runtime.data.position import (
    DataState,
    GlobalBatch,
    MicroBatch,
    Position,
    plan_rank_batches,
    resolve_global_batch,
)
from cloudtrain_runtime.data.stream_source import ReaderShare, StreamReader, StreamSource
from cloudtrain_runtime.errors import CheckpointError, TaskError
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.seeds import IsolatedRandomState, random_number


class ReadBatch(NamedTuple):
    """A micro-batch as a reader gives it.

    Attributes:
        batch: What `collate` returned.
        samples: How many; 0 when its one sample only stands in.
        marks: Where the source stands after it.
        role: Which of the rank's readers has read it.
    """

    batch: Any
    samples: int
    marks: Any
    role: int


class MicroBatchReader(IterableDataset[ReadBatch]):
    """Reads a rank's micro-batches, in this process or in each of a loader's workers.

    Args:
        source: What is read; stands where the epoch is entered.
        collate: The Task's.
        counts: Samples of the micro-batches of a step.
        start: Epoch that is entered where the source stands, its seed, and the role that is next.
        seed: Of the epochs after it.
        is_alone: Whether no other rank would wait for this one's stand-ins.
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
        self._source, self._collate, self._counts = source, collate, counts
        self._start, self._seed = start, seed
        self._is_alone = is_alone
        # Workers live for many epochs, and learn of the present one by it.
        self._epoch = torch.tensor([start[0]]).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is read when the next iteration begins."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[ReadBatch]:
        worker = get_worker_info()
        index, roles = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        epoch, (entered, seed, turn) = int(self._epoch), self._start
        if epoch != entered:
            self._source.restart()
            seed, turn = self._seed, 0
        # Workers give their batches in turn: the one that is first now goes on where it was another's turn.
        role = (index + turn) % roles
        return self._reads(self._source.open(seed, epoch, role, roles), (seed, epoch), index, role, roles)

    def _reads(
        self, opened: StreamReader, epoch: tuple[int, int], index: int, role: int, roles: int
    ) -> Iterator[ReadBatch]:
        last: list[Any] = []
        for turn in itertools.count(index, roles):
            # What is drawn depends on the position alone, not on the process nor on what it has read before.
            with IsolatedRandomState(random_number(*epoch, *opened.key()) >> 1):
                samples = opened.take(self._counts[turn % len(self._counts)])
                if not samples:
                    break
                batch = self._collate(samples)
            last = samples[-1:]
            yield ReadBatch(batch, len(samples), opened.marks(), role)
        if not self._is_alone:
            with IsolatedRandomState(random_number(*epoch, role) >> 1):
                last = last or opened.any_sample()
                stand_in = self._collate(last) if last else None
            if last:
                yield ReadBatch(stand_in, 0, None, role)


class StreamFeeder(Feeder):
    """Samples of a stream.

    The global batch is one only as long as no rank has run out: the last steps of an epoch may have fewer samples.

    Args:
        source: What this rank reads.
        collate: The Task's.
        place: This rank's place.
        share: This rank's share of the data.
        batch_size: As for `make_feeder`.
        accumulate: As for `make_feeder`.
        seed: As for `make_feeder`.
        workers: Processes that load for this rank.
        prefetch: As for `make_feeder`.
    """

    def __init__(
        self,
        source: StreamSource,
        collate: Collate,
        place: Context,
        share: ReaderShare,
        *,
        batch_size: int,
        accumulate: int,
        seed: int,
        workers: int,
        prefetch: int,
    ) -> None:
        self.batch_size, self.accumulate = batch_size, accumulate
        self.data_rank, self.data_size = share.rank, share.size
        self._source, self._collate, self._place = source, collate, place
        self._seed = self._epoch_seed = seed
        self._workers, self._prefetch = workers, prefetch
        self._position = Position()
        self._global_size, _ = resolve_global_batch(None, batch_size, accumulate, share.size)
        self._turn = 0
        self._reader: MicroBatchReader | None = None
        self._loader: DataLoader[Any] | None = None
        self._reads: Iterator[ReadBatch] = iter(())
        self._queue: deque[Any] = deque()
        self._stand_in: Any = NO_BATCH
        self._present: _Counted | None = None
        self._ahead: _Counted | None = None
        # A group of its own: its sums must not queue behind gradients.
        self._group = dist.new_group(backend="gloo") if place.world_size > 1 else None

    @property
    def position(self) -> Position:
        """How far training has come; `advance` moves it."""
        return self._position

    @property
    def length(self) -> None:
        """Nobody can know how many samples an epoch has."""
        return

    @property
    def global_size(self) -> int:
        """Samples of a whole optimizer step, of all ranks together."""
        return self._global_size

    # ------------------------------------------------------------ the steps

    def epoch(self) -> Iterator[Step]:
        """Return the steps of the rest of the present epoch.

        Raises:
            TaskError: nothing at all is in it.
        """
        self._enter()
        conveyor = DevicePrefetcher(self._pull, self._place.device, is_ahead=True)
        self._ahead = self._counted()
        if self._samples_of(self._ahead) == 0:
            if self._position.samples == 0:
                raise TaskError("the iterable dataset has no samples")
            # Nothing is left of the data that the run was cut in.
            self.restart(Position(self._position.step, self._position.epoch + 1, 0))
        return self._steps(conveyor)

    def _steps(self, conveyor: DevicePrefetcher) -> Iterator[Step]:
        while (present := self._ahead) is not None and self._samples_of(present):
            plan = self._plan(present)
            self._queue.extend(read.batch for read in present.reads)
            self._queue.extend(self._stand_in for micro in plan.micro_batches if not micro.count)
            self._present, self._ahead = present, self._counted()
            yield Step(plan, conveyor)

    def _enter(self) -> None:
        """Begin to read where the position stands."""
        self._queue.clear()
        self._stand_in = NO_BATCH
        at = self._position
        if at.samples or self._reader is None:
            share = plan_rank_batches(self._global_size, self.data_rank, self.data_size, self.batch_size)
            self._reader = MicroBatchReader(
                self._source,
                self._collate,
                # A rank that has no part in a small global batch has one sample nevertheless, or it would never end.
                [micro.samples for micro in share.micro_batches],
                (at.epoch, self._epoch_seed, self._turn),
                seed=self._seed,
                is_alone=self.data_size == 1,
            )
            self._micro_steps = len(share.micro_batches)
            self._loader = self._new_loader(self._reader)
        self._reader.set_epoch(at.epoch)
        self._reads = iter(self._reader if self._loader is None else self._loader)

    def _new_loader(self, reader: MicroBatchReader) -> DataLoader[Any] | None:
        if not self._workers and self._place.device.type == "cpu":
            return None
        options = loader_options(self._place, self._workers, self._prefetch)
        return DataLoader(reader, batch_size=None, collate_fn=_as_it_is, **options)

    def _counted(self) -> _Counted:
        """Read the next step, and begin to sum up what all ranks have of it."""
        reads: list[ReadBatch] = []
        began = time.perf_counter()
        while len(reads) < self._micro_steps:
            read = next(self._reads, None)
            if read is None:
                break
            if read.samples:
                reads.append(read)
            else:
                self._stand_in = read.batch
        self.wait_seconds += time.perf_counter() - began
        has = [1] * len(reads) + [0] * (self._micro_steps - len(reads))
        totals = torch.tensor([sum(read.samples for read in reads), *has])
        work = dist.all_reduce(totals, group=self._group, async_op=True) if self._group is not None else None
        return _Counted(reads, totals, work)

    def _samples_of(self, step: _Counted) -> int:
        """Return the samples of a step, of all ranks together."""
        if step.work is not None:
            step.work.wait()
            step.work = None
        return int(step.totals[0]) * self.data_size // self._place.world_size

    def _plan(self, step: _Counted) -> GlobalBatch:
        micro_steps = int(step.totals[1:].count_nonzero())
        counts = [read.samples for read in step.reads] + [0] * (micro_steps - len(step.reads))
        return GlobalBatch(self._samples_of(step), tuple(map(MicroBatch, counts)))

    def _pull(self) -> Any:
        return self._queue.popleft() if self._queue else NO_BATCH

    # ------------------------------------------------------------ the position

    def advance(self) -> None:
        """Count an optimizer step: move the position behind its samples, or to the start of the next epoch."""
        present, ahead, at = self._present, self._ahead, self._position
        if present is None or ahead is None:
            raise RuntimeError("advance() counts a step that epoch() has given")
        if self._samples_of(ahead) == 0:
            self.restart(Position(at.step + 1, at.epoch + 1, 0))
            return
        for read in present.reads:
            self._source.advance(read.marks)
            self._turn = (read.role + 1) % max(self._workers, 1)
        self._position = Position(at.step + 1, at.epoch, at.samples + self._samples_of(present))

    def restart(self, position: Position) -> None:
        """Stand at the start of an epoch."""
        self._position = position
        self._source.restart()
        self._turn, self._epoch_seed = 0, self._seed
        self._present = None

    def state(self) -> DataState:
        """Return what a checkpoint must keep. All ranks call it together."""
        at = self._position
        return DataState(
            step=at.step,
            epoch=at.epoch,
            samples=at.samples,
            global_batch=self._global_size,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            world_size=self.data_size,
            seed=self._epoch_seed,
            length=0,
            stream=self._stream_state() if at.samples else {"version": _VERSION},
        )

    def _stream_state(self) -> dict[str, Any]:
        own = (self.data_rank, self._source.own_state(), [self._turn, self._workers])
        by_rank = {rank: (state, turn) for rank, state, turn in gather(own, self._place, self._group)}
        states, turns = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
        return {"version": _VERSION, "turns": list(turns), **self._source.whole_state(list(states))}

    def resume(self, saved: DataState) -> list[str]:
        """Go on from a saved position; return what is to be said about it, a sentence each.

        Raises:
            CheckpointError: the position is in the middle of an epoch of other data.
        """
        self.restart(saved.position)
        self.close()
        notes: list[str] = []
        if saved.seed != self._seed:
            first = saved.epoch + 1 if saved.samples else saved.epoch
            was = f"warning: the seed was {saved.seed} and is {self._seed}"
            notes.append(f"{was}: it orders the samples from epoch {first} on")
        self._global_size, note = resolve_global_batch(saved, self.batch_size, self.accumulate, self.data_size)
        self._source.global_size = self._global_size
        if saved.samples:
            notes += self._enter_middle(saved)
        return [*notes, note] if note else notes

    def _enter_middle(self, saved: DataState) -> list[str]:
        state = saved.stream or {}
        if state.get("version") != _VERSION or saved.order != ORDER_VERSION:
            was = "of a dataset with a length" if saved.stream is None else "by another cloudtrain"
            raise CheckpointError(
                f"the checkpoint was saved {saved.samples:,} samples into epoch {saved.epoch} {was}: which samples are "
                "left can't be told. Resume it as it was, from a checkpoint at the end of an epoch, or start anew with "
                "checkpoint.resume: never"
            )
        notes = self._source.resume(state, saved.samples, saved.world_size)
        self._epoch_seed = saved.seed
        if saved.world_size == self.data_size:
            turn, workers = state["turns"][self.data_rank]
            self._turn = turn if workers == self._workers else 0
        return notes

    def close(self) -> None:
        """End the loader's workers; a later epoch starts others."""
        self._reader = self._loader = None
        self._reads = iter(())


_VERSION = 1
"""Of what a DataState holds of a stream."""


class _Counted:
    """A step that has been read, and is being summed up."""

    def __init__(self, reads: list[ReadBatch], totals: torch.Tensor, work: dist.Work | None) -> None:
        self.reads = reads
        self.totals = totals
        self.work = work


def _as_it_is(read: Any) -> Any:
    return read
