"""The last screen of a followed run: what, how it ended and how long it took; how good; where; what next."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cloudtrain.console import BOLD, DIM, YELLOW, coloured, command_name
from cloudtrain.console.cells import cell_count, cut_text, pad, wrapped
from cloudtrain.console.runs import STATE_COLOURS, next_step
from cloudtrain.console.status_fields import as_one_line, device_row, spent_row
from cloudtrain.console.terminal import can_show
from cloudtrain.errors import EXIT_DONE, EXIT_RUN_FAILED
from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.facts import kind_of_job
from cloudtrain.failure_rules.rules.base import Jobs
from cloudtrain.runs.evaluations import EVALUATION_SUFFIX
from cloudtrain.runs.event_words import describe_analysis
from cloudtrain.runs.main_metric import is_higher_better, is_lower_better
from cloudtrain.runs.phases import describe_phases, run_seconds
from cloudtrain.runs.results import key_metrics, short_reason
from cloudtrain.runs.shown_metrics import describe_metric, plain_metrics
from cloudtrain.runs.status import State
from cloudtrain.runs.step_parts import describe_seconds, step_parts
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.installation import is_installed
from cloudtrain.support.run_id import job_of, short_id
from cloudtrain.support.shown_places import shown_place
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.metric_values import metric_values

if TYPE_CHECKING:
    from cloudtrain.failure_rules import Explanation, Facts
    from cloudtrain.runs.status import Status
    from cloudtrain_runtime.contract.events import Event

_SIGNS = {
    State.SUCCEEDED: ("✓", "ok"),
    State.FAILED: ("✗", "failed"),
    State.STOPPED: ("■", "stopped"),
    State.INTERRUPTED: ("!", "interrupted"),
}
"""Sign of a state, and the word where the encoding lacks it."""

_BARS = "▁▂▃▄▅▆▇█"
_BAR_POINTS = 8
_LEAST_POINTS = 3
_MOST_POINTS = 2000
_LEAST_SHARE = 0.05
_STEP_PARTS = 3
_LAST_LINES = 5
_WARNINGS = 2


Point = tuple[int, float]
"""Step and value of a metric."""


def _value(point: Point) -> float:
    return point[1]


@dataclass
class SeenEvents:
    """What the log of a followed run has shown of its metrics: their curves, and analyses by split."""

    curves: dict[str, list[Point]] = field(default_factory=dict)
    extremes: dict[str, tuple[Point, Point]] = field(default_factory=dict)
    """Smallest and largest value of each curve, which a long curve may no longer have."""
    analyses: dict[str, Event] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add an event of the log."""
        if event["event"] == "analysis":
            self.analyses[event["split"]] = event
        elif event["event"] in ("evaluation", "step") and "step" in event:
            for name, value in plain_metrics(dict(metric_values(event))).items():
                self._add_point(name, event["step"], value)

    def _add_point(self, name: str, step: int, value: float | None) -> None:
        points = self.curves.setdefault(name, [])
        known = len(points)
        # After a restart the steps begin again.
        while points and points[-1][0] >= step:
            points.pop()
        if len(points) < known:
            self.extremes.pop(name, None)
        if value is not None and math.isfinite(value):
            points.append((step, value))
        considered = points if name not in self.extremes else [*self.extremes[name], *points[-1:]]
        if considered:
            least = min(considered, key=_value)
            self.extremes[name] = (least, max(considered, key=_value))
        if len(points) > _MOST_POINTS:
            del points[1::2]


@dataclass(frozen=True)
class Ending:
    """How a run has ended.

    Attributes:
        status: Its status.
        seen: What its log has shown.
        cause: Why it has failed, or None.
        unexplained: Why the cause is not known; empty if it is, or nothing has failed.
        facts: The known values of its job.
        job: The job file and its options as typed, where they are known.
    """

    status: Status
    seen: SeenEvents
    cause: Explanation | None
    unexplained: str
    facts: Facts
    job: str | None


def closing_lines(ending: Ending, width: int, *, now: float) -> list[str]:
    """Return the last screen for a terminal of this width, with colours. `now` is in seconds since the epoch."""
    rows = [*_good_rows(ending.status, ending.seen)]
    if ending.status.exit_code == EXIT_RUN_FAILED:
        rows = [*_cause_rows(ending)]
    elif ending.status.exit_code != EXIT_DONE:
        rows = [*_reason_rows(ending.status), *rows]
    rows += _warning_rows(ending.status, now)
    rows += _place_rows(ending.status, now)
    lines = [*_head_lines(ending, width, now), *_row_lines(rows, width), ""]
    lines += _next_lines(ending, now)
    return lines


def _head_lines(ending: Ending, width: int, now: float) -> Iterator[str]:
    """Yield what ended, how and after how long; behind it the phases, or the error."""
    status = ending.status
    sign, word = _SIGNS.get(status.state, ("-", "-"))
    colour = STATE_COLOURS.get(status.state, BOLD)
    shown_sign = sign if can_show(sign, sys.stdout) else word
    took = run_seconds(status, now)
    text = f"{job_of(status.run)} {str(status.state).lower()}"
    if took is not None:
        preposition = "in" if status.exit_code == EXIT_DONE else "after"
        text += f" {preposition} {format_duration(took)}"
    progress = status.progress
    if status.exit_code != EXIT_DONE and progress.last_step is not None:
        text += f", step {progress.last_step:,}"
        text += f" of {progress.total_steps:,}" if progress.total_steps else ""
    behind = describe_phases(status, now, between=" · " if can_show("·", sys.stdout) else ", ")
    if status.exit_code == EXIT_RUN_FAILED:
        behind = _message(ending)
    head = f"{coloured(shown_sign, colour)} {coloured(text, BOLD)}"
    used = cell_count(f"{shown_sign} {text}")
    paint = colour if status.exit_code == EXIT_RUN_FAILED else DIM
    if used + 3 + cell_count(behind) <= width:
        yield f"{head}   {coloured(behind, paint)}" if behind else head
        return
    yield head
    for line in wrapped(behind, width - 2):
        yield f"  {coloured(line, paint)}"


def _message(ending: Ending) -> str:
    """Return the error in one line."""
    if ending.cause is not None and ending.cause.message:
        return as_one_line(ending.cause.message)
    return as_one_line(short_reason(ending.status))


@dataclass(frozen=True)
class _Fact:
    """A row of the last screen: its name, its value, what stands beside it, and the colour of the name.

    A value that is to be copied is never cut or wrapped. One that `status` shows in full may be cut.
    """

    name: str
    value: str
    note: str = ""
    colour: str = ""
    is_copied: bool = False
    is_cut: bool = False


def _good_rows(status: Status, seen: SeenEvents) -> Iterator[_Fact]:
    """Yield how good the model is, and how fast it was trained."""
    metrics = status.progress.metrics
    analysed: set[str] = set()
    for name in key_metrics(metrics):
        split = name.rpartition("/")[0]
        notes = []
        if split in seen.analyses and split not in analysed:
            analysed.add(split)
            notes.append(describe_analysis(seen.analyses[split]))
        notes += _curve_notes(name, metrics[name], seen)
        yield _Fact(name, describe_metric(metrics[name]), "  ".join(notes))
    parts = step_parts(metrics)
    if parts:
        total = sum(parts.values())
        dearest = sorted(parts.items(), key=lambda part: -part[1])[:_STEP_PARTS]
        shares = [
            f"{name} {seconds / total:.0%}"
            for name, seconds in dearest
            if seconds / total >= _LEAST_SHARE
        ]
        yield _Fact("step", describe_seconds(total), ", ".join(shares))
    device = device_row(status)
    if device is not None and status.progress.device not in (None, "cpu"):
        yield _Fact(*device)


def _curve_notes(name: str, last: float | None, seen: SeenEvents) -> Iterator[str]:
    """Yield the curve of a metric as bars, and its best value where that is not the last."""
    values = [value for _, value in seen.curves.get(name, ())]
    if len(values) >= _LEAST_POINTS and can_show(_BARS, sys.stdout):
        yield draw_bars(values)
    is_better_known = is_higher_better(name) or is_lower_better(name)
    if len(values) < _LEAST_POINTS or not is_better_known:
        return
    least, largest = seen.extremes[name]
    step, best = largest if is_higher_better(name) else least
    if last is None or describe_metric(best) != describe_metric(last):
        yield f"best {describe_metric(best)} at step {step:,}"


def draw_bars(values: Sequence[float]) -> str:
    """Return values as at most eight bars; of many, evenly spaced ones with the last."""
    points = min(_BAR_POINTS, len(values))
    step = (len(values) - 1) / max(1, points - 1)
    chosen = [values[round(index * step)] for index in range(points)]
    # The difference of two huge values would be infinite.
    scale = max(map(abs, chosen)) or 1.0
    chosen = [value / scale for value in chosen]
    least = min(chosen)
    spread = max(chosen) - least
    if spread == 0:
        return _BARS[0] * points
    top = len(_BARS) - 1
    return "".join(_BARS[round(top * (value - least) / spread)] for value in chosen)


def _cause_rows(ending: Ending) -> Iterator[_Fact]:
    """Yield where and why a run has failed."""
    cause = ending.cause
    if cause is None:
        yield _Fact("not explained", ending.unexplained)
        return
    source = _source_line(cause)
    if cause.place is not None and source:
        yield _Fact(cause.place, source, f"({cause.where})" if cause.where else "")
    else:
        if cause.failure is not None and cause.failure is not FailureClass.UNKNOWN:
            yield _Fact("cause", cause.failure.words)
        if cause.where:
            yield _Fact("where", cause.where)
    for index, line in enumerate(cause.last_lines[-_LAST_LINES:]):
        yield _Fact("" if index else "last lines", as_one_line(line))
    if cause.action and cause.action.rstrip(".") != f"Fix {cause.place}":
        yield _Fact("what to do", cause.action)


def _source_line(cause: Explanation) -> str:
    """Return the line of the job's code that raised the exception."""
    frames = [index for index, line in enumerate(cause.traceback) if line.startswith('  File "')]
    after = cause.traceback[frames[-1] + 1 :] if frames else ()
    is_source = bool(after) and after[0].startswith("    ")
    return after[0].strip() if is_source else ""


def _reason_rows(status: Status) -> Iterator[_Fact]:
    reason = short_reason(status)
    if reason:
        yield _Fact("reason", as_one_line(reason))


def _warning_rows(status: Status, now: float) -> Iterator[_Fact]:
    texts = (*status.alarms(now), *status.warnings(), *status.host_warnings())
    shown = texts if len(texts) <= _WARNINGS else texts[: _WARNINGS - 1]
    for text in shown:
        yield _Fact("warning", as_one_line(text), colour=YELLOW, is_cut=True)
    if len(shown) < len(texts):
        yield _Fact("warning", f"and {len(texts) - len(shown)} more", colour=YELLOW)


def _place_rows(status: Status, now: float) -> Iterator[_Fact]:
    """Yield where the results are, and what they cost."""
    checkpoint = status.progress.checkpoint
    artifacts = status.artifacts
    model = artifacts.get("model_folder") or artifacts.get("model")
    if status.exit_code != EXIT_DONE and checkpoint is not None:
        yield _Fact("kept", f"checkpoint of step {checkpoint.step:,}")
    if model is not None:
        yield _Fact("model", shown_place(model), is_copied=True)
    elif status.exit_code == EXIT_DONE and checkpoint is not None:
        yield _Fact("checkpoint", shown_place(checkpoint.uri), is_copied=True)
    elif status.exit_code == EXIT_DONE and "folder" in artifacts:
        yield _Fact("folder", shown_place(artifacts["folder"]), is_copied=True)
    spent = spent_row(status, now, status_time=now)
    if spent is not None:
        yield _Fact(*spent)


def _row_lines(rows: Sequence[_Fact], width: int) -> Iterator[str]:
    names = max((cell_count(row.name) for row in rows), default=0)
    values = max((cell_count(row.value) for row in rows if row.note), default=0)
    room = max(20, width - names - 4)
    if values > room // 2:
        values = 0
    indent = " " * (names + 4)
    before = ""
    for row in rows:
        # Equal names of consecutive rows are shown once.
        name = "" if row.name == before else row.name
        before = row.name
        start = f"  {coloured(pad(name, names), row.colour or DIM)}  "
        if row.is_copied:
            yield start + row.value
        elif row.is_cut:
            yield start + cut_text(row.value, room)
        elif row.note and cell_count(row.value) <= room // 2:
            value = pad(row.value, values)
            note = cut_text(row.note, room - cell_count(value) - 2)
            yield f"{start}{value}  {coloured(note, DIM)}"
        elif row.note:
            yield start + cut_text(row.value, room)
            yield indent + coloured(cut_text(row.note, room), DIM)
        else:
            for index, line in enumerate(wrapped(row.value, room)):
                yield (indent if index else start) + line


def _next_lines(ending: Ending, now: float) -> Iterator[str]:
    """Yield what to type next, with what it does; commands are never cut."""
    steps = dict(_next_steps(ending, now))
    width = max(map(len, steps))
    for name, command in steps.items():
        if not name:
            yield f"  {command}"
            continue
        yield f"  {coloured(f'{name:<{width}}', DIM)}  {command}"


def _next_steps(ending: Ending, now: float) -> Iterator[tuple[str, str]]:
    """Yield what to do next and its command."""
    status = ending.status
    called = command_name()
    run = short_id(status.run)
    if status.exit_code != EXIT_DONE:
        step = next_step(status, ending.job, ending.cause, ending.facts, name=short_id)
        if step.kind != "read":
            yield "" if step.kind == "fix" else step.kind, step.text
        yield "read", f"{called} logs {run}"
        return
    if any(_warning_rows(status, now)):
        yield "read", f"{called} status {run}"
    # What is not installed would only be an error.
    if status.uses_account or not is_installed("starlette"):
        yield "look", f"{called} metrics {run}"
    else:
        yield "look", f"{called} dashboard --open"
    if status.uses_account:
        yield "get", f"{called} download {run}"
    is_task = kind_of_job(ending.facts) is Jobs.TASK
    is_served = is_task and "model" in status.artifacts and not _is_evaluation(status)
    if is_served and is_installed("uvicorn"):
        yield "use", f"{called} serve {run}"
    if facts_of(status.backend).is_local and ending.job is not None:
        yield "price", f"{called} plan {ending.job}"


def _is_evaluation(status: Status) -> bool:
    return job_of(status.run).endswith(EVALUATION_SUFFIX)
