"""`Run`: handle of something submitted, and the truth about it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from cloudtrain.errors import EXIT_DONE, EXIT_RUN_ENDED_EARLY, EXIT_RUN_FAILED, RunNotFoundError, UnreachableError
from cloudtrain.patience import Pace, Patience
from cloudtrain.units import parse_duration
from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event

RUN_ID_CHARACTERS = 63
"""Longest TrainingJobName. Source: botocore's model of CreateTrainingJob."""

_RUN_ID = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*-\d{6}-\d{6}-[0-9a-f]{6}")


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


def make_run_id(name: str, now: datetime, suffix: str) -> str:
    """Return `<name>-<yymmdd-hhmmss>-<suffix>`.

    Args:
        name: The job's name, at most 42 characters.
        now: Time of the submit, in UTC.
        suffix: Six hexadecimal digits.
    """
    return f"{name}-{now:%y%m%d-%H%M%S}-{suffix}"


def is_run_id(text: str) -> bool:
    """Whether a text has the form of a run id."""
    return len(text) <= RUN_ID_CHARACTERS and _RUN_ID.fullmatch(text) is not None


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
class Progress:
    """What the event lines of a run say so far.

    Attributes:
        first_step: Step that the run started from: 0, or that of the checkpoint it resumed.
        metrics: Latest value by `split/name`.
        failures: Failure events, one per host that reported one.
    """

    last_step: int | None = None
    first_step: int | None = None
    last_epoch: int | None = None
    total_steps: int | None = None
    world_size: int | None = None
    device: str | None = None
    checkpoint: LastCheckpoint | None = None
    resumed_from: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failures: tuple[Mapping[str, Any], ...] = ()


def fold_events(events: Iterable[Mapping[str, Any]]) -> Progress:
    """Return the progress that a run's events tell, in their order.

    An event that lacks what it should have (of another version, or printed by a script) tells nothing.
    """
    progress = Progress()
    for event in events:
        fold = _FOLDS.get(event["event"])
        if fold is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                progress = fold(progress, event)
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
    )


def _fold_step(progress: Progress, event: Mapping[str, Any]) -> Progress:
    named = {"loss": "train/loss", "samples_per_second": "train/samples_per_second", "grad_norm": "train/grad_norm"}
    values = {metric: event[key] for key, metric in named.items() if isinstance(event.get(key), int | float)}
    return dataclasses.replace(
        progress,
        last_step=event.get("step", progress.last_step),
        last_epoch=event.get("epoch", progress.last_epoch),
        metrics={**progress.metrics, **values},
    )


def _fold_evaluation(progress: Progress, event: Mapping[str, Any]) -> Progress:
    split = event.get("split", "validation")
    values = {
        f"{split}/{name}": value
        for name, value in event.items()
        if name not in ("event", "split", "step", "epoch", "time", "samples") and isinstance(value, int | float)
    }
    return dataclasses.replace(progress, metrics={**progress.metrics, **values})


def _fold_checkpoint(progress: Progress, event: Mapping[str, Any]) -> Progress:
    checkpoint = LastCheckpoint(event["uri"], event["step"], event["time"])
    last_step = max(event["step"], progress.last_step or 0)
    return dataclasses.replace(progress, checkpoint=checkpoint, last_step=last_step)


def _fold_finished(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(
        _fold_step(progress, event),
        last_epoch=event.get("epochs", progress.last_epoch),
    )


def _fold_failed(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(progress, failures=(*progress.failures, event))


_FOLDS: dict[str, Callable[[Progress, Mapping[str, Any]], Progress]] = {
    "started": _fold_started,
    "step": _fold_step,
    "evaluation": _fold_evaluation,
    "checkpoint": _fold_checkpoint,
    "finished": _fold_finished,
    "stopped": _fold_step,
    "failed": _fold_failed,
}


# ---------------------------------------------------------------- status


@dataclass(frozen=True)
class Phase:
    """One stage of a run's life, such as `Pending` or `Training`, by the name that SageMaker gives it.

    Attributes:
        ended: None while it lasts.
        detail: What the service says of it.
    """

    name: str
    started: datetime
    ended: datetime | None = None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {
            "name": self.name,
            "started": self.started.isoformat(),
            "ended": self.ended.isoformat() if self.ended else None,
            "detail": self.detail,
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
    world_size: int | None = None
    progress: Progress = Progress()
    artifacts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def exit_code(self) -> int | None:
        """0 succeeded, 4 failed, 5 ended early; None while the run goes on."""
        return self.state.exit_code

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

    def usd_at_risk(self, now: float | None = None) -> float | None:
        """Return what would be paid again if the run died now; None when it has ended or the price is unknown.

        It is the price of the time since the last complete checkpoint, or since training started.
        """
        if self.usd_per_hour is None or self.started is None or self.state.is_final:
            return None
        moment = time.time() if now is None else now
        age = self.checkpoint_age(moment)
        lost = max(0.0, moment - self.started.timestamp())
        return round(self.usd_per_hour * (lost if age is None else min(age, lost)) / 3600, 2)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return the object that `status --json` prints. `now` is in seconds since the epoch."""
        checkpoint = self.progress.checkpoint
        age = self.checkpoint_age(now)
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
            "world_size": self.world_size,
            "first_step": self.progress.first_step,
            "last_step": self.progress.last_step,
            "total_steps": self.progress.total_steps,
            "last_epoch": self.progress.last_epoch,
            "last_checkpoint": None
            if checkpoint is None or age is None
            else {
                "uri": checkpoint.uri,
                "step": checkpoint.step,
                "age_seconds": round(age, 1),
            },
            "metrics": dict(self.progress.metrics),
            "artifacts": dict(self.artifacts),
        }


@dataclass(frozen=True)
class LogLine:
    """One line of a run's log, without its newline.

    `time` is when the backend took it in, in seconds since the epoch, or None where it keeps no such time.
    """

    host: str
    text: str
    time: float | None = None


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
        rank = event.get("rank", 0)
        return rank if isinstance(rank, int) else None
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

    def pace(self) -> Pace:
        """Return how often it makes sense, and is allowed, to ask for the status."""
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

    def stop(self, run: str) -> None:
        """Ask the run to end. Returns at once; a run that has ended stays as it is."""
        ...


class Run:
    """Handle of a submitted run. Get one from `submit()`, or from an id by `get_run()`."""

    def __init__(self, run_id: str, operations: Operations) -> None:
        self.id = run_id
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

    def status(self) -> Status:
        """Return the present status."""
        return self._operations.status(self.id)

    @property
    def state(self) -> State:
        """The present state."""
        return self.status().state

    @property
    def metrics(self) -> Mapping[str, float]:
        """Latest value of each metric by `split/name`, such as `test/accuracy`."""
        return self.status().progress.metrics

    def logs(
        self,
        *,
        follow: bool = False,
        only: LogFilter = EVERYTHING,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of all hosts, or those that are wanted, each once.

        Without `follow` they come in the order of their times; with it as they arrive, until the run has ended.

        Args:
            follow: Go on until the run has ended, also through an outage of up to an hour.
            only: Which lines.
            on_trouble: Given a sentence for people when such an outage begins, and one when it is over.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        return self._operations.logs(self.id, follow=follow, only=only, on_trouble=on_trouble)

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
        pace, patience = self._operations.pace(), Patience(on_trouble)
        last: tuple[State, str] | None = None
        while True:
            try:
                status = self.status()
            except UnreachableError as error:
                seconds, shown = patience.failed(error), "not to be asked"
            else:
                patience.worked()
                if status.state.is_final or status.state is until:
                    return status
                changed, last = (status.state, status.reason) != last, (status.state, status.reason)
                if changed and on_change is not None:
                    on_change(status)
                seconds, shown = pace.next_seconds(changed=changed), str(status.state)
            if deadline is not None:
                seconds = min(seconds, max(0.0, deadline - time.monotonic()))
                if seconds == 0.0:
                    raise TimeoutError(f"{self.reference} is {shown} after {timeout_seconds:g} s; it goes on")
            time.sleep(seconds)

    def stop(self) -> None:
        """Ask the run to end; `wait()` tells when it has."""
        self._operations.stop(self.id)
