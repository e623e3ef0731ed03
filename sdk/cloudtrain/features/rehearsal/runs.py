"""The runs of a rehearsal: start, interrupt and resume them, and read what they have left."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.retry import poll
from cloudtrain.backends.base import Backend
from cloudtrain.bundle.archive import Bundle
from cloudtrain.client.planning_inputs import PlanInputs
from cloudtrain.errors import CloudtrainError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.runs.continuation import add_continuation
from cloudtrain.runs.history import MetricHistory
from cloudtrain.runs.log_lines import LogFilter
from cloudtrain.runs.previous_run import PreviousRun, checkpoints_of
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.support.checks import Check, Result, passed
from cloudtrain.support.units import Cadence, format_duration
from cloudtrain_runtime.contract import (
    HOST_RANK_VARIABLE,
    INSTANCE_VARIABLE,
    LOG_EVERY_VARIABLE,
    REHEARSAL_FORKS_VARIABLE,
    REHEARSAL_HOLD_VARIABLE,
    REHEARSAL_LAST_VARIABLE,
    REHEARSAL_SAMPLES_VARIABLE,
    MlTree,
    parse_event,
)
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    import psutil

STARTS = "starts"
TRAINS = "trains"
IMPORTED = "the bundle unpacked as it would travel, and its code was imported"
LAUNCHER = "launcher"
RANK = "rank"
HOST = "host"
KILLS = {RANK: "SIGKILL of a rank", HOST: "SIGKILL of a host", LAUNCHER: "SIGKILL of the launcher"}
UNSEEN_GROUP = "whether the ranks train together is not visible, because other processes than cloudtrain's train"
FULL_BYTES = 100 * 10**6
"""Free disk space below which a failure counts as one of this machine."""
_POLL_SECONDS = 0.05
LEAST_START_SECONDS = 300.0
"""Limit for what a first run does before its first step, such as imports, where `--minutes` is shorter."""
_RUNS_OF_A_REHEARSAL = 10
_SHARE_OF_TIME = 0.2
_LEAST_RUN_SECONDS = 10.0
"""Share of the time that is left, and the least seconds, that a later run may take longer than the first one."""
_SIGNS_OF_A_STEP = frozenset({"started", "step", "metrics", "checkpoint"})
"""Events that show that the code was imported. `started` is of a Task."""
_END_SECONDS = 180.0
"""Longest wait for the end of a run that was interrupted: the notice, and what is packed after it."""


@dataclass(frozen=True)
class RehearsalRunner:
    """Starts runs of one job, all with one bundle. They are not recorded among the user's runs.

    Attributes:
        backend: Where they run.
        inputs: Returns what their plans are made with, anew for each run.
        code: The code.
        bundle: Its archive.
    """

    backend: Backend
    inputs: Callable[[], PlanInputs]
    code: CodeInfo
    bundle: Bundle

    def start(self, spec: JobSpec) -> Run:
        """Start a run of a variant of the job."""
        return self._send(self.inputs().make_plan(spec, self.code), self.bundle)

    def resume(self, run: Run, overrides: Iterable[str], instances: int | None = None) -> Run:
        """Start a run that continues the newest complete checkpoint of one that has ended."""
        previous = PreviousRun(run.plan_document())
        spec = previous.job(overrides, instances=instances)
        inputs = replace(self.inputs(), resumed=previous.saved)
        plan = add_continuation(inputs.make_plan(spec, previous.code))
        self.backend.check_resume(plan)
        return self._send(plan, None)

    def _send(self, plan: Plan, bundle: Bundle | None) -> Run:
        self.backend.start_checks(plan, skip=True)()
        return self.backend.submit(plan, bundle, is_new=True)

    def checkpoints(self, run: Run) -> str:
        """Return the uri of the folder in which a run saves."""
        return checkpoints_of(run.plan_document(), run.id).checkpoints

    def environ(self) -> Mapping[str, str]:
        """Return the environment of a process that reads checkpoints."""
        return self.backend.storage_environ()


class NotShownError(Exception):
    """Something did not happen in a run. The message is a sentence for the report.

    Args:
        message: The sentence.
        is_failure: Whether it shows a fault of the job; else time or this machine was too small.

    Attributes:
        result: The result of the check that it ends.
    """

    def __init__(self, message: str, *, is_failure: bool = True) -> None:
        super().__init__(message)
        self.result = Result.FAIL if is_failure else Result.UNKNOWN


@dataclass(frozen=True)
class Record:
    """A step that a rank has taken, as `Rehearsal.at_step` of the runtime writes it."""

    step: int
    rank: int
    samples: tuple[str, ...]


@dataclass
class Ended:
    """A run that has ended.

    Attributes:
        run: The run.
        status: Its last status.
        events: The events of all hosts.
        stop_seconds: Seconds from the interruption to the end; 0 without one.
    """

    run: Run
    status: Status
    events: list[dict[str, Any]] = field(default_factory=list)
    stop_seconds: float = 0.0

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> dict[int, float | None]:
        """Loss by step; None where it is not finite."""
        found = {event["step"]: event["loss"] for event in self.of_kind("step") if "loss" in event}
        if found:
            return found
        history = MetricHistory()
        for event in self.events:
            history.add(event)
        name = next((each for each in history.metrics if each.endswith("loss")), None)
        if name is None:
            return {}
        return {each.step: each.value for each in history.metrics[name]}

    @property
    def first_step(self) -> int | None:
        """First step that it has reported."""
        return min((event["step"] for event in self.of_kind("step")), default=None)

    @property
    def last_step(self) -> int | None:
        """Last step that it has reported."""
        return max((event["step"] for event in self.of_kind("step")), default=None)


class RunDriver:
    """Starts, stops, kills and resumes the runs of a rehearsal.

    Args:
        runner: Starts the runs.
        spec: The job as it is rehearsed: on this machine's hosts and ranks.
        home: Folder of the runs.
        seconds: Time of the rehearsal, which begins with the first step of its first run.
        last_step: Step after which a training ends.
        ranks: Number of ranks on all hosts.
        on_detail: Receives the step that a run has reached.
        imports: Socket of the process that imports once for all runs; None where each imports by itself.
    """

    def __init__(
        self,
        runner: RehearsalRunner,
        spec: JobSpec,
        home: Path,
        seconds: float,
        *,
        last_step: int,
        ranks: int,
        on_detail: Callable[[str], None] = lambda _: None,
        imports: Path | None = None,
    ) -> None:
        self.runner = runner
        self.imports = imports
        self.spec = spec
        self.home = home
        self.last_step = last_step
        self.ranks = ranks
        self._on_detail = on_detail
        self.ends_at_last_step = True
        """Whether a run ends after `last_step`; a script that saves by itself does not."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.has_stepped = False
        """Whether a run has taken a step while the rehearsal watched it: its code was imported."""
        self._start_seconds: float | None = None

    def shorten(self, steps: int, every: int) -> None:
        """Let later runs end after fewer steps, with a checkpoint each `every` steps."""
        if steps >= self.last_step:
            return
        checkpoint = self.spec.checkpoint.model_copy(update={"every": Cadence(steps=every)})
        self.last_step = steps
        self.spec = self.spec.model_copy(update={"checkpoint": checkpoint})

    @property
    def seconds_left(self) -> float:
        """Seconds until the rehearsal ends, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def more_time(self) -> str:
        """What gives a rehearsal enough time, as far as it is known: the option, and why."""
        if self._start_seconds is None:
            return "--minutes"
        minutes = math.ceil((self.seconds + _RUNS_OF_A_REHEARSAL * self._start_seconds) / 60)
        took = format_duration(round(self._start_seconds))
        return f"--minutes {minutes} (each of about {_RUNS_OF_A_REHEARSAL} runs takes {took} until its first step)"

    def wait_for_first_step(
        self, run: Run, has_begun: Callable[[Run], bool] = lambda _: False
    ) -> None:
        """Wait until a run has taken a step, or has ended; the first one starts the clock of the rehearsal.

        Args:
            run: A run that was just started.
            has_begun: Returns whether something else than its events shows that its code was imported.

        Raises:
            NotShownError: It has taken none in time. Its code may still be importing.
        """
        is_first = self._start_seconds is None
        began = time.monotonic()
        self._on_detail("starting the ranks")
        limit = max(LEAST_START_SECONDS, self.seconds)
        if self._start_seconds is not None:
            # A later start takes about as long as the first one.
            share = max(_LEAST_RUN_SECONDS, self.seconds_left * _SHARE_OF_TIME)
            limit = min(self.seconds_left, share + 2 * self._start_seconds)
        while not run.status().state.is_final:
            if self._has_stepped(run) or has_begun(run):
                self.has_stepped = True
                break
            if time.monotonic() - began > limit:
                raise NotShownError(self._describe_start(limit, is_first), is_failure=False)
            time.sleep(_POLL_SECONDS)
        if is_first:
            self._start_seconds = time.monotonic() - began
            self.deadline = time.monotonic() + self.seconds

    def _has_stepped(self, run: Run) -> bool:
        events = self.events(run)
        return any(
            event["event"] in _SIGNS_OF_A_STEP or (event["event"] == "ranks" and event["joined"])
            for event in events
        )

    def _describe_start(self, limit: float, is_first: bool) -> str:
        took = format_duration(round(limit))
        if not is_first:
            return f"a later run had taken no step after {took}: {self.more_time}"
        minutes = math.ceil(2 * limit / 60)
        return (
            f"no step was seen in {took}, the limit for imports and all else before the first step: the code may still "
            f"be importing, or it reports no steps; for twice that time: --minutes {minutes}"
        )

    def start(self, hold: int = 0) -> Run:
        """Start a run that ends after `last_step`; with `hold` its ranks wait at that step.

        Raises:
            NotShownError: It did not start.
        """
        self._require_time()
        names: dict[str, object] = {
            REHEARSAL_LAST_VARIABLE: self.last_step,
            REHEARSAL_SAMPLES_VARIABLE: 1,
            LOG_EVERY_VARIABLE: 1,
        }
        if self.imports is not None:
            names[REHEARSAL_FORKS_VARIABLE] = self.imports
        values = {**names, REHEARSAL_HOLD_VARIABLE: hold} if hold else names
        try:
            return self.runner.start(
                self.spec.with_values({f"code.env.{n}": str(v) for n, v in values.items()})
            )
        except CloudtrainError as error:
            raise NotShownError(f"the run did not start: {error.message}") from None

    def resume(self, ended: Ended, *overrides: str, instances: int | None = None) -> Ended:
        """Resume a run and wait for the end of the new one.

        Raises:
            NotShownError: It did not start, or there was no time.
        """
        return self.wait(self.begin_resume(ended, *overrides, instances=instances))

    def begin_resume(self, ended: Ended, *overrides: str, instances: int | None = None) -> Run:
        """Start a run that resumes one that has ended.

        Raises:
            NotShownError: It did not start, or there was no time.
        """
        self._require_time()
        hold = f"code.env.{REHEARSAL_HOLD_VARIABLE}=0"
        try:
            return self.runner.resume(ended.run, [hold, *overrides], instances)
        except CloudtrainError as error:
            raise NotShownError(f"it cannot be resumed: {error.message}") from None

    def _require_time(self) -> None:
        # The time begins with the first step of the first run.
        if self._start_seconds is not None and self.seconds_left == 0:
            raise NotShownError(
                f"the time of the rehearsal is over: {self.more_time}", is_failure=False
            )

    def wait(self, run: Run, since: float | None = None) -> Ended:
        """Wait for the end of a run.

        Args:
            run: The run.
            since: Time of its interruption on the monotonic clock, after which it has 180 s at most.

        Raises:
            NotShownError: There was no time, or it failed on a full disk.
        """
        seconds = self.seconds_left
        if since is not None:
            seconds = min(seconds, _END_SECONDS)
        status = self._until_ended(run, seconds)
        stopped = 0.0 if since is None else time.monotonic() - since
        ended = Ended(
            run=run,
            status=status,
            events=self.events(run),
            stop_seconds=stopped,
        )
        if status.state is State.FAILED and is_disk_full(self.home):
            message = f"the disk of this machine is full, and the run failed: {why(ended)}"
            raise NotShownError(message, is_failure=False)
        return ended

    def _until_ended(self, run: Run, seconds: float) -> Status:
        """Return the final status of a run; show its steps until then.

        Raises:
            NotShownError: It has not ended in time.
        """
        for status in poll(
            run.status,
            run.poll_backoff(),
            changing=lambda each: each.progress.last_step,
            timeout_seconds=seconds,
        ):
            if status.state.is_final:
                return status
            self.show_step(status)
        message = f"the run had not ended when the time of the rehearsal was over: {self.more_time}"
        raise NotShownError(message, is_failure=False)

    def show_step(self, status: Status) -> None:
        """Show the step that a run has reached."""
        step = status.progress.last_step
        if status.state is State.STOPPING:
            self._on_detail("waiting for its end")
        elif step and self.ends_at_last_step:
            self._on_detail(f"step {step} of {self.last_step}")
        elif step:
            self._on_detail(f"step {step}")
        else:
            self._on_detail("starting the ranks")

    def events(self, run: Run) -> list[dict[str, Any]]:
        """Return the events of a run so far, of all hosts."""
        lines = run.logs(only=LogFilter())
        return [event for line in lines if (event := parse_event(line.text)) is not None]

    def until_held(self, run: Run, step: int) -> dict[int, int]:
        """Wait until all ranks wait at a step, and the checkpoint before it is complete; return their process ids.

        Raises:
            NotShownError: The run ended before, or there was no time.
        """
        while True:
            held = self._held(run)
            status = run.status()
            self.show_step(status)
            saved = status.progress.checkpoint
            is_saved = saved is not None and saved.step >= self.saved_before(step)
            if is_saved and len(held) == self.ranks:
                return held
            if status.state.is_final:
                reason = status.reason or f"it ended as {status.state}"
                raise NotShownError(f"the run did not reach step {step}: {first_line(reason)}")
            if self.seconds_left == 0:
                raise NotShownError(
                    f"the run did not reach step {step} in time: {self.more_time}", is_failure=False
                )
            time.sleep(_POLL_SECONDS)

    def saved_before(self, step: int) -> int:
        """Return the step of the checkpoint that a run has when it waits at a step."""
        every = self.spec.checkpoint.every.steps or 1
        return step - 1 - (step - 1) % every

    def _held(self, run: Run) -> dict[int, int]:
        found = {}
        for folder in self.rank_folders(run):
            for path in folder.glob("held-*"):
                with contextlib.suppress(ValueError, OSError):
                    rank = int(path.name.removeprefix("held-"))
                    found[rank] = int(path.read_text(encoding="utf-8"))
        return found

    def rank_folders(self, run: Run) -> list[Path]:
        """Return the folders, one per host and attempt, in which the ranks of a run record their steps."""
        return sorted(MlTree(root).rehearsal for root in self.host_roots(run))

    def host_roots(self, run: Run) -> list[Path]:
        """Return /opt/ml of each host and attempt of a run."""
        found: set[Path] = set()
        for parent in (self.home / "runs", *self.home.glob("sandbox/*")):
            folder = parent / run.id
            found.update(folder.glob("hosts/*/opt/ml"))
            found.update(folder.glob("attempt-*/hosts/*/opt/ml"))
        return sorted(found)

    def records(self, run: Run) -> list[Record]:
        """Return the steps that the ranks of a run have taken."""
        found = []
        for folder in self.rank_folders(run):
            for path in sorted(folder.glob("steps-*.jsonl")):
                rank = int(path.stem.removeprefix("steps-"))
                for line in path.read_text(encoding="utf-8").splitlines():
                    # The last line of a killed rank is incomplete.
                    with contextlib.suppress(ValueError, KeyError):
                        content = load_json(line)
                        record = Record(
                            step=content["step"],
                            rank=rank,
                            samples=tuple(content["samples"]),
                        )
                        found.append(record)
        return found

    def stop(self, run: Run) -> Ended:
        """Stop a run, as SageMaker does: SIGTERM to the first process of each host. Wait for its end."""
        since = time.monotonic()
        run.stop()
        return self.wait(run, since)

    def kill(self, run: Run, what: str, held: Mapping[int, int]) -> Ended:
        """Send SIGKILL to the last rank, to all processes of the last host, or to the launcher of the first one."""
        since = time.monotonic()
        if what == RANK:
            os.kill(held[max(held)], signal.SIGKILL)
        else:
            self._kill_container(run, what)
        return self.wait(run, since)

    def rank_processes(self, run: Run) -> dict[int, int]:
        """Return the process ids of a script's ranks by rank."""
        import psutil

        from cloudtrain.backends.container.process_tree import processes_of_run

        found: dict[int, int] = {}
        for process in processes_of_run(run.id):
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                environ = process.environ()
                rank = int(environ.get("RANK") or environ[HOST_RANK_VARIABLE])
                found[rank] = min(found.get(rank, process.pid), process.pid)
        return found

    def _kill_container(self, run: Run, what: str) -> None:
        from cloudtrain.backends.container.process_tree import kill, processes_of_run

        by_root: dict[str, list[psutil.Process]] = {}
        for process in processes_of_run(run.id):
            root = _root_of(process)
            if root:
                by_root.setdefault(root, []).append(process)
        if not by_root:
            raise NotShownError(
                "the processes of the run were not found on this machine", is_failure=False
            )
        roots = sorted(by_root)
        if what == HOST:
            kill(by_root[roots[-1]])
            return
        kill([each for each in by_root[roots[0]] if _is_launcher(each)])


def _root_of(process: psutil.Process) -> str:
    import psutil

    try:
        return process.environ().get(INSTANCE_VARIABLE, "")
    except psutil.Error:
        return ""


def _is_launcher(process: psutil.Process) -> bool:
    import psutil

    try:
        return "cloudtrain_runtime.launch" in process.cmdline()
    except psutil.Error:
        return False


def is_disk_full(folder: Path) -> bool:
    """Return whether the disk of a folder has so little space that it may be the reason of a failure."""
    return shutil.disk_usage(folder).free < FULL_BYTES


def has_succeeded(ended: Ended) -> bool:
    """Return whether a run has succeeded."""
    return ended.status.state is State.SUCCEEDED


def why(ended: Ended) -> str:
    """Return why a run did not succeed, in one line."""
    return first_line(ended.status.reason) or f"it ended as {ended.status.state}"


def describe_lone_ranks(reports: Iterable[Event], alone: int, ranks: int) -> str:
    """Return a sentence about ranks that have exchanged no data, by their hosts' events `ranks`."""
    if any(report.get("unused") for report in reports):
        text = f"{alone} of {ranks} ranks have moved no data in their process group"
    else:
        text = f"{alone} of {ranks} ranks never joined a process group"
    return f"{text}: each trains a model of its own"


def not_started(driver: RunDriver, error: NotShownError) -> Iterator[Check]:
    """Yield the checks after a first run that has not come to its end."""
    if driver.has_stepped:
        yield passed(STARTS, IMPORTED)
    yield Check(TRAINS if driver.has_stepped else STARTS, error.result, str(error))


def find_training_fault(ended: Ended, alone: int, ranks: int) -> str:
    """Return what is wrong with a training: lone ranks, of which there are so many, or a loss; else an empty text."""
    if alone:
        return describe_lone_ranks(ended.of_kind("ranks"), alone, ranks)
    infinite = [step for step, loss in ended.losses.items() if loss is None]
    return f"the loss of step {infinite[0]} is not finite" if infinite else ""


def first_line(text: str) -> str:
    """Return the first line of a text, at most 300 characters."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[0].strip()[:300] if lines else ""


def steps_of(records: Sequence[Record]) -> dict[int, tuple[str, ...]]:
    """Return the samples of each step over all ranks, sorted. A step that was repeated counts as its last time."""
    last: dict[tuple[int, int], Record] = {}
    for record in records:
        last[record.step, record.rank] = record
    found: dict[int, list[str]] = {}
    for (step, _), record in last.items():
        found.setdefault(step, []).extend(record.samples)
    return {step: tuple(sorted(samples)) for step, samples in found.items()}
