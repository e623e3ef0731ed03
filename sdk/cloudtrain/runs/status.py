"""A run's status: state, reason, times, costs and warnings."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cloudtrain.errors import (
    EXIT_DONE,
    EXIT_RUN_ENDED_EARLY,
    EXIT_RUN_FAILED,
    UserError,
    did_you_mean,
)
from cloudtrain.planning.warm_pool import WarmPool
from cloudtrain.runs.event_words import (
    HIGH_DATA_WAIT,
    describe_fresh_start,
    describe_lost_files,
    describe_unmatched,
)
from cloudtrain.runs.progress import Progress
from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.runs.unread_metrics import format_patterns
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_duration, format_usd
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.redaction import redact


class State(enum.StrEnum):
    """State of a run."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    INTERRUPTED = "INTERRUPTED"
    """Spot capacity was taken away. The run continues when capacity is back."""

    UNKNOWN = "UNKNOWN"
    """The files of the run cannot be read. Only lists contain such runs; other commands raise an error."""

    @property
    def is_final(self) -> bool:
        """Whether the run has ended."""
        return self in (State.SUCCEEDED, State.FAILED, State.STOPPED)

    @property
    def exit_code(self) -> int | None:
        """Exit code of a command that followed the run to this state; None before the end."""
        if not self.is_final:
            return None
        if self is State.SUCCEEDED:
            return EXIT_DONE
        return EXIT_RUN_FAILED if self is State.FAILED else EXIT_RUN_ENDED_EARLY


def parse_state(given: str) -> State:
    """Return the state of a name, such as `RUNNING`.

    Raises:
        UserError: There is no such state.
    """
    try:
        return State(given)
    except ValueError:
        hint = did_you_mean(str(given).upper(), list(State))
        raise UserError(f"there is no state {given!r}", hint) from None


YEAR_SECONDS = 365 * 86400
"""Of an estimate above this only the size is shown: it is a first guess."""

_TELLING_SECONDS = 600.0
"""How long a script that was stopped must have run for a statement about what it never does."""

_MOST_NAMED = 4

UNSTORED = "not all results are stored"
"""Part of the reason of a run that has ended well without storing all of its results."""


_MISSED_REASONS = {
    "late": "the previous one is still being written",
    "failed": "it could not be written",
    "stalled": "the upload makes no progress",
}


@dataclass(frozen=True)
class Phase:
    """One phase of a run, such as `Pending` or `Training`, with SageMaker's name and message."""

    name: str
    started: datetime
    ended: datetime | None = None
    detail: str = ""
    is_billed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {
            "name": self.name,
            "started": _text(self.started),
            "ended": _text(self.ended),
            "detail": self.detail,
        }


@dataclass(frozen=True)
class RunAttempt(Phase):
    """An attempt of a run that is continued by itself; `detail` is the reason of its end.

    Attributes:
        run: Id of its run, where it is a run of its own; empty where the run itself was started again.
        checkpoint: Step of its newest checkpoint, or None.
        cost_usd: Its cost so far, or None if the price is unknown.
        phases: Its phases; empty for backends without phases.
    """

    run: str = ""
    checkpoint: int | None = None
    cost_usd: float | None = None
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """The capacity that a run waits for.

    Attributes:
        types: Accepted instance types, the preferred one first.
        until: When the wait ends, or None without a limit.
        limit: The field of job.yaml that limits the wait, such as `cluster.max_pending`.
    """

    types: tuple[str, ...]
    instances: int
    until: datetime | None = None
    limit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {**dataclasses.asdict(self), "until": _text(self.until), "limit": self.limit or None}


@dataclass(frozen=True)
class Status:
    """Status of a run at one moment.

    Attributes:
        run: Run id.
        backend: Name of the backend.
        state: State of the run.
        reason: Why it is in this state; may be empty.
        created: When it was submitted, or None if unknown.
        started: When training started, or None.
        ended: When the run ended, or None.
        billable_seconds: Billed seconds per instance so far; 0 for local runs.
        cost_usd: Cost so far, or None if the price is unknown; 0.0 for local runs.
        instance_type: Instance type; with `cluster.prefer`, the selected one.
        instances: Number of instances.
        usd_per_hour: Price of all instances, or None if it is unknown.
        phases: Phases so far; empty for backends without phases.
        warm_pool: The warm pool of the run, or None.
        waiting: The capacity that it waits for, or None.
        is_spot: Whether it runs on spot instances. Until the end, `cost_usd` then has the higher on-demand prices.
        ends_by: When a limit will end it, or None.
        world_size: Number of ranks, or None if unknown.
        progress: What its events report.
        artifacts: URIs of model and outputs, by name.
        attempts: The attempts of a run that is continued by itself, each with the period for which it had its machines.
        is_abandoned: Whether it was to be continued by itself, and the process that does so has ended.
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
    attempts: tuple[RunAttempt, ...] = ()
    is_abandoned: bool = False

    def __post_init__(self) -> None:
        # The reason can quote the output of a script.
        object.__setattr__(self, "reason", redact(self.reason))

    @property
    def uses_account(self) -> bool:
        """Whether the run is in an account, or in the sandbox that simulates one."""
        return facts_of(self.backend).uses_account

    @property
    def is_simulated(self) -> bool:
        """Whether the run is in a simulated account."""
        return facts_of(self.backend).is_simulated

    def __repr__(self) -> str:
        return summarize_status(self).to_text()

    def _repr_html_(self) -> str:
        return summarize_status(self).to_html()

    @property
    def exit_code(self) -> int | None:
        """0 for succeeded, 4 for failed, 5 for ended early; None before the end."""
        return self.state.exit_code

    @property
    def is_ending(self) -> bool:
        """Whether the run has ended or is being stopped. Then `reason` is the reason of the end."""
        return self.state.is_final or self.state is State.STOPPING

    @property
    def reference(self) -> str:
        """`<backend>:<run id>`, which every command accepts."""
        return f"{self.backend}:{self.run}"

    def checkpoint_age(self, now: float | None = None) -> float | None:
        """Return the seconds since the last complete checkpoint, up to the run's end; None if there is none."""
        if self.progress.checkpoint is None:
            return None
        if self.ended is not None:
            moment = self.ended.timestamp()
        elif now is not None:
            moment = now
        else:
            moment = time.time()
        return max(0.0, moment - self.progress.checkpoint.time)

    def alarms(self, now: float | None = None) -> tuple[str, ...]:
        """Return problems with the run's checkpoints, one sentence each. `now` is in seconds since the epoch."""
        missed = self.progress.missed
        found = []
        if missed is not None and missed.get("alarm"):
            found.append(self._describe_missed(missed, now))
        return (*found, *self.progress.damaged)

    def warnings(self) -> tuple[str, ...]:
        """Return what slows the run down, one sentence each."""
        progress = self.progress
        found: list[str] = []
        wait = progress.metrics.get("train/data_wait") or 0.0
        # The first step includes the start of loader workers.
        is_first = (progress.last_step or 0) <= 1
        if wait > HIGH_DATA_WAIT and not is_first and not self.state.is_final:
            found.append(
                f"{wait:.0%} of each step waits for data: raise train.workers, or use faster storage for data"
            )
        if progress.slow_network is not None:
            found.append(progress.slow_network)
        if not self.state.is_final:
            found += progress.slow_ranks.values()
        return tuple(found)

    def host_warnings(self) -> tuple[str, ...]:
        """Return warnings about what hosts lack, trackers, lone ranks, metrics that were not found, and lost files."""
        progress = self.progress
        found = _environment_warnings(progress.host_environments.values())
        found += progress.untracked.values()
        if self.is_abandoned:
            found.append(
                f"nothing continues it when this attempt ends: cloudtrain recover {self.run}"
            )
        # For a failed run, only the failure matters.
        if self.state is not State.FAILED:
            found += self._training_warnings()
        if self.state.is_final:
            found += _file_warnings(progress.host_files.values())
        return (*found, *self.success_warnings())

    def _training_warnings(self) -> list[str]:
        """Return warnings about lone ranks, metrics, and the start and end of training."""
        progress = self.progress
        found = _rank_warnings(
            progress.host_ranks.values(),
            has_checkpoint=progress.checkpoint is not None,
            is_too_early=self._has_stopped_early(),
        )
        if progress.fresh_start is not None:
            found.append(describe_fresh_start(progress.fresh_start))
        if progress.unmatched:
            found.append(describe_unmatched(progress.unmatched))
        found += self._unread_metrics()
        if progress.falls:
            found.append(describe_falls(progress.falls))
        found += _held_warnings(progress.held)
        return found

    def _has_stopped_early(self) -> bool:
        """Return whether the script was stopped before it could show that it trains, saves and reports."""
        # A host of a run in progress reports only when the script has run for limits.hang.
        if self.state in (State.RUNNING, State.SUCCEEDED) or self.progress.last_step is not None:
            return False
        seconds = [report.get("seconds", 0.0) for report in self.progress.host_ranks.values()]
        return max(seconds, default=0.0) < _TELLING_SECONDS

    def _unread_metrics(self) -> list[str]:
        progress = self.progress
        if not self.state.is_final or progress.metrics or not progress.unread_metrics:
            return []
        line = format_patterns(progress.unread_metrics)
        return [
            f"the output has values that no pattern reads. For curves, add to the job file: {line}"
        ]

    def success_warnings(self) -> tuple[str, ...]:
        """Return signs that a run that has succeeded has not trained: an error at its end, an empty model folder."""
        if self.state is not State.SUCCEEDED:
            return ()
        found = []
        if self.progress.hidden_failure is not None:
            found.append(
                f"the output ends with an error, and the exit code is 0: {redact(self.progress.hidden_failure)}. If "
                "this ended the training, let its exit code be that of the run: set -eo pipefail in a shell script, "
                "no catch-all except in Python"
            )
        reports = self.progress.host_files.values()
        if reports and all(report["model_is_empty"] for report in reports):
            found.append(
                "the model folder is empty: nothing was written to SM_MODEL_DIR, so there is no model.tar.gz"
            )
        return tuple(found)

    def _describe_missed(self, missed: Event, now: float | None) -> str:
        checkpoint = self.progress.checkpoint
        age = self.checkpoint_age(now)
        last = "none so far"
        if checkpoint is not None and age is not None:
            when = "before the end" if self.ended is not None else "ago"
            last = f"last: step {checkpoint.step:,}, {format_duration(age)} {when}"
        kind = missed.get("reason", "")
        reason = ": ".join(
            text for text in (_MISSED_REASONS.get(kind, kind), missed.get("detail")) if text
        )
        intervals = count(missed.get("missed", 1), "interval")
        return f"no checkpoint for {intervals} ({last}): {reason or 'unknown reason'}"

    def usd_at_risk(self, now: float | None = None) -> float | None:
        """Return the cost of the work that a failure would lose now; None if the run has ended or the price is unknown.

        It is the price of the time since the last complete checkpoint, or since the instances were allocated last.
        """
        if self.usd_per_hour is None or self.started is None or self.state.is_final:
            return None
        moment = time.time() if now is None else now
        began = self._billed_since()
        if began is None:
            return 0.0
        lost = max(0.0, moment - began.timestamp())
        age = self.checkpoint_age(moment)
        if age is not None:
            lost = min(age, lost)
        return round(self.usd_per_hour * lost / 3600, 2)

    def _billed_since(self) -> datetime | None:
        """Return the start of the current billed period, or None if the run is not billed now."""
        if self.attempts and not self.phases:
            newest = self.attempts[-1]
            return newest.started if newest.ended is None else None
        if not self.phases:
            return self.started
        began: datetime | None = None
        for phase in self.phases:
            # A phase that is not billed ends the period.
            began = (began or phase.started) if phase.is_billed else None
        return began

    def cost_by(self, now: float, *, read_at: float) -> float | None:
        """Return the cost at a later time; this status was read at `read_at`. Both are in seconds since the epoch."""
        if (
            self.cost_usd is None
            or self.usd_per_hour is None
            or self.state.is_final
            or self._billed_since() is None
        ):
            return self.cost_usd
        return self.cost_usd + self.usd_per_hour * max(0.0, now - read_at) / 3600

    def describe_rest(self, now: float | None = None) -> str:
        """Return the time left, such as `12m left`; for a Task whose work is done `leaving for 45s`; else nothing.

        A Task's ranks then wait for threads, child processes and exit handlers, at most for limits.hang.
        """
        moment = time.time() if now is None else now
        done = self.progress.finished_at
        if done is not None and not self.state.is_final:
            return f"leaving for {format_duration(moment - done)}"
        left = self.seconds_left(moment)
        if left is not None and left > YEAR_SECONDS:
            return "more than a year left"
        return f"{format_duration(left)} left" if left else ""

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return the remaining training time; None if the run does not train or it is unknown."""
        if self.state is not State.RUNNING:
            return None
        began = self._billed_since()
        marks = self.progress.marks
        if began is not None and not (marks and marks[-1][0] >= began.timestamp()):
            # All steps so far are of an earlier attempt.
            return None
        return self.progress.seconds_left(time.time() if now is None else now)

    def to_json(self, now: float | None = None) -> dict[str, Any]:
        """Return the object that `status --json` prints. `now` is in seconds since the epoch."""
        progress = self.progress
        checkpoint = progress.checkpoint
        age = self.checkpoint_age(now)
        left = self.seconds_left(now)
        saved = None
        if checkpoint is not None and age is not None:
            saved = {"uri": checkpoint.uri, "step": checkpoint.step, "age_seconds": round(age, 1)}
        return {
            **{
                name: getattr(self, name)
                for name in ("run", "backend", "state", "reason", "exit_code")
            },
            **{name: _text(getattr(self, name)) for name in ("created", "started", "ended")},
            **{
                name: getattr(self, name)
                for name in ("billable_seconds", "cost_usd", "usd_per_hour")
            },
            "usd_at_risk": self.usd_at_risk(now),
            "instance_type": self.instance_type,
            "instances": self.instances,
            "phases": [phase.to_json() for phase in self.phases],
            "warm_pool": self.warm_pool.to_json() if self.warm_pool else None,
            "waiting": self.waiting.to_json() if self.waiting else None,
            "spot": self.is_spot,
            "ends_by": _text(self.ends_by),
            "world_size": self.world_size,
            **{
                name: getattr(progress, name) for name in ("first_step", "last_step", "total_steps")
            },
            "seconds_left": None if left is None else round(left),
            "last_epoch": progress.last_epoch,
            "last_checkpoint": saved,
            "alarms": list(self.alarms(now)),
            "warnings": [*self.warnings(), *self.host_warnings()],
            "metrics": dict(progress.metrics),
            "hosts": dict(progress.host_environments),
            "artifacts": dict(self.artifacts),
            "tracking": dict(progress.tracked),
            "attempts": list(self._attempts_json()),
        }

    def _attempts_json(self) -> Iterator[dict[str, Any]]:
        checkpoint = self.progress.checkpoint
        for number, each in enumerate(self.attempts, 1):
            is_last = number == len(self.attempts)
            is_continued = not is_last or (each.ended is not None and not self.state.is_final)
            step = each.checkpoint
            if step is None and is_last and not each.run and checkpoint is not None:
                step = checkpoint.step
            reason = each.detail or (self.reason if is_last and self.is_ending else "")
            yield {
                "attempt": number,
                "run": each.run or self.run,
                "state": State.INTERRUPTED if is_continued else self.state,
                "started": _text(each.started),
                "ended": _text(each.ended),
                "reason": reason,
                "checkpoint_step": step,
                "cost_usd": each.cost_usd,
            }


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _environment_warnings(reports: Iterable[Event]) -> list[str]:
    """Return the warnings of the hosts about their environments; one of several hosts once."""
    hosts_by_text: dict[str, list[str]] = {}
    for report in reports:
        for text in report.get("warnings", ()):
            hosts_by_text.setdefault(text, []).append(report["host"])
    return [f"{', '.join(sorted(hosts))}: {text}" for text, hosts in hosts_by_text.items()]


def _rank_warnings(
    reports: Collection[Event], *, has_checkpoint: bool, is_too_early: bool
) -> list[str]:
    """Return warnings about lone ranks, checkpoints and progress, by the newest event `ranks` of each host."""
    ranks = sum(report["ranks"] for report in reports)
    found = []
    if any(report.get("cuda_on_cpu") for report in reports):
        found.append(
            "CUDA was the CPU (--cuda-on-cpu): the run says nothing about speed, memory and numerics on a GPU"
        )
    if is_too_early:
        return found
    if ranks > 1 and ranks == sum(report["alone"] for report in reports):
        found.append(
            _describe_copies(ranks, has_group=all(report.get("unused") for report in reports))
        )
    # `progressed` is None if limits.hang is off.
    is_used = has_checkpoint or any(report.get("progressed") for report in reports)
    if reports and not is_used and not any(report["saved"] for report in reports):
        found.append(
            "no checkpoint so far: the script has written nothing to /opt/ml/checkpoints and saved nothing by "
            "cloudtrain_runtime.checkpoint, so an interrupted run starts from the beginning"
        )
    if reports and all(report.get("progressed") is False for report in reports):
        found.append(
            "a hang would not be noticed: the script reports no progress. Call cloudtrain_runtime.report(step, total) "
            "after each step, or add metrics: patterns for its output; checkpoint.save reports it, too"
        )
    return found


def _describe_copies(ranks: int, *, has_group: bool) -> str:
    """Return a message about ranks that have exchanged no data."""
    if has_group:
        return (
            f"{ranks} independent copies: the ranks have a process group of torch.distributed, and no data has moved in "
            "it, so each trains a separate model. Wrap the model, in DistributedDataParallel or by accelerator.prepare, "
            "or average the gradients with all_reduce"
        )
    return (
        f"{ranks} independent copies: no rank has joined a process group of torch.distributed, so each trains a "
        "separate model. Call init_process_group (Accelerate and Lightning do), or, for a script that starts "
        "its own ranks, set cluster.processes_per_instance: 1"
    )


def _held_warnings(held: Mapping[int, Event]) -> list[str]:
    """Return a warning about ranks that had done their work and did not end."""
    if not held:
        return []
    rank, event = min(held.items())
    ranks = f"rank {rank}" if len(held) == 1 else f"rank {rank} and {len(held) - 1} more"
    names = ", ".join(map(redact, event["held_by"][:_MOST_NAMED])) or "exit handlers"
    text = (
        f"{ranks} had done the work and did not end within limits.hang, because of {names}: "
        "close trackers and join threads at the end of the script"
    )
    return [text]


def _file_warnings(reports: Iterable[Event]) -> list[str]:
    """Return warnings about lost and missing files of an ended run, by the event `outputs` of each host."""
    hosts = sorted(reports, key=lambda report: str(report["host"]))
    found = [
        f"{report['host']}: {describe_lost_files(report)}"
        for report in hosts
        if report["unkept_files"]
    ]
    unwritten = [set(report.get("unwritten", ())) for report in hosts]
    if unwritten and (missing := set.intersection(*unwritten)):
        names = ", ".join(sorted(missing))
        found.append(f"code.outputs: no host wrote {names}, so it can be neither kept nor restored")
    return found


def describe_falls(falls: int) -> str:
    """Return a message about steps of a script that have become smaller without a restart."""
    times = "once" if falls == 1 else f"{falls} times"
    return (
        f"the step begins again: it fell {times} without a restart, and of two values at one step only the newer is "
        "kept. Report steps that count through all epochs, or add metrics.epoch, a pattern that finds the epoch"
    )


def summarize_status(status: Status, now: float | None = None) -> Summary:
    """Return a summary of a status. `now` is in seconds since the epoch."""
    return Summary(
        f"Status {status.reference}",
        tuple(_status_rows(status, time.time() if now is None else now)),
    )


def _status_rows(status: Status, now: float) -> Iterator[Row]:
    yield "state", describe_state(status)
    for text in status.alarms(now):
        yield "alarm", text
    if progress := describe_progress(status, now):
        yield "progress", progress
    if metrics := ", ".join(shown_metrics(status.progress.metrics)):
        yield "metrics", metrics
    if checkpoint := describe_checkpoint(status, now):
        yield "checkpoint", checkpoint
    if status.started is not None:
        ended = now if status.ended is None else status.ended.timestamp()
        took = format_duration(ended - status.started.timestamp())
        if status.ended is None:
            took += " so far"
        yield "started", f"{status.started:%Y-%m-%d %H:%M:%S %Z}, {took}"
    if cost := describe_cost(status, status.cost_usd):
        yield "cost", cost
    for text in (*status.warnings(), *status.host_warnings()):
        yield "warning", text


def shown_reason(status: Status) -> str:
    """Return the first line of the state's reason; empty while steps show that the run trains."""
    if status.state is State.RUNNING and status.progress.last_step is not None:
        return ""
    return status.reason.strip().partition("\n")[0]


def describe_state(status: Status) -> str:
    """Return the state with its reason: `FAILED: AlgorithmError`."""
    return ": ".join(filter(None, (str(status.state), shown_reason(status))))


def describe_steps(status: Status) -> str:
    """Return the completed steps: `610/1,000 steps`, or an empty string while they are unknown."""
    progress = status.progress
    if progress.last_step is None:
        return ""
    if progress.total_steps:
        return f"{progress.last_step:,}/{progress.total_steps:,} steps"
    epochs = f", {count(progress.last_epoch, 'epoch')}" if progress.last_epoch else ""
    return f"step {progress.last_step:,}{epochs}"


def describe_progress(status: Status, now: float) -> str:
    """Return the completed steps and the time left: `610/1,000 steps, 12m left`."""
    steps = describe_steps(status)
    if not steps:
        return ""
    return ", ".join(filter(None, (steps, status.describe_rest(now))))


def describe_checkpoint(status: Status, now: float) -> str:
    """Return the last complete checkpoint and its age: `step 600, 25s ago`; an empty string without one."""
    checkpoint = status.progress.checkpoint
    age = status.checkpoint_age(now)
    if checkpoint is None or age is None:
        return ""
    when = "before the end" if status.ended is not None else "ago"
    return f"step {checkpoint.step:,}, {format_duration(age)} {when}"


def describe_cost(status: Status, cost_usd: float | None) -> str:
    """Return the cost so far: `at most 17.82 USD` with spot, whose price is known at the end; or nothing."""
    if not status.uses_account and not cost_usd:
        return ""
    if cost_usd is None:
        return "price unknown" if status.instance_type is not None else ""
    at_most = "at most " if status.is_spot and not status.state.is_final else ""
    return f"{at_most}{format_usd(cost_usd)}"


def status_texts(status: Status, now: float) -> dict[str, Any]:
    """Return the texts of a status that the dashboard shows."""
    risk = status.usd_at_risk(now)
    return {
        "reason": shown_reason(status),
        "steps": describe_steps(status),
        "left": status.describe_rest(now),
        "cost": describe_cost(status, status.cost_usd),
        "at_risk": format_usd(risk) if risk else "",
    }
