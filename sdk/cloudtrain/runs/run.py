"""`Run`: handle of something submitted, and the truth about it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from cloudtrain.aws.retry import Backoff, OutageTolerance
from cloudtrain.errors import EXIT_DONE, EXIT_RUN_ENDED_EARLY, EXIT_RUN_FAILED, RunNotFoundError, UnreachableError
from cloudtrain.planning.warm_pool_state import WarmPool
from cloudtrain.runs.host_reports import (
    HostFiles,
    HostRanks,
    file_warnings,
    rank_warnings,
    read_host_files,
    read_host_ranks,
)
from cloudtrain.support.run_id import is_run_id, submitted_at
from cloudtrain.support.units import format_duration, parse_duration
from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event
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


def parse_reference(text: str) -> tuple[str | None, str]:
    """Split `<backend>:<run id>`, or a bare run id, into backend and id.

    Raises:
        RunNotFoundError: the text is neither.
    """
    backend, colon, run = text.rpartition(":")
    if not is_run_id(run) or backend not in ("", "local", "sagemaker", "sandbox"):
        raise RunNotFoundError(
            f"{text!r} is not a run id", "run ids look like digits-261120-101500-1a2b3c; see: cloudtrain list"
        )
    return (backend if colon else None), run


# ---------------------------------------------------------------- progress


@dataclass(frozen=True)
class LastCheckpoint:
    """The newest complete checkpoint. `time` is in seconds since the epoch."""

    uri: str
    step: int
    time: float


@dataclass(frozen=True)
class Missed:
    """A checkpoint that was due and did not come.

    Attributes:
        step: Of which step.
        reason: `late`, `failed` or `stalled`.
        detail: What went wrong.
        count: How many in a row.
        alarm: Whether these are too many.
    """

    step: int
    reason: str
    detail: str
    count: int
    alarm: bool


@dataclass(frozen=True)
class Progress:
    """What the event lines of a run say so far.

    Attributes:
        first_step: Step that the run started from: 0, or that of the checkpoint it resumed.
        checkpoint: The newest complete checkpoint that is not known to be damaged.
        checkpoints_before: The last few before it.
        missed: The newest of the checkpoints that did not come since then.
        damaged: What was found damaged since then, one sentence each.
        metrics: Latest value by `split/name`; None for one that is not finite.
        failures: Failure events, one per host that reported one.
        slow_ranks: By rank, what is told of one that keeps the others waiting.
        bandwidth_gbps: What an all-reduce over all ranks achieved at the start, in Gbit/s.
        slow_network: What is wrong with that, or None.
        host_ranks: By host, what it reported last of a script's ranks.
        host_files: By host, what it reported of the job's files when its ranks had ended.
        marks: Times (seconds since the epoch) and steps of the last minutes, since the workers started last; the newest
            is last.
    """

    last_step: int | None = None
    first_step: int | None = None
    last_epoch: int | None = None
    total_steps: int | None = None
    world_size: int | None = None
    device: str | None = None
    checkpoint: LastCheckpoint | None = None
    checkpoints_before: tuple[LastCheckpoint, ...] = ()
    missed: Missed | None = None
    damaged: tuple[str, ...] = ()
    resumed_from: str | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    failures: tuple[Mapping[str, Any], ...] = ()
    slow_ranks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    bandwidth_gbps: float | None = None
    slow_network: str | None = None
    host_ranks: Mapping[str, HostRanks] = dataclasses.field(default_factory=dict)
    host_files: Mapping[str, HostFiles] = dataclasses.field(default_factory=dict)
    marks: tuple[tuple[float, int], ...] = ()

    def seconds_left(self, now: float) -> float | None:
        """Return how long the steps that are left will take at the rate of the last minutes; None when that is unknown.

        Evaluations and checkpoints are in the rate. When no step has come for much longer than usual, the rate falls.
        """
        if self.total_steps is None or len(self.marks) < 2:  # noqa: PLR2004 (a rate has two ends)
            return None
        (began, first), (newest, last) = self.marks[0], self.marks[-1]
        span, idle = newest - began, max(0.0, now - newest)
        if span <= 0 or last <= first:
            return None
        steps, usual = max(0, self.total_steps - last), span / (len(self.marks) - 1)
        if idle > _STALLS_AFTER * usual or idle > steps * span / (last - first):
            span, idle = span + idle, 0.0
        return steps * span / (last - first) - idle


_RATE_SECONDS = 600.0
"""How far back the rate of steps looks."""

_MARK_SECONDS = 10.0
"""Least time between two marks, so that a fast run has not many of them."""

_LEAST_MARKS = 5
_CHECKPOINTS_BEFORE = 4
"""How many checkpoints may turn out to be damaged, one after the other, and there still is one to tell of."""

_STALLS_AFTER = 3.0
"""A run is behind its rate when the next step takes this many times as long as steps usually do."""


def fold_events(events: Iterable[Mapping[str, Any]], progress: Progress = Progress()) -> Progress:
    """Return the progress that a run's events report, in their order.

    Args:
        events: Events as `parse_event` and `check_event` return them: their fields have the types of the schema.
        progress: What the events before them reported.
    """
    for kind, group in itertools.groupby(events, key=lambda event: event["event"]):
        if kind == "step":
            progress = _fold_steps(progress, group)
        elif (fold := _FOLDS.get(kind)) is not None:
            progress = functools.reduce(fold, group, progress)
    return progress


def _fold_started(progress: Progress, event: Mapping[str, Any]) -> Progress:
    # After a restart the same events come again; metrics of the earlier attempt stay until new ones arrive.
    return dataclasses.replace(
        progress,
        total_steps=event.get("total_steps"),
        world_size=event.get("world_size"),
        device=event.get("device"),
        first_step=event.get("step", 0),
        last_step=event.get("step", 0),
        resumed_from=event.get("resumed_from"),
        failures=(),
        slow_ranks={},
        marks=(),
    )


def _fold_step(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return _fold_steps(progress, (event,))


def _fold_steps(progress: Progress, events: Iterable[Mapping[str, Any]]) -> Progress:
    """Fold events of steps, of which there are many: one new record for all of them."""
    metrics, marks = dict(progress.metrics), progress.marks
    last_step, last_epoch = progress.last_step, progress.last_epoch
    for event in events:
        last_step, last_epoch = event.get("step", last_step), event.get("epoch", last_epoch)
        marks = _add_mark(marks, event)
        for name in _STEP_METRICS:
            value = event.get(name)
            if value is not None or (name in event and name in _ALWAYS_KNOWN):
                metrics[f"train/{name}"] = value
        split = event.get("split", {})
        metrics |= {f"train/{part}_seconds": split[part] for part in STEP_PARTS if split.get(part) is not None}
    return dataclasses.replace(progress, last_step=last_step, last_epoch=last_epoch, metrics=metrics, marks=marks)


_STEP_METRICS = (
    "loss",
    "samples_per_second",
    "tokens_per_second",
    "grad_norm",
    "data_wait",
    "mfu",
    "memory_bytes",
)
_ALWAYS_KNOWN = ("loss", "grad_norm")
"""Metrics of a step that are null only where they are not finite. Others are null where they are not known."""

STEP_PARTS = ("data", "forward", "backward", "optimizer", "checkpoint")
"""What the time of a step goes to; `train/<part>_seconds` are the metrics."""


def _add_mark(marks: tuple[tuple[float, int], ...], event: Mapping[str, Any]) -> tuple[tuple[float, int], ...]:
    time_, step = event.get("time"), event.get("step")
    if time_ is None or step is None:
        return marks
    kept = marks[:-1] if len(marks) > 1 and marks[-1][0] - marks[-2][0] < _MARK_SECONDS else marks
    oldest = time_ - _RATE_SECONDS
    first = next((index for index in range(len(kept)) if kept[index][0] >= oldest), len(kept))
    return (*kept[max(0, min(first, len(kept) + 1 - _LEAST_MARKS)) :], (time_, step))


def _fold_evaluation(progress: Progress, event: Mapping[str, Any]) -> Progress:
    split = event.get("split", "validation")
    values = {f"{split}/{name}": value for name, value in event.items() if name not in EVALUATION_FIELDS}
    return dataclasses.replace(progress, metrics={**progress.metrics, **values})


EVALUATION_FIELDS = frozenset({"event", "split", "step", "epoch", "time", "samples", "host", "rank"})
"""Fields of an evaluation that are no metrics."""


def _fold_checkpoint(progress: Progress, event: Mapping[str, Any]) -> Progress:
    checkpoint = LastCheckpoint(event["uri"], event["step"], event["time"])
    before = (*progress.checkpoints_before, *([progress.checkpoint] if progress.checkpoint else []))
    return dataclasses.replace(
        progress,
        checkpoint=checkpoint,
        checkpoints_before=before[-_CHECKPOINTS_BEFORE:],
        missed=None,
        damaged=(),
        last_step=max(event["step"], progress.last_step or 0),
    )


def _fold_missed(progress: Progress, event: Mapping[str, Any]) -> Progress:
    missed = Missed(
        step=event["step"],
        reason=event.get("reason", ""),
        detail=event.get("detail") or "",
        count=event.get("missed", 1),
        alarm=event.get("alarm", False),
    )
    return dataclasses.replace(progress, missed=missed)


def _fold_damaged(progress: Progress, event: Mapping[str, Any]) -> Progress:
    uri = event["uri"]
    told = f"the checkpoint of step {event['step']:,} is damaged and set aside, at {uri}: {event.get('detail') or '?'}"
    damaged = (*(text for text in progress.damaged if text != told), told)
    whole = [each for each in (*progress.checkpoints_before, progress.checkpoint) if each and each.uri != uri]
    return dataclasses.replace(
        progress,
        checkpoint=whole[-1] if whole else None,
        checkpoints_before=tuple(whole[:-1]),
        damaged=damaged,
    )


def _fold_straggler(progress: Progress, event: Mapping[str, Any]) -> Progress:
    rank = event["rank"]
    others = {other: text for other, text in progress.slow_ranks.items() if other != rank}
    told = f"rank {rank} on {event['host']} takes {event['ratio']:.2f} x the median of all ranks, most of it in "
    mine = {} if event.get("is_over") else {rank: told + event["part"]}
    return dataclasses.replace(progress, slow_ranks={**others, **mine})


def _fold_bandwidth(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(progress, bandwidth_gbps=event["gbps"], slow_network=event.get("warning"))


def _fold_finished(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(
        _fold_step(progress, event),
        last_epoch=event.get("epochs", progress.last_epoch),
    )


def _fold_failed(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(progress, failures=(*progress.failures, event))


def _fold_outputs(progress: Progress, event: Mapping[str, Any]) -> Progress:
    report = read_host_files(event)
    return dataclasses.replace(progress, host_files={**progress.host_files, report.host: report})


def _fold_ranks(progress: Progress, event: Mapping[str, Any]) -> Progress:
    report = read_host_ranks(event)
    return dataclasses.replace(progress, host_ranks={**progress.host_ranks, report.host: report})


_FOLDS: dict[str, Callable[[Progress, Mapping[str, Any]], Progress]] = {
    "started": _fold_started,
    "step": _fold_step,
    "evaluation": _fold_evaluation,
    "checkpoint": _fold_checkpoint,
    "checkpoint_missed": _fold_missed,
    "checkpoint_damaged": _fold_damaged,
    "straggler": _fold_straggler,
    "bandwidth": _fold_bandwidth,
    "finished": _fold_finished,
    "stopped": _fold_step,
    "failed": _fold_failed,
    "outputs": _fold_outputs,
    "ranks": _fold_ranks,
}


# ---------------------------------------------------------------- status

MUCH_DATA_WAIT = 0.2
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
    progress: Progress = Progress()
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
        if wait > MUCH_DATA_WAIT and not is_first and not self.state.is_final:
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

    def _describe_missed(self, missed: Missed, now: float | None) -> str:
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


# ---------------------------------------------------------------- which runs


def when_submitted(status: Status) -> datetime:
    """Return by what lists are ordered; a run that does not tell it is older than all others."""
    return status.created or datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class RunFilter:
    """Which runs are wanted. What is not given is not asked for.

    Attributes:
        name: Part of the run id, as it is written.
        states: Any of these.
        tags: All of these, by key.
        since: Submitted then or later.
        until: Submitted before then.
    """

    name: str = ""
    states: frozenset[State] = frozenset()
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    since: datetime | None = None
    until: datetime | None = None

    def accepts(self, status: Status) -> bool:
        """Whether a run is wanted, as far as its status tells; a status holds no tags."""
        is_wanted = not self.states or status.state in self.states
        return is_wanted and self.accepts_run(status.run, status.created)

    def accepts_run(self, run: str, submitted: datetime | None = None) -> bool:
        """Whether a run of this id is wanted, whatever its state.

        Args:
            run: Run id.
            submitted: When; by default as the run id says.
        """
        moment = submitted or submitted_at(run)
        if self.name not in run or (moment is None and (self.since or self.until)):
            return False
        is_late_enough = self.since is None or moment is None or moment >= self.since
        return is_late_enough and (self.until is None or moment is None or moment < self.until)

    def accepts_tags(self, tags: Mapping[str, str]) -> bool:
        """Whether a run with these tags is wanted."""
        return self.tags.items() <= tags.items()


EVERY_RUN = RunFilter()


@dataclass(frozen=True)
class LogLine:
    """One line of a run's log, without its newline.

    `time` is when the backend took it in, in seconds since the epoch, or None where it keeps no such time. `raw` holds
    its bytes where the text lacks some of them: the line is not UTF-8, or ends with a carriage return.
    """

    host: str
    text: str
    time: float | None = None
    raw: bytes | None = None


RANK_MARK = re.compile(
    r"^\[(?:rank(?P<torch>\d+)\]:"  # our worker; torch's excepthook and C++ log, since 2.3
    r"|1,(?:mpirank:)?(?P<mpi>\d+)(?:,[\w-]+)?\]<std(?:err|out)>:"  # mpirun --tag-output, with and without SMDDP
    r"|[a-z]+\d+\]:)"  # torchrun --tee: role and local rank
    r" ?"
)
"""What stands before a line of a rank, by who put it there."""


def find_rank(text: str) -> int | None:
    """Return the rank that printed a line, or None where the line does not tell.

    Event lines are rank 0's, but for those that name another one.
    """
    if EVENT_PREFIX in text and (event := parse_event(text)) is not None:
        rank: int | None = event.get("rank", 0)
        return rank
    match = RANK_MARK.match(text)
    found = None if match is None else match["torch"] or match["mpi"]
    return None if found is None else int(found)


@dataclass(frozen=True)
class LogFilter:
    """Which lines of a log are wanted: those that every given value lets through.

    Attributes:
        host: Only this host's, such as `algo-1`.
        grep: Only lines in which this is found, as they were written.
        since: Only lines from this moment on (without a zone: UTC), or of this last while by the backend's own clock.
        rank: Only lines that this rank is known to have printed.
    """

    host: str | None = None
    grep: re.Pattern[str] | None = None
    since: datetime | timedelta | None = None
    rank: int | None = None

    def wants(self, line: LogLine) -> bool:
        """Whether host, text and rank of a line are wanted. Backends hold `since`: they know when lines came."""
        return (
            (self.host is None or line.host == self.host)
            and (self.grep is None or self.grep.search(line.text) is not None)
            and (self.rank is None or find_rank(line.text) == self.rank)
        )

    def from_now(self) -> LogFilter:
        """Return the same filter with a fixed moment, so that a log which is read again begins with the same lines."""
        if not isinstance(self.since, timedelta):
            return self
        return dataclasses.replace(self, since=datetime.now(UTC) - self.since)

    def begins(self, now: float) -> float | None:
        """Return `since` in seconds since the epoch, or None. `now` is the clock that stamps the lines."""
        if self.since is None:
            return None
        if isinstance(self.since, timedelta):
            return now - self.since.total_seconds()
        zoned = self.since if self.since.tzinfo is not None else self.since.replace(tzinfo=UTC)
        return zoned.timestamp()


EVERYTHING = LogFilter()


def parse_since(text: str) -> datetime | timedelta:
    """Return what `10m` or `2026-11-20T10:00` means; a time without a zone is UTC, as all times that are shown.

    Raises:
        ValueError: neither a duration nor a time.
    """
    try:
        return timedelta(seconds=parse_duration(text))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"expected a duration such as 10m or a time such as 2026-11-20T10:00, got {text!r}") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


class Operations(Protocol):
    """What a run asks of the backend that it was submitted to."""

    name: str

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status."""
        ...

    def status(self, run: str) -> Status:
        """Return the present status.

        Raises:
            RunNotFoundError: this backend has no such run.
        """
        ...

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = EVERYTHING,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the wanted log lines of all hosts, each once; with `follow` until the run has ended."""
        ...

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the job's own values by field of job.yaml, as far as they are known."""
        ...

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return what was decided for the run: its plan.json."""
        ...

    def stop(self, run: str) -> None:
        """Ask the run to end. Returns at once; a run that has ended stays as it is."""
        ...

    def end_warm_pool(self, run: str) -> None:
        """Give up the cluster that an ended run has left behind.

        Raises:
            UserError: it keeps none.
        """
        ...


class Run:
    """Handle of a submitted run. Get one from `submit()`, or from an id by `get_run()`.

    Attributes:
        id: The run id.
        attached: Whether a submit found this run of the same request and code, and started none.
        warnings: What its plan warned of, one sentence each; empty for a handle that no submit or resume returned.
    """

    def __init__(
        self, run_id: str, operations: Operations, *, attached: bool = False, warnings: Iterable[str] = ()
    ) -> None:
        self.id = run_id
        self.attached = attached
        self.warnings = tuple(warnings)
        self._operations = operations

    def __repr__(self) -> str:
        return f"Run({self.reference!r})"

    @property
    def backend(self) -> str:
        """Name of the backend: `local`, `sagemaker` or `sandbox`."""
        return self._operations.name

    @property
    def reference(self) -> str:
        """`<backend>:<run id>`."""
        return f"{self.backend}:{self.id}"

    def with_warnings(self, warnings: Iterable[str]) -> Run:
        """Return the same run with the warnings of its plan."""
        return Run(self.id, self._operations, attached=self.attached, warnings=warnings)

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status: a new `Backoff` for each loop."""
        return self._operations.poll_backoff()

    def status(self) -> Status:
        """Return the present status."""
        return self._operations.status(self.id)

    @property
    def state(self) -> State:
        """The present state."""
        return self.status().state

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Latest value of each metric by `split/name`, such as `test/accuracy`."""
        return self.status().progress.metrics

    def logs(
        self,
        *,
        follow: bool = False,
        only: LogFilter = EVERYTHING,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of all hosts, or those that are wanted, each once, without keys and tokens.

        Without `follow` they come in the order of their times; with it as they arrive, until the run has ended.

        Args:
            follow: Go on until the run has ended, also through an outage of up to an hour.
            only: Which lines.
            on_trouble: Given a sentence for people when such an outage begins, and one when it is over.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        return map(_without_secrets, self._operations.logs(self.id, follow=follow, only=only, on_trouble=on_trouble))

    def facts(self) -> Mapping[str, str]:
        """Return the job's own values by field of job.yaml, such as `cluster.volume`, as far as they are known."""
        return self._operations.facts(self.id)

    def wait(
        self,
        timeout_seconds: float | None = None,
        *,
        until: State | None = None,
        on_change: Callable[[Status], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Status:
        """Wait until the run has ended and return its status. The run's failure is no exception.

        Args:
            timeout_seconds: How long to wait; None waits as long as it takes.
            until: Return in this state already.
            on_change: Told when state or reason have changed.
            on_trouble: Given a sentence for people when nobody answers any more, and one when that is over.

        Raises:
            TimeoutError: it has not ended in time. The run goes on.
            CloudError: AWS refused, could not be reached at first, or not for an hour.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        backoff, outages = self._operations.poll_backoff(), OutageTolerance(on_trouble)
        last: tuple[State, str] | None = None
        while True:
            try:
                status = self.status()
            except UnreachableError as error:
                seconds, shown = outages.failed(error), "not to be asked"
            else:
                outages.succeeded()
                if status.state.is_final or status.state is until:
                    return status
                changed, last = (status.state, status.reason) != last, (status.state, status.reason)
                if changed and on_change is not None:
                    on_change(status)
                seconds, shown = backoff.next_seconds(changed=changed), str(status.state)
            if deadline is not None:
                seconds = min(seconds, max(0.0, deadline - time.monotonic()))
                if seconds == 0.0:
                    raise TimeoutError(f"{self.reference} is {shown} after {timeout_seconds:g} s; it goes on")
            time.sleep(seconds)

    def stop(self) -> None:
        """Ask the run to end; `wait()` tells when it has."""
        self._operations.stop(self.id)

    def end_warm_pool(self) -> None:
        """Give up the cluster that this run, which has ended, has left behind.

        Raises:
            UserError: it keeps none.
        """
        self._operations.end_warm_pool(self.id)


def _without_secrets(line: LogLine) -> LogLine:
    text = redact(line.text)
    return line if text == line.text else dataclasses.replace(line, text=text, raw=None)
