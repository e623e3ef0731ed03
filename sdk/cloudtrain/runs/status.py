"""A run's status: state, reason, times, costs and warnings."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudtrain.errors import EXIT_DONE, EXIT_RUN_ENDED_EARLY, EXIT_RUN_FAILED
from cloudtrain.planning.warm_pool import WarmPool
from cloudtrain.runs.host_reports import file_warnings, rank_warnings
from cloudtrain.runs.progress import MissedCheckpoint, Progress
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.redaction import redact


class State(enum.StrEnum):
    """What a run is doing."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    INTERRUPTED = "INTERRUPTED"
    """Spot capacity was taken away; the run waits for it to come back and then goes on."""

    UNKNOWN = "UNKNOWN"
    """The files of the run cannot be read. Only lists have such runs; other commands report the reason as an error."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self in (State.SUCCEEDED, State.FAILED, State.STOPPED)

    @property
    def exit_code(self) -> int | None:
        """Exit code of a command that followed the run to this state; None while it goes on."""
        if not self.is_final:
            return None
        if self is State.SUCCEEDED:
            return EXIT_DONE
        return EXIT_RUN_FAILED if self is State.FAILED else EXIT_RUN_ENDED_EARLY


HIGH_DATA_WAIT = 0.2
"""Share of a step that is told: the devices wait for it."""

_WHY_MISSED = {
    "late": "the one before is still being written",
    "failed": "it could not be written",
    "stalled": "it is written and makes no progress",
}


@dataclass(frozen=True)
class Phase:
    """One stage of a run's life, such as `Pending` or `Training`, by the name that SageMaker gives it.

    Attributes:
        ended: None while it lasts.
        detail: What the service says of it.
        is_billed: Whether instances are paid for in it.
    """

    name: str
    started: datetime
    ended: datetime | None = None
    detail: str = ""
    is_billed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {
            "name": self.name,
            "started": self.started.isoformat(),
            "ended": self.ended.isoformat() if self.ended else None,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Waiting:
    """What a run waits for before it can train.

    Attributes:
        types: Instance types that it may get, the preferred one first.
        instances: How many of them.
        until: When it gives up, or None where nothing limits the wait.
        limit: The field of job.yaml that does, such as `cluster.max_pending`.
    """

    types: tuple[str, ...]
    instances: int
    until: datetime | None = None
    limit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {
            "types": list(self.types),
            "instances": self.instances,
            "until": self.until.isoformat() if self.until else None,
            "limit": self.limit or None,
        }


@dataclass(frozen=True)
class Status:
    """The truth about one run at one moment.

    Attributes:
        reason: Why it is in this state, for people; empty when there is nothing to say.
        created: When it was submitted, or None where that is not told.
        started: When training started, or None.
        ended: When the run ended, or None.
        billable_seconds: Seconds that are charged per instance, so far; 0 for local runs.
        cost_usd: What the run has cost so far, or None when the price is unknown; 0.0 for local runs.
        instance_type: The type it runs on; with `cluster.prefer` the one that was taken.
        usd_per_hour: Price of all instances together, or None when it is unknown.
        phases: The stages it went through; empty where the backend keeps none.
        warm_pool: The cluster that it leaves behind, or None where it leaves none.
        waiting: What it waits for, or None when it does not.
        is_spot: Whether it runs on spare capacity: until the end, costs are those on demand then, which are higher.
        ends_by: When its limits end it, or None when nothing does or it does not run.
        artifacts: Where model and outputs lie, by name.
    """

    run: str
    backend: str
    state: State
    reason: str = ""
    created: datetime | None = None
    started: datetime | None = None
    ended: datetime | None = None
    billable_seconds: int = 0
    cost_usd: float | None = None
    instance_type: str | None = None
    instances: int | None = None
    usd_per_hour: float | None = None
    phases: tuple[Phase, ...] = ()
    warm_pool: WarmPool | None = None
    waiting: Waiting | None = None
    is_spot: bool = False
    ends_by: datetime | None = None
    world_size: int | None = None
    progress: Progress = dataclasses.field(default_factory=Progress)
    artifacts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # A script's own last words are in it.
        object.__setattr__(self, "reason", redact(self.reason))

    @property
    def exit_code(self) -> int | None:
        """0 succeeded, 4 failed, 5 ended early; None while the run goes on."""
        return self.state.exit_code

    @property
    def is_ending(self) -> bool:
        """Whether the run has ended, or is being ended: its reason tells why then, else what it does."""
        return self.state.is_final or self.state is State.STOPPING

    @property
    def reference(self) -> str:
        """`<backend>:<run id>`, the name by which every verb finds the run."""
        return f"{self.backend}:{self.run}"

    def checkpoint_age(self, now: float | None = None) -> float | None:
        """Return the seconds since the last complete checkpoint, up to the run's end; None when there is none."""
        if self.progress.checkpoint is None:
            return None
        moment = self.ended.timestamp() if self.ended is not None else (time.time() if now is None else now)
        return max(0.0, moment - self.progress.checkpoint.time)

    def alarms(self, now: float | None = None) -> tuple[str, ...]:
        """Return what is wrong with the run's checkpoints, one sentence each. `now` is in seconds since the epoch."""
        missed = self.progress.missed
        late = [] if missed is None or not missed.alarm else [self._describe_missed(missed, now)]
        return (*late, *self.progress.damaged)

    def warnings(self) -> tuple[str, ...]:
        """Return what makes the run slower than it could be, one sentence each."""
        progress, told = self.progress, []
        wait = progress.metrics.get("train/data_wait") or 0.0
        is_first = (progress.last_step or 0) <= 1  # loader workers start in it
        if wait > HIGH_DATA_WAIT and not is_first and not self.state.is_final:
            told.append(f"{wait:.0%} of each step waits for data: more train.workers, or data nearer to the instance")
        if progress.slow_network is not None:
            told.append(progress.slow_network)
        return (*told, *(() if self.state.is_final else progress.slow_ranks.values()))

    def host_warnings(self) -> tuple[str, ...]:
        """Return what its hosts report of ranks that train alone and of files that are not kept, one sentence each."""
        progress, found = self.progress, list[str]()
        if self.state is not State.FAILED:  # there the failure is what counts
            found += rank_warnings(progress.host_ranks.values(), has_checkpoint=progress.checkpoint is not None)
        if self.state.is_final:
            found += file_warnings(progress.host_files.values(), has_succeeded=self.state is State.SUCCEEDED)
        return tuple(found)

    def _describe_missed(self, missed: MissedCheckpoint, now: float | None) -> str:
        checkpoint, age = self.progress.checkpoint, self.checkpoint_age(now)
        last = "there is none yet"
        if checkpoint is not None and age is not None:
            when = "before the end" if self.ended is not None else "ago"
            last = f"the last: step {checkpoint.step:,}, {format_duration(age)} {when}"
        why = ": ".join(text for text in (_WHY_MISSED.get(missed.reason, missed.reason), missed.detail) if text)
        intervals = f"{missed.count} interval{'' if missed.count == 1 else 's'}"
        return f"no checkpoint for {intervals} ({last}): {why or 'nobody knows why'}"

    def usd_at_risk(self, now: float | None = None) -> float | None:
        """Return what would be paid again if the run died now; None when it has ended or the price is unknown.

        It is the price of the time since the last complete checkpoint, or since instances were last taken: what an
        interruption has cost is lost already, and waiting for instances costs nothing.
        """
        if self.usd_per_hour is None or self.started is None or self.state.is_final:
            return None
        moment = time.time() if now is None else now
        began = self._paid_since()
        if began is None:
            return 0.0
        age = self.checkpoint_age(moment)
        lost = max(0.0, moment - began.timestamp())
        return round(self.usd_per_hour * (lost if age is None else min(age, lost)) / 3600, 2)

    def _paid_since(self) -> datetime | None:
        """Return since when instances have been paid for without a break, or None when none are."""
        began = None if self.phases else self.started
        for phase in self.phases:
            began = (began or phase.started) if phase.is_billed else None
        return began

    def cost_by(self, now: float, *, told: float) -> float | None:
        """Return what the run has cost at a moment after this status was told; both in seconds since the epoch."""
        if self.cost_usd is None or self.usd_per_hour is None or self.state.is_final or self._paid_since() is None:
            return self.cost_usd
        return self.cost_usd + self.usd_per_hour * max(0.0, now - told) / 3600

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return how long training will take from now on; None when it does not run or that is unknown."""
        began, marks = self._paid_since(), self.progress.marks
        is_of_this_attempt = began is None or (bool(marks) and marks[-1][0] >= began.timestamp())
        if self.state is not State.RUNNING or not is_of_this_attempt:
            return None
        return self.progress.seconds_left(time.time() if now is None else now)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return the object that `status --json` prints. `now` is in seconds since the epoch."""
        checkpoint = self.progress.checkpoint
        age = self.checkpoint_age(now)
        left = self.seconds_left(now)
        return {
            "run": self.run,
            "backend": self.backend,
            "state": str(self.state),
            "reason": self.reason,
            "exit_code": self.exit_code,
            "created": self.created.isoformat() if self.created else None,
            "started": self.started.isoformat() if self.started else None,
            "ended": self.ended.isoformat() if self.ended else None,
            "billable_seconds": self.billable_seconds,
            "cost_usd": self.cost_usd,
            "usd_per_hour": self.usd_per_hour,
            "usd_at_risk": self.usd_at_risk(now),
            "instance_type": self.instance_type,
            "instances": self.instances,
            "phases": [phase.to_json() for phase in self.phases],
            "warm_pool": self.warm_pool.to_json() if self.warm_pool else None,
            "waiting": self.waiting.to_json() if self.waiting else None,
            "spot": self.is_spot,
            "ends_by": self.ends_by.isoformat() if self.ends_by else None,
            "world_size": self.world_size,
            "first_step": self.progress.first_step,
            "last_step": self.progress.last_step,
            "total_steps": self.progress.total_steps,
            "seconds_left": None if left is None else round(left),
            "last_epoch": self.progress.last_epoch,
            "last_checkpoint": None
            if checkpoint is None or age is None
            else {
                "uri": checkpoint.uri,
                "step": checkpoint.step,
                "age_seconds": round(age, 1),
            },
            "alarms": list(self.alarms(now)),
            "warnings": [*self.warnings(), *self.host_warnings()],
            "metrics": dict(self.progress.metrics),
            "artifacts": dict(self.artifacts),
        }
