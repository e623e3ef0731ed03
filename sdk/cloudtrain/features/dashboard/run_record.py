"""What the page of one run shows, folded from its log, status and plan."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cloudtrain.client.next_step import explain_with_next_step, submit_again
from cloudtrain.console.terminal import strip_escapes, visible_part
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.dashboard.log_levels import LevelReader
from cloudtrain.features.dashboard.run_words import (
    evaluation_rows,
    plan_rows,
    run_words,
    setting_groups,
    time_hints,
    worded_event,
)
from cloudtrain.job.job_fields import SWEEP_TAG, TRIAL_TAG
from cloudtrain.runs.comparison import known_evaluations, settings_of
from cloudtrain.runs.history import EVENT_LINES, MetricHistory, MetricValue
from cloudtrain.runs.known_runs import job_name
from cloudtrain.runs.ledger import make_ledger
from cloudtrain.runs.ledger_reading import has_all_events
from cloudtrain.runs.ledger_words import describe_share, ledger_document
from cloudtrain.runs.log_lines import LogLine, split_rank
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status, status_texts
from cloudtrain.runs.stretches import Stretches, fold_stretches
from cloudtrain.runs.titles import metric_title
from cloudtrain.runs.unread_metrics import format_patterns, suggest_patterns
from cloudtrain_runtime.contract import parse_event
from cloudtrain_runtime.contract.redaction import redact

POINTS = 2_000
"""Most points of a curve on a page that covers the run; a zoomed page fetches its range anew."""

_MOST_LINES = 20_000
_MOST_EVENTS = 2_000
_MOST_APPENDED = 50
"""Most values that are added to a long curve as they are; more at a time mean that its log is still being read."""

_HINT_LINES = 2_000
"""Lines of a log without metrics in which numbers are looked for."""

_CURVES_ONLY = frozenset({"step"})
"""Kinds of events that only the curves show."""

_ANALYSIS = "analysis"
_POINTS_PER_PART = 5
"""Most points that are kept of a part of a curve: first, lowest, highest, last, and one that is not finite."""

Curve = dict[str, list[Any]]
"""A curve as the page reads it: `steps`, `times` (seconds since the epoch, or None) and `values` (None: not finite)."""


class RunRecord:
    """Metrics, events and last lines of a run's log. `add` may be called in another thread than the other methods."""

    def __init__(self) -> None:
        self.history = MetricHistory()
        self._events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.analysis: Mapping[str, Any] | None = None
        self.stretches: Stretches = ()
        self.lines: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        self._levels = LevelReader()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @classmethod
    def read(cls, run: Run) -> RunRecord:
        """Return the record of a run's log so far.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        record = cls()
        for line in run.logs():
            record.add(line)
        return record

    def add(self, line: LogLine) -> None:
        """Add a line of the log."""
        event = parse_event(line.text)
        with self._lock:
            if event is None:
                self._add_line(line)
                return
            self.history.add(event, line.time)
            if line.host == EVENT_LINES.host:
                self.stretches = fold_stretches(self.stretches, event)
            kind = event["event"]
            if kind == _ANALYSIS:
                self.analysis = event
            elif kind not in _CURVES_ONLY:
                known = {"time": line.time, "host": line.host, **event}
                self._events.append({**known, **worded_event(event), "number": next(self._numbers)})

    def _add_line(self, line: LogLine) -> None:
        """Add a line that is no event, as the page reads it."""
        rank, text = split_rank(visible_part(line.text))
        shown = strip_escapes(text)
        found: dict[str, Any] = {
            "number": next(self._numbers),
            "host": line.host,
            "rank": rank,
            "time": line.time,
            "text": shown,
        }
        level = self._levels.level(line.host, rank, shown)
        if level:
            found["level"] = level
        self.lines.append(found)

    def metrics_hint(self) -> str:
        """Return the line of a job file with patterns for the numbers in a log without metrics; may be empty."""
        with self._lock:
            if self.history.metrics or not self.lines:
                return ""
            texts = [line["text"] for line in itertools.islice(self.lines, _HINT_LINES)]
        patterns = suggest_patterns(texts)
        return format_patterns(patterns) if patterns else ""

    def words(self, status: Status, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the page of the run says that changes while the run is in progress."""
        with self._lock:
            events = list(self._events)
            names = list(self.history.metrics)
        return {
            **run_words(status, plan, events, names, time.time()),
            "metrics_hint": self.metrics_hint(),
        }

    def curves(
        self,
        names: Iterable[str] | None = None,
        *,
        first: float = 0,
        last: float = float("inf"),
        points: int = POINTS,
    ) -> dict[str, Curve]:
        """Return thinned curves by metric.

        Args:
            names: The metrics; by default all.
            first: First step.
            last: Last step.
            points: Most points of a curve.
        """
        with self._lock:
            metrics = self.history.metrics
            chosen = {
                name: list(metrics[name])
                for name in (metrics if names is None else names)
                if name in metrics
            }
        if first > 0 or last < float("inf"):
            chosen = {
                name: [each for each in found if first <= each.step <= last]
                for name, found in chosen.items()
            }
        return {name: make_curve(thin_values(found, points)) for name, found in chosen.items()}

    def new_values(
        self, sent: dict[str, tuple[int, int]]
    ) -> tuple[dict[str, Curve], dict[str, Curve]]:
        """Return the values since the last call: those to append by metric, and curves that begin anew.

        Args:
            sent: By metric the number of values and the last step that were returned before; it is updated.
        """
        appended = dict[str, Curve]()
        replaced = dict[str, Curve]()
        with self._lock:
            found = {
                name: values
                for name, values in self.history.metrics.items()
                if _mark(values) != sent.get(name)
            }
            for name, values in found.items():
                count, step = sent.get(name, (0, -1))
                is_longer = 0 < count <= len(values) and values[count - 1].step == step
                if is_longer and (len(values) <= POINTS or len(values) - count <= _MOST_APPENDED):
                    appended[name] = make_curve(values[count:])
                else:
                    replaced[name] = make_curve(thin_values(values, POINTS))
                sent[name] = _mark(values)
            for name in set(sent) - set(self.history.metrics):
                replaced[name] = make_curve([])
                del sent[name]
        return appended, replaced

    def lines_after(self, number: int, most: int = _MOST_LINES) -> list[dict[str, Any]]:
        """Return the newest lines after the one with this number, as the page reads them."""
        with self._lock:
            found = [line for line in self.lines if line["number"] > number]
        return found[-most:]

    def events_after(self, number: int) -> list[dict[str, Any]]:
        """Return the events after the one with this number but those of steps, oldest first."""
        with self._lock:
            return [event for event in self._events if event["number"] > number]


def thin_values(values: Sequence[MetricValue], most: int) -> list[MetricValue]:
    """Return at most `most` of a metric's values, in their order.

    The values are divided into parts of equal length. Of each part its first, lowest, highest and last value stay, and
    the first that is not finite. So a spike of a single step stays, and the curve covers the same range.

    Args:
        values: All values, ordered by step.
        most: Most points, at least 5.
    """
    if len(values) <= most:
        return list(values)
    parts = max(1, most // _POINTS_PER_PART)
    kept: list[MetricValue] = []
    for part in range(parts):
        indices = range(len(values) * part // parts, len(values) * (part + 1) // parts)
        finite = [
            (number, index) for index in indices if (number := values[index].value) is not None
        ]
        extremes = {min(finite)[1], max(finite)[1]} if finite else set()
        broken = next(({index} for index in indices if values[index].value is None), set())
        kept += [values[index] for index in sorted({indices[0], indices[-1]} | extremes | broken)]
    return kept


def make_curve(values: Sequence[MetricValue]) -> Curve:
    """Return values as three lists."""
    return {
        "steps": [each.step for each in values],
        "times": [None if each.time is None else round(each.time, 2) for each in values],
        "values": [each.value for each in values],
    }


def _mark(values: Sequence[MetricValue]) -> tuple[int, int]:
    return len(values), values[-1].step


def run_row(
    status: Status, plan: Mapping[str, Any] | None, curve: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a run's row in the list.

    Args:
        status: Its status.
        plan: Its plan.json, or None while it is not read.
        curve: A few points of its key metric, or None.
    """
    metrics = status.progress.metrics
    name = main_metric(metrics)
    tags = {} if plan is None else tags_of(plan)
    began = status.started or status.created
    return {
        "reference": status.reference,
        "run": status.run,
        "backend": status.backend,
        "name": (plan or {}).get("job", {}).get("name") or job_name(status.run),
        "state": str(status.state),
        "is_final": status.state.is_final,
        "reason": status.reason,
        "created": status.created.timestamp() if status.created else None,
        "began": began.timestamp() if began else None,
        "ended": status.ended.timestamp() if status.ended else None,
        "step": status.progress.last_step,
        "total_steps": status.progress.total_steps,
        "seconds_left": status.seconds_left(),
        "metric": None
        if name is None
        else {"name": name, "title": metric_title(name), "value": metrics[name]},
        "curve": curve,
        "attempts": len(status.attempts),
        "cost_usd": status.cost_usd,
        "instance_type": status.instance_type,
        "tags": tags,
        "sweep": tags.get(SWEEP_TAG, "") if TRIAL_TAG in tags else "",
        "texts": status_texts(status, time.time()),
    }


def tags_of(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's tags in a plan.json."""
    tags = plan.get("job", {}).get("tags", {})
    if not isinstance(tags, Mapping):
        return {}
    return {str(name): str(value) for name, value in tags.items()}


def run_document(
    run: Run,
    record: RunRecord,
    status: Status,
    plan: Mapping[str, Any],
    *,
    points: int = POINTS,
    most_lines: int = _MOST_LINES,
) -> dict[str, Any]:
    """Return what the page of a run shows.

    Args:
        run: The run.
        record: Its log so far.
        status: Its status.
        plan: Its plan.json, which may be empty.
        points: Most points of a curve.
        most_lines: Most lines of the log, the newest ones.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    settings = {
        path: redact(it) if isinstance(it, str) else it for path, it in settings_of(plan).items()
    }
    return {
        **run_row(status, plan),
        "status": status.to_json(),
        "plan": _plan_part(plan),
        "settings": settings,
        "setting_groups": setting_groups(settings),
        "plan_rows": plan_rows(plan, status.backend),
        "words": record.words(status, plan),
        "curves": record.curves(points=points),
        "events": record.events_after(0),
        "analysis": record.analysis,
        "evaluations": evaluation_rows(known_evaluations(run)),
        "explanation": _explanation(run, status) if status.state is State.FAILED else None,
        "ledger": ledger_part(status, record, known_facts(run) if status.state.is_final else {}),
        "lines": record.lines_after(0, most_lines),
    }


def ledger_part(status: Status, record: RunRecord, facts: Mapping[str, str]) -> dict[str, Any]:
    """Return where the time and the money of a run went, as the page shows it.

    Args:
        status: Its status.
        record: Its log so far.
        facts: The known values of its job, for advice after its end.
    """
    stretches = None if has_all_events(status) else record.stretches
    ledger = make_ledger(status, time.time(), stretches)
    share = None if ledger.ratio is None else describe_share(ledger.ratio)
    return {**ledger_document(ledger, facts), "share": share, "hints": time_hints()}


def known_facts(run: Run) -> Mapping[str, str]:
    """Return the known values of a run's job; none where they cannot be read."""
    try:
        return run.facts()
    except CloudtrainError:
        return {}


def _explanation(run: Run, status: Status) -> dict[str, Any]:
    """Return why a run has failed, and as `submit` the command after a fix of its job or code, or None."""
    found = explain_with_next_step(run, status)
    return {
        **found.to_json(),
        "cause": "" if found.failure is None else found.failure.words,
        "where": found.where,
        "submit": submit_again(status, found, run.facts()),
    }


def _plan_part(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a plan.json that the page shows, with secrets redacted."""
    source = plan.get("source") or {}
    parts = {
        name: plan.get(name)
        for name in ("cluster", "batch", "length", "cost", "bundle", "checkpoint", "image")
    }
    return {
        **parts,
        "command": redact((plan.get("command") or {}).get("text") or ""),
        "commit": source.get("commit"),
        "branch": source.get("branch"),
        "diff": redact(source.get("diff") or ""),
        "warnings": plan.get("warnings", []),
        "decisions": plan.get("decisions", []),
        "max_runtime_seconds": plan.get("max_runtime_seconds"),
    }
