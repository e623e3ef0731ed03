"""Saving beside training: a step waits for a copy on the host at most, never for the storage.

A save goes through five phases in a thread of its own, on all ranks together: plan, copy, write, commit, retire. After
each one the ranks agree that it went well everywhere, over a process group that nothing else uses. The next step of an
optimizer waits for the end of the second phase.

Host memory per rank: one copy of what this rank writes (replicated states are shared out between the ranks), kept for
the next save, and the blocks that the storage has under way (objects.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from cloudtrain_runtime.checkpoint.listing import (
    CheckpointRecord,
    list_checkpoints,
    mark_damaged,
    writing_run,
)
from cloudtrain_runtime.checkpoint.safe_metadata import read_metadata
from cloudtrain_runtime.checkpoint.shards import METADATA_FILE, CheckpointWriter, StagingPlanner
from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.checkpoint.training_state import States, rng_sources
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract import GRACE_VARIABLE, STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.manifest import Manifest, best_steps
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

ALARM_AFTER = 3
"""Saves in a row that did not become checkpoints, until it is an alarm."""

_AGREE_SECONDS = 24 * 3600
"""How long ranks wait for the slowest one's upload. One that has gone is noticed at once. After this time no save of
the process would work any more."""

_TICK_SECONDS = 5.0

_QUIET_SECONDS = 900.0
"""How long a rank with nothing else to do waits while no rank gets anything done: longer than a client's retries."""

_LEAVE_MARGIN_SECONDS = 10.0
"""Kept of the grace time, to leave before SIGKILL."""

_PATIENCE_SECONDS = 2.0
"""How long a save waits for the one before: short runs with short intervals get each checkpoint that they ask for."""

_ASK_STORAGE = "does the storage answer? Check the network and the endpoint, or the disk"

T = TypeVar("T")


class SaveError(Exception):
    """A save failed on some rank; all ranks have it."""


@dataclass(frozen=True)
class RetentionPolicy:
    """What is kept, and how the run is laid out.

    Attributes:
        keep: Complete checkpoints to keep.
        mesh: Size of each dimension of parallelism by name.
    """

    keep: int
    mesh: Mapping[str, int]


@dataclass
class _Save:
    """One save under way. `copied` is set when the live tensors are no longer needed."""

    step: int
    state: Mapping[str, Any]
    began: float
    ready: torch.cuda.Event | None
    stall_seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    copies: torch.cuda.Event | None = None


class CheckpointSaver:
    """Writes the checkpoints of one run. Created, and `save` and `wait_for_save` called, by all ranks together.

    Args:
        storage: Where they go.
        keeping: What is kept.
        place: This rank's place.
        attempt: 8 hex digits that no other start of these ranks has, the same on all of them.
        front: Group for what the calling threads ask each other, on the CPU; None for one rank.
        is_stopping: Whether this rank was told to stop: then there is only so much time to wait.
    """

    def __init__(
        self,
        storage: Storage,
        keeping: RetentionPolicy,
        place: Context,
        attempt: str,
        front: dist.ProcessGroup | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.storage = storage
        self._is_stopping = is_stopping
        self.last_started_at = time.monotonic()
        self.last_step: int | None = None
        self.missed = 0
        self._has_completed = False
        self._last_failure = ""
        self._keeping = keeping
        self._place = place
        self._attempt = attempt
        timeout = timedelta(seconds=_AGREE_SECONDS)
        self._front = front
        self._ranks = _Ranks(place, dist.new_group(backend="gloo", timeout=timeout) if place.world_size > 1 else None)
        self._planner = StagingPlanner()
        self._plan: _Plan | None = None
        self._is_readable = False
        self._unreadable = ""
        self._save: _Save | None = None
        self._thread: threading.Thread | None = None
        self._bytes = 0
        self._bytes_seen = -1
        self.step_in_progress = -1
        self._moved = time.monotonic()

    # ------------------------------------------------------------ what the loop calls

    def save(
        self,
        step: int,
        states: Callable[[], tuple[States, frozenset[str]]],
        state: Mapping[str, Any],
        *,
        wait: bool = False,
    ) -> bool:
        """Begin to write a checkpoint; return whether it was begun (with `wait`: whether it is complete).

        While the one before is under way nothing is begun, unless `wait` says to wait for both.

        Args:
            step: Optimizer steps done.
            states: Returns model, optimizer and the rest, as states.states_of does, and the names of what each rank may
                have its own of: the lowest rank's is saved.
            state: JSON values for the manifest.
            wait: Return when it is complete, or has failed.
        """
        began = time.monotonic()
        self.last_started_at = began
        if wait:
            if not self.wait_for_save(step=step):
                return False
        else:
            self._join(_PATIENCE_SECONDS)
            if self._is_main_busy():
                self._note_late(step)
                return False
        self._join()
        self._save = None
        values, unshared = states()
        save = _Save(step, dict(state), began, _event_now(self._place))
        self._save = save
        self.step_in_progress = step
        self._bytes, self._bytes_seen = 0, -1
        self._note_progress()
        self._thread = threading.Thread(target=self._run, args=(save, values, unshared), name="checkpoint", daemon=True)
        self._thread.start()
        save.stall_seconds += time.monotonic() - began
        if wait:
            self.wait_for_save()
            return self.last_step == step
        return True

    def _is_main_busy(self) -> bool:
        """Ask rank 0: a thread elsewhere may be just about to end, and all ranks must decide alike."""
        if self._front is None:
            return self.is_busy
        busy = torch.tensor([self.is_busy], dtype=torch.uint8)
        dist.broadcast(busy, src=0, group=self._front)
        return bool(busy)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer's steps wait until the values that they change are copied."""
        optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())

    def wait_for_copy(self) -> None:
        """Wait until the copy is made. On CUDA the device waits, not the caller."""
        self._require_readable()
        save = self._save
        if save is None:
            return
        began = time.monotonic()
        save.copied.wait()
        if save.copies is not None:
            torch.cuda.current_stream(self._place.device).wait_event(save.copies)
        save.stall_seconds += time.monotonic() - began
        self._save = None

    def wait_for_save(self, *, step: int | None = None) -> bool:
        """Wait for the save under way, all ranks together; return whether none is any more.

        A storage that never answers is given up: when no rank gets anything done for long, or, for a run that was told
        to stop, in time to leave before it is ended.

        Args:
            step: Of the save that is missed then; that of the save under way without it.
        """
        began = time.monotonic()
        while True:
            self._join(_TICK_SECONDS)
            heartbeat.refresh()
            views = gather(self._view(began), self._place, self._front)
            if not any(view.is_busy for view in views):
                self._require_readable()
                return True
            if _should_abandon(views):
                self._give_up(self.step_in_progress if step is None else step)
                return False

    def wait_for_save_alone(self, timeout_seconds: float) -> bool:
        """Wait at most so long for the save under way, whatever other ranks do; return whether none is any more."""
        began = time.monotonic()
        while self.is_busy and (left := timeout_seconds - (time.monotonic() - began)) > 0:
            self._join(min(_TICK_SECONDS, left))
            heartbeat.refresh()
        return not self.is_busy

    def _give_up(self, step: int) -> None:
        if step != self.last_step:
            detail = f"{self._under_way()}, and it is waited for no longer: {_ASK_STORAGE}"
            self._record_failure(step, "stalled", detail, "the run goes on without it")
        elif self._place.is_main:
            log_line(f"older checkpoints stay for now: {_ASK_STORAGE}")

    def _view(self, began: float) -> _View:
        now = time.monotonic()
        return _View(self.is_busy, now - self._moved, now - began, self._is_stopping())

    def _note_progress(self) -> None:
        self._moved = time.monotonic()

    def _join(self, timeout_seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    # ------------------------------------------------------------ what did not work

    def _note_late(self, step: int) -> None:
        stands_still = self._bytes == self._bytes_seen
        self._bytes_seen = self._bytes
        if stands_still:
            self._record_failure(step, "stalled", f"{self._under_way()}: {_ASK_STORAGE}")
        else:
            self._record_failure(step, "late", f"{self._under_way()}: save less often, or to a faster place")

    def _under_way(self) -> str:
        return (
            f"the save of step {self.step_in_progress} is still under way: {self._bytes / 1e6:,.0f} MB written by "
            f"rank 0, the last {time.monotonic() - self._moved:,.0f} s ago"
        )

    def _record_failure(self, step: int, reason: str, detail: str, consequence: str = "training goes on") -> None:
        self.missed += 1
        self._last_failure = f"step {step} ({reason}): {detail}"
        if self._place.is_main:
            alarm = self.missed >= ALARM_AFTER
            emit("checkpoint_missed", step=step, reason=reason, detail=detail, missed=self.missed, alarm=alarm)
            log_line(f"{'ALARM: ' if alarm else ''}no checkpoint at step {step} ({reason}): {detail}; {consequence}")

    def require_completed(self) -> None:
        """End a run that has completed none of the checkpoints that were due.

        Raises:
            CheckpointError: so it is.
        """
        if self._last_failure and not self._has_completed:
            raise CheckpointError(
                f"none of this run's checkpoints was completed in {self.storage.uri}; the last one was due at "
                f"{self._last_failure}"
            )

    # ------------------------------------------------------------ the thread

    def _run(self, save: _Save, states: States, unshared: frozenset[str]) -> None:
        try:
            folder, shards = self._write(save, states, unshared)
        except SaveError as error:
            self._record_failure(save.step, "failed", str(error))
        except Exception as error:  # noqa: BLE001 (a process group that broke; the step's own collectives fail, too)
            self._record_failure(save.step, "failed", f"{type(error).__name__}: {error}")
        else:
            self.last_step = save.step
            damage = self._retire(save, folder, shards)
            if damage:
                self.last_step = None
                self._record_failure(save.step, "failed", f"what was written is not what can be read: {damage[0]}")
            else:
                self.missed = 0
                self._has_completed = True
        finally:
            save.copied.set()

    def _write(self, save: _Save, states: States, unshared: frozenset[str]) -> tuple[str, CheckpointWriter]:
        """Plan, copy, write and commit; return the checkpoint's name and its writer."""
        plan = self._plan_for(states, unshared)
        self._ranks.each(lambda: self._copy(save, plan))
        save.copied.set()
        writer = {"run": self._place.run, "attempt": self._attempt, "step": save.step}
        reserved = self._ranks.share(lambda: self.storage.reserve(save.step, writer))
        shards = CheckpointWriter(self.storage, reserved, self._count, self._planner.staged_bytes)
        try:
            written = self._ranks.collect(lambda: (self._write_shards(save, shards, plan), shards.files))
            self._prove_readable(reserved, shards, plan, written)
            return self._ranks.share(lambda: self._commit(save, reserved, shards, written)), shards
        except SaveError:
            if self._place.is_main:
                self.storage.abandon(reserved)
            raise

    def _copy(self, save: _Save, plan: _Plan) -> None:
        if save.ready is None:
            self._planner.stage(plan.own)
            return
        stream: Any = torch.cuda.Stream(self._place.device)  # type: ignore[no-untyped-call]
        stream.wait_event(save.ready)
        with torch.cuda.stream(stream):
            self._planner.stage(plan.own)
        copies: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copies.record(stream)
        save.copies = copies

    def _write_shards(self, save: _Save, shards: CheckpointWriter, plan: _Plan) -> Any:
        if save.copies is not None:
            save.copies.synchronize()
        return shards.write_data(plan.own, self._planner).wait()

    def _prove_readable(
        self, reserved: str, shards: CheckpointWriter, plan: _Plan, written: list[tuple[Any, Any]]
    ) -> None:
        """Write the metadata; with the first save, read it back as a load does.

        A version of PyTorch may write what this runtime cannot read. Then the run ends at its next step: no checkpoint
        of it could ever be loaded.
        """

        def finish() -> str:
            metadata: Any = plan.metadata
            shards.finish(replace(metadata), [results for results, _ in written])
            if self._is_readable:
                return ""
            try:
                read_metadata(self.storage.read(reserved, METADATA_FILE) or b"")
            except CheckpointError as error:
                return str(error)
            return ""

        self._unreadable = self._ranks.share(finish)
        if self._unreadable:
            raise SaveError(self._unreadable)
        self._is_readable = True

    def _require_readable(self) -> None:
        """End a run whose checkpoints could not be loaded.

        Raises:
            CheckpointError: the metadata of the first save could not be read back.
        """
        if self._unreadable:
            raise CheckpointError(
                f"a checkpoint saved with PyTorch {torch.__version__} could not be loaded again: {self._unreadable}. "
                "The run ends here, because it could not be resumed. What to do: use an older PyTorch "
                "(cluster.framework or cluster.image), or a newer cloudtrain"
            )

    def _commit(self, save: _Save, reserved: str, shards: CheckpointWriter, written: list[tuple[Any, Any]]) -> str:
        files = {name: file for _, others in written for name, file in others.items()} | shards.files
        manifest = Manifest(
            run=self._place.run,
            attempt=self._attempt,
            step=save.step,
            time=time.time(),
            world_size=self._place.world_size,
            mesh=dict(self._keeping.mesh),
            rng={"ranks": self._place.world_size, "sources": rng_sources(self._place)},
            torch=torch.__version__,
            code=self._place.code,
            request=self._place.request,
            state=save.state,
            files=files,
            training=self._place.training,
        )
        lost = manifest.file_mismatches(self.storage.sizes(reserved))
        if lost:
            raise OSError(f"{self.storage.uri} does not hold what it has taken, check it: {'; '.join(lost)}")
        name = self.storage.commit(reserved, manifest.to_json())
        emit(
            "checkpoint",
            step=save.step,
            uri=f"{self.storage.uri}/{name}",
            bytes=manifest.total_bytes,
            seconds=time.monotonic() - save.began,
            stall_seconds=save.stall_seconds,
        )
        return name

    def _count(self, bytes_: int) -> None:
        self._bytes += bytes_
        self._note_progress()

    # ------------------------------------------------------------ the plan

    def _plan_for(self, states: States, unshared: frozenset[str]) -> _Plan:
        """Return who writes what; that of the last save while the states keep their form."""
        local = self._ranks.each(lambda: self._plan_alone(states))
        known = self._plan
        if known is not None and not any(self._ranks.gather(lambda: local != known.local)):
            return known
        plans = self._ranks.collect(lambda: (local, unshared))
        own, metadata = self._ranks.scatter(lambda: self._plan_together(plans))
        self._plan = _Plan(local, self._planner.finish_plan(own), metadata)
        return self._plan

    def _plan_alone(self, states: States) -> SavePlan:
        self._planner.set_up_planner(states, None, self._place.is_main)
        return self._planner.create_local_plan()

    def _plan_together(self, plans: list[tuple[SavePlan, frozenset[str]]]) -> list[tuple[SavePlan, Metadata | None]]:
        shared, metadata = self._planner.create_global_plan(list(_from_one(plans)))
        shared = CheckpointWriter(self.storage, "", self._count).prepare_global_plan(shared)
        return [(plan, None if rank else metadata) for rank, plan in enumerate(shared)]

    # ------------------------------------------------------------ what goes

    def _retire(self, save: _Save, folder: str, shards: CheckpointWriter) -> list[str]:
        """Delete what is no longer needed, after each rank has read back what it has written; return what is damaged.

        The checkpoint is complete: what goes wrong here, a broken process group as well, leaves it so.
        """
        damage: list[str] = []
        try:
            doomed = self._ranks.share(lambda: self._doomed(save))
            if doomed:
                found = self._ranks.gather(lambda: list(self._faults(folder, shards)))
                damage = [fault for faults_ in found for fault in faults_]
                self._ranks.share(lambda: self._finish_retiring(save.step, folder, damage, doomed))
        except (SaveError, RuntimeError) as error:
            if self._place.is_main:
                log_line(f"older checkpoints stay for now: {error}")
        return damage

    def _faults(self, folder: str, shards: CheckpointWriter) -> Iterator[str]:
        return find_damage(self.storage, folder, shards.files, note=self._note_progress)

    def _doomed(self, save: _Save) -> list[str]:
        """Return the folders to delete: complete ones beyond those to keep, and what was never finished before them.

        Only what this run has written: another run's checkpoints are that run's to delete.

        What was found damaged stays: it may be all that is left of a run. So does the one with the best weights, or
        with the next best when that could not be saved.
        """
        records = [
            record for record in list_checkpoints(self.storage) if record.step <= save.step and self._is_ours(record)
        ]
        steps = sorted({record.step for record in records if record.is_complete})
        kept = steps[-self._keeping.keep :]
        best = [step for step in best_steps(save.state) if step in steps][-1:]
        return [
            record.folder
            for record in records
            if record.verdict != "damaged"
            and kept
            and record.step < kept[0]
            and not (record.is_complete and record.step in best)
        ]

    def _is_ours(self, record: CheckpointRecord) -> bool:
        return writing_run(self.storage, record) == self._place.run

    def _finish_retiring(self, step: int, folder: str, damage: list[str], doomed: list[str]) -> None:
        if damage:
            emit("checkpoint_damaged", step=step, uri=f"{self.storage.uri}/{folder}", detail="; ".join(damage))
            mark_damaged(self.storage, folder, damage)
            return
        for name in doomed:
            self.storage.delete(name)


@dataclass(frozen=True)
class _View:
    """What one rank sees of a save that is waited for.

    Attributes:
        is_busy: Whether it is under way.
        quiet_seconds: Since this rank got anything done.
        waited_seconds: Since it began to wait.
        is_stopping: Whether it was told to stop.
    """

    is_busy: bool
    quiet_seconds: float
    waited_seconds: float
    is_stopping: bool


def _should_abandon(views: list[_View]) -> bool:
    """Whether to wait no longer: the same on all ranks, which see the same views."""
    grace = float(os.environ.get(GRACE_VARIABLE, STOP_GRACE_SECONDS))
    must_leave = views[0].waited_seconds > max(1.0, grace - _LEAVE_MARGIN_SECONDS)
    if must_leave and any(view.is_stopping for view in views):
        return True
    return min(view.quiet_seconds for view in views) > _QUIET_SECONDS


@dataclass(frozen=True)
class _Plan:
    """Who writes what. `local` is what this rank could write, `own` what it shall; the metadata is rank 0's."""

    local: SavePlan
    own: SavePlan
    metadata: Metadata | None


def _from_one(plans: list[tuple[SavePlan, frozenset[str]]]) -> Iterator[SavePlan]:
    """Leave out of each plan what a lower rank has, of what ranks do not share: a set of buffers is one rank's."""
    seen: set[str] = set()
    for plan, unshared in plans:
        names = {item.index.fqn for item in plan.items} & unshared
        yield replace(plan, items=[item for item in plan.items if item.index.fqn not in names & seen])
        seen |= names


class _Ranks:
    """Phases that all ranks go through together: what fails on one raises SaveError on all."""

    def __init__(self, place: Context, group: dist.ProcessGroup | None) -> None:
        self._place = place
        self._group = group

    def each(self, act: Callable[[], T]) -> T:
        """Do it on every rank; return this rank's own value."""
        value, problem = self._try(act)
        self._raise_any(problem)
        return value  # type: ignore[return-value] # without a problem there is a value

    def gather(self, act: Callable[[], T]) -> list[T]:
        """Do it on every rank; return all values, by rank."""
        value = self.each(act)
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._place.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def collect(self, act: Callable[[], T]) -> list[T]:
        """Do it on every rank; return all values on rank 0, nothing elsewhere."""
        value = self.each(act)
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self._place.world_size if self._place.is_main else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def share(self, act: Callable[[], T]) -> T:
        """Do it on rank 0; return its value everywhere."""
        outcome: list[Any] = [self._try(act) if self._place.is_main else None]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        return self._opened(outcome[0])  # type: ignore[no-any-return]

    def scatter(self, act: Callable[[], list[T]]) -> T:
        """Do it on rank 0; return to each rank its own element."""
        hands: list[Any] | None = None
        if self._place.is_main:
            values, problem = self._try(act)
            hands = [(value, problem) for value in values or self._place.world_size * (None,)]
        if self._group is None:
            return self._opened((hands or [])[0])  # type: ignore[no-any-return]
        own: list[Any] = [None]
        dist.scatter_object_list(own, hands, src=0, group=self._group)
        return self._opened(own[0])  # type: ignore[no-any-return]

    def _try(self, act: Callable[[], T]) -> tuple[T | None, str | None]:
        try:
            return act(), None
        except Exception as error:  # noqa: BLE001 (whatever it is, the others must hear of it, or they wait for ever)
            return None, f"rank {self._place.rank}: {type(error).__name__}: {error}"

    def _raise_any(self, problem: str | None) -> None:
        problems: list[Any] = [problem]
        if self._group is not None:
            problems = [None] * self._place.world_size
            dist.all_gather_object(problems, problem, group=self._group)
        for found in problems:
            if found is not None:
                raise SaveError(found)

    def _opened(self, outcome: tuple[Any, str | None]) -> Any:
        value, problem = outcome
        if problem is not None:
            raise SaveError(problem)
        return value


def _event_now(place: Context) -> torch.cuda.Event | None:
    """Return what marks this moment on the device, or None where values are there when a call returns."""
    if place.device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(place.device))
    return event  # type: ignore[no-any-return]
