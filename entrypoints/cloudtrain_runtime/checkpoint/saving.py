"""Asynchronous saving: training waits at most for a copy to host memory, never for the storage.

A thread of its own performs each save, on all ranks together, in five phases: plan, copy, write, commit, delete expired
checkpoints. After each phase the ranks agree that it succeeded everywhere, over a process group that nothing else uses.
The next optimizer step waits only for the end of the copy.

Host memory per rank: one copy of what this rank writes (replicated state is divided between the ranks), reused by the
next save, and the parts of an upload that are in flight (s3/uploads.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cloudtrain_runtime.checkpoint.listing import mark_damaged
from cloudtrain_runtime.checkpoint.rank_coordinator import RankCoordinator, SaveError
from cloudtrain_runtime.checkpoint.retention import expired_folders
from cloudtrain_runtime.checkpoint.safe_metadata import read_metadata
from cloudtrain_runtime.checkpoint.shards import (
    METADATA_FILE,
    CheckpointWriter,
    ShardPlan,
    StagingPlanner,
)
from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.checkpoint.training_state import States, rng_sources
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract import GRACE_VARIABLE, STOP_GRACE_SECONDS
from cloudtrain_runtime.contract.attempts import refuse_replaced
from cloudtrain_runtime.contract.manifest import Manifest, StoredFile
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.process.stop_notice import StopNotice

_ALARM_AFTER = 3
"""Number of consecutive failed saves after which the event carries an alarm."""

_COLLECTIVE_TIMEOUT_SECONDS = 24 * 3600
"""How long ranks wait for the slowest upload. A rank that has ended is noticed at once. After this timeout the process
group is unusable, so no later save of the process would succeed."""

_POLL_SECONDS = 5.0

_STALL_SECONDS = 900.0
"""How long ranks with nothing else to do wait while no rank makes progress: longer than a client's retries."""

_LEAVE_MARGIN_SECONDS = 10.0
"""Part of the grace time that is reserved for exiting before SIGKILL."""

_PREVIOUS_SAVE_SECONDS = 2.0
"""How long a save waits for the previous one, so that short runs with short intervals get every checkpoint."""

_CHECK_STORAGE = "does the storage answer? Check the network and the endpoint, or the disk"


@dataclass
class _Save:
    """A save in progress. `copied` is set when the live tensors are no longer needed."""

    step: int
    state: Mapping[str, Any]
    started_at: float
    ready: torch.cuda.Event | None
    stall_seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    copies: torch.cuda.Event | None = None


class CheckpointSaver:
    """Writes the checkpoints of one run. All ranks together create it and call `save` and `wait_for_save`.

    Args:
        attempt: 8 hex digits, the same on all ranks, and unique to this start of the ranks.
        group: CPU process group for the calling threads; None for one rank.
        notice: After this host's stop notice, time is limited.
        keep: Number of complete checkpoints to keep.
        mesh: Size of each dimension of parallelism by name, for the manifest.

    Attributes:
        last_step: Step of the newest complete checkpoint of this attempt, or of the one that it resumed from.
    """

    def __init__(
        self,
        storage: Storage,
        context: Context,
        attempt: str,
        group: dist.ProcessGroup | None,
        notice: StopNotice,
        *,
        keep: int,
        mesh: Mapping[str, int],
    ) -> None:
        self.last_step: int | None = None
        self.step_in_progress = -1
        self._storage = storage
        self._context = context
        self._attempt = attempt
        self._group = group
        self._notice = notice
        self._keep = keep
        self._mesh = mesh
        self._missed = 0
        self._has_completed = False
        self._last_failure = self._reported = ""
        timeout = timedelta(seconds=_COLLECTIVE_TIMEOUT_SECONDS)
        own_group = None
        if context.world_size > 1:
            own_group = dist.new_group(backend="gloo", timeout=timeout)
        self._ranks = RankCoordinator(context, own_group)
        self._planner = StagingPlanner(self._ranks)
        self._is_readable = False
        self._unreadable_reason = ""
        self._save: _Save | None = None
        self._thread: threading.Thread | None = None
        self._bytes = 0
        self._bytes_at_last_check = -1
        self._progressed_at = time.monotonic()

    def save(
        self,
        step: int,
        states: Callable[[], tuple[States, frozenset[str]]],
        state: Mapping[str, Any],
        *,
        wait: bool = False,
    ) -> bool:
        """Start to write a checkpoint, with the arguments and the result of `CheckpointManager.save`.

        While the previous save is in progress no other is started, unless `wait` is set, which waits for both.
        `states` returns model, optimizer and the rest, as `training_state.collect_states` does, and the names of values
        that each rank may have its own of: the lowest rank's value is saved.
        """
        started_at = time.monotonic()
        if wait:
            if not self.wait_for_save(step=step):
                return False
        else:
            self._join(_PREVIOUS_SAVE_SECONDS)
            # Rank 0's answer: threads end at different times, and all ranks must decide alike.
            if gather(self.is_busy, self._context, self._group)[0]:
                self._record_late(step)
                return False
        self._join()
        self._save = None
        values, unshared = states()
        save = _Save(step, dict(state), started_at, _record_cuda_event(self._context))
        self._save = save
        self.step_in_progress = step
        self._bytes = 0
        self._bytes_at_last_check = -1
        self._note_progress()
        self._thread = threading.Thread(
            target=self._run, args=(save, values, unshared), name="checkpoint", daemon=True
        )
        self._thread.start()
        save.stall_seconds += time.monotonic() - started_at
        if wait:
            self.wait_for_save()
            return self.last_step == step
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's steps wait until the values that they change have been copied."""
        optimizer.register_step_pre_hook(lambda *_: self.wait_for_copy())

    def wait_for_copy(self) -> None:
        """Wait until the copy is complete. On CUDA the device waits, not the caller."""
        self._require_readable()
        save = self._save
        if save is None:
            return
        started_at = time.monotonic()
        save.copied.wait()
        if save.copies is not None:
            torch.cuda.current_stream(self._context.device).wait_event(save.copies)
        save.stall_seconds += time.monotonic() - started_at
        self._save = None

    def wait_for_save(self, *, step: int | None = None) -> bool:
        """Wait, on all ranks together, for the save in progress; return whether it has ended.

        The wait ends early when no rank makes progress for a long time, and, after a stop notice, early enough to exit
        before the container is killed.

        Args:
            step: Step of the save to report as missed in that case; by default that of the save in progress.
        """
        grace_seconds = float(os.environ.get(GRACE_VARIABLE, STOP_GRACE_SECONDS))
        leave_seconds = max(1.0, grace_seconds - _LEAVE_MARGIN_SECONDS)
        started_at = time.monotonic()
        while True:
            self._join(_POLL_SECONDS)
            heartbeat.refresh()
            now = time.monotonic()
            own = (self.is_busy, self._notice.is_given, now - started_at, now - self._progressed_at)
            # All ranks have the same values, so all decide alike.
            busy, stopping, waited, idle = zip(
                *gather(own, self._context, self._group), strict=True
            )
            if not any(busy):
                self._require_readable()
                return True
            must_leave = any(stopping) and waited[0] > leave_seconds
            if must_leave or min(idle) > _STALL_SECONDS:
                self._record_abandoned(self.step_in_progress if step is None else step)
                return False

    def wait_for_save_alone(self, timeout_seconds: float) -> bool:
        """Wait for the save in progress without the other ranks, up to a timeout; return whether it has ended."""
        started_at = time.monotonic()
        while self.is_busy and (left := timeout_seconds - (time.monotonic() - started_at)) > 0:
            self._join(min(_POLL_SECONDS, left))
            heartbeat.refresh()
        return not self.is_busy

    def require_completed(self) -> None:
        """End a run that has completed none of the checkpoints that were due.

        Raises:
            CheckpointError: no checkpoint was completed.
        """
        if self._last_failure and not self._has_completed:
            raise CheckpointError(
                f"none of this run's checkpoints was completed in {self._storage.uri}; the last one was due at "
                f"{self._last_failure}",
                is_common=True,
            )

    def _note_progress(self) -> None:
        self._progressed_at = time.monotonic()

    def _join(self, timeout_seconds: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _record_abandoned(self, step: int) -> None:
        if step != self.last_step:
            detail = (
                f"{self._describe_progress()}, and it is waited for no longer: {_CHECK_STORAGE}"
            )
            self._record_failure(step, "stalled", detail)
        elif self._context.is_main:
            log_line(f"older checkpoints are not deleted now: {_CHECK_STORAGE}")

    def _record_late(self, step: int) -> None:
        is_stalled = self._bytes == self._bytes_at_last_check
        self._bytes_at_last_check = self._bytes
        if is_stalled:
            self._record_failure(step, "stalled", f"{self._describe_progress()}: {_CHECK_STORAGE}")
        else:
            detail = f"{self._describe_progress()}: save less often, or to a faster storage"
            self._record_failure(step, "late", detail)

    def _describe_progress(self) -> str:
        return (
            f"the save of step {self.step_in_progress} is still in progress: {self._bytes / 1e6:,.0f} MB written by "
            f"rank 0, the last {time.monotonic() - self._progressed_at:,.0f} s ago"
        )

    def _record_failure(self, step: int, reason: str, detail: str) -> None:
        self._missed += 1
        self._last_failure = f"step {step} ({reason}): {detail}"
        # The cause has no ranks, steps and times, which differ between two reports of it.
        cause = re.sub(r"\d+", "", f"{reason} {detail}")
        is_repeated = cause == self._reported and self._missed != _ALARM_AFTER
        self._reported = cause
        if self._context.is_main:
            alarm = self._missed >= _ALARM_AFTER
            values = {"missed": self._missed, "alarm": alarm, "repeated": is_repeated}
            emit("checkpoint_missed", step=step, reason=reason, detail=detail, **values)

    def _run(self, save: _Save, states: States, unshared: frozenset[str]) -> None:
        try:
            folder, shards = self._write(save, states, unshared)
        except SaveError as error:
            self._record_failure(save.step, "failed", str(error))
        except Exception as error:  # noqa: BLE001 (a broken process group, which the step's own collectives report)
            self._record_failure(save.step, "failed", f"{type(error).__name__}: {error}")
        else:
            self.last_step = save.step
            _note_completed()
            damage = self._delete_expired(save, folder, shards)
            if damage:
                self.last_step = None
                detail = f"the data read back differs from the data written: {damage[0]}"
                self._record_failure(save.step, "failed", detail)
                return
            self._missed = 0
            self._reported = ""
            self._has_completed = True
        finally:
            save.copied.set()

    def _write(
        self, save: _Save, states: States, unshared: frozenset[str]
    ) -> tuple[str, CheckpointWriter]:
        """Plan, copy, write and commit; return the checkpoint's folder name and its writer."""
        plan = self._planner.divide(states, unshared)
        self._ranks.run_on_all(lambda: self._copy(save, plan))
        save.copied.set()
        writer = {"run": self._context.run, "attempt": self._attempt, "step": save.step}
        reserved = self._ranks.broadcast_from_main(lambda: self._storage.reserve(save.step, writer))
        shards = CheckpointWriter(
            storage=self._storage,
            folder=reserved,
            note_bytes=self._count_bytes,
        )
        try:
            written = self._ranks.gather_on_main(
                lambda: (self._write_shards(save, shards, plan), shards.files)
            )
            self._write_metadata(reserved, shards, plan, written)
            folder = self._ranks.broadcast_from_main(
                lambda: self._commit(save, reserved, shards, written)
            )
        except SaveError:
            if self._context.is_main:
                self._storage.abandon(reserved)
            raise
        return folder, shards

    def _copy(self, save: _Save, plan: ShardPlan) -> None:
        if save.ready is None:
            self._planner.stage(plan.own)
            return
        stream: Any = torch.cuda.Stream(self._context.device)  # type: ignore[no-untyped-call]
        stream.wait_event(save.ready)
        with torch.cuda.stream(stream):
            self._planner.stage(plan.own)
        copies: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copies.record(stream)
        save.copies = copies

    def _write_shards(self, save: _Save, shards: CheckpointWriter, plan: ShardPlan) -> Any:
        if save.copies is not None:
            save.copies.synchronize()
        return shards.write_data(plan.own, self._planner).wait()

    def _write_metadata(
        self,
        reserved: str,
        shards: CheckpointWriter,
        plan: ShardPlan,
        written: list[tuple[Any, Any]],
    ) -> None:
        """Write the metadata; after the first save also read it back as a load does.

        A version of PyTorch may write metadata that this runtime cannot read. The run then ends at its next step,
        because none of its checkpoints could ever be loaded.
        """

        def finish() -> str:
            metadata: Any = plan.metadata
            shards.finish(replace(metadata), [results for results, _ in written])
            if self._is_readable:
                return ""
            try:
                read_metadata(self._storage.read(reserved, METADATA_FILE) or b"")
            except CheckpointError as error:
                return str(error)
            return ""

        self._unreadable_reason = self._ranks.broadcast_from_main(finish)
        if self._unreadable_reason:
            raise SaveError(self._unreadable_reason)
        self._is_readable = True

    def _require_readable(self) -> None:
        """End a run whose checkpoints could not be loaded."""
        if self._unreadable_reason:
            raise CheckpointError(
                f"a checkpoint saved with PyTorch {torch.__version__} could not be loaded again: "
                f"{self._unreadable_reason}. "
                "The run ends here, because it could not be resumed. What to do: use an older PyTorch "
                "(cluster.framework or cluster.image), or a newer cloudtrain"
            )

    def _commit(
        self, save: _Save, reserved: str, shards: CheckpointWriter, written: list[tuple[Any, Any]]
    ) -> str:
        """Write the manifest, which makes the checkpoint complete; return the checkpoint's folder name."""
        files: dict[str, StoredFile] = {}
        for _, of_rank in written:
            files |= of_rank
        # The metadata is written after the ranks' files were listed.
        files |= shards.files
        manifest = Manifest(
            run=self._context.run,
            attempt=self._attempt,
            step=save.step,
            time=time.time(),
            world_size=self._context.world_size,
            mesh=dict(self._mesh),
            rng={"ranks": self._context.world_size, "sources": rng_sources(self._context)},
            torch=torch.__version__,
            code=self._context.code,
            request=self._context.request,
            state=save.state,
            files=files,
            training=self._context.training,
        )
        mismatches = manifest.file_mismatches(self._storage.sizes(reserved))
        if mismatches:
            wrong = "; ".join(mismatches)
            raise OSError(
                f"{self._storage.uri} does not hold what was written to it, check it: {wrong}"
            )
        refuse_replaced(os.environ)
        name = self._storage.commit(reserved, manifest.to_json())
        emit(
            "checkpoint",
            step=save.step,
            uri=f"{self._storage.uri}/{name}",
            bytes=manifest.total_bytes,
            seconds=time.monotonic() - save.started_at,
            stall_seconds=save.stall_seconds,
        )
        return name

    def _count_bytes(self, bytes_: int) -> None:
        self._bytes += bytes_
        self._note_progress()

    def _delete_expired(self, save: _Save, folder: str, shards: CheckpointWriter) -> list[str]:
        """Delete expired checkpoints after each rank has read back what it wrote; return descriptions of any damage.

        The new checkpoint is complete: an error here, even a broken process group, leaves it so.
        """
        damage: list[str] = []
        try:
            run = self._context.run
            storage = self._storage
            expired = self._ranks.broadcast_from_main(
                lambda: expired_folders(
                    storage, run=run, step=save.step, keep=self._keep, state=save.state
                )
            )
            if expired:
                found = self._ranks.all_gather(
                    lambda: list(
                        find_damage(storage, folder, shards.files, on_block=self._note_progress)
                    )
                )
                damage = [fault for faults in found for fault in faults]
                self._ranks.broadcast_from_main(
                    lambda: self._finish_deletion(save.step, folder, damage, expired)
                )
        except (SaveError, RuntimeError) as error:
            if self._context.is_main:
                log_line(f"older checkpoints are not deleted now: {error}")
        return damage

    def _finish_deletion(
        self, step: int, folder: str, damage: list[str], expired: list[str]
    ) -> None:
        if damage:
            emit(
                "checkpoint_damaged",
                step=step,
                uri=f"{self._storage.uri}/{folder}",
                detail="; ".join(damage),
            )
            mark_damaged(self._storage, folder, damage)
            return
        for name in expired:
            self._storage.delete(name)


def _note_completed() -> None:
    """Let the launcher know that a checkpoint is complete. Outside of a run there is no folder for it."""
    saved = ml_tree(os.environ).saved
    # A full disk must not end a run whose checkpoint is elsewhere.
    with contextlib.suppress(OSError):
        if saved.parent.is_dir():
            saved.touch()


def _record_cuda_event(context: Context) -> torch.cuda.Event | None:
    """Return an event that marks the present point of the device's stream; None on a CPU, which needs none."""
    if context.device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(context.device))
    return event  # type: ignore[no-any-return]
