"""History of a run's metrics, folded from its events."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cloudtrain.errors import UserError, nearest
from cloudtrain.runs.log_lines import LogFilter, LogLine, LogSource
from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.metric_values import SPEED_FIELDS, STEP_PARTS, metric_values

EVENT_LINES = LogFilter(host="algo-1", grep=re.compile(re.escape(EVENT_PREFIX) + r"\{"))
"""The log lines that a history needs: rank 0, which runs on the first host, prints the metrics."""

SPEED_METRICS = frozenset(
    f"train/{name}" for name in (*SPEED_FIELDS, *(f"{part}_seconds" for part in STEP_PARTS))
)
"""Metrics of the training's speed, which tables and figures show only on request."""


class MetricValue(NamedTuple):
    """A value of a metric.

    Attributes:
        step: Optimizer steps done.
        time: When it was reported, in seconds since the epoch; None if unknown.
        value: The value; None if it is not finite.
    """

    step: int
    time: float | None
    value: float | None


def read_events(run: LogSource) -> Iterator[Event]:
    """Yield the events of rank 0 in a run's log so far.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    for line in run.logs(only=EVENT_LINES):
        if (event := parse_event(line.text)) is not None:
            yield event


def read_history(run: LogSource) -> MetricHistory:
    """Return the history of a run so far.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    return MetricHistory.of_lines(run.logs(only=EVENT_LINES))


class MetricHistory:
    """All values of a run's metrics, by `split/name` such as `train/loss`.

    After a restart, the steps of the later attempt replace those of the earlier one. An event begins each attempt. In
    a log of an earlier version, scripts have none, and a step that is smaller than the last one begins an attempt.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[MetricValue]] = {}
        self._samples: dict[str, int] = {}
        self._last_step = 0
        self._has_attempts = False
        # Whether the next step is the first one of an attempt.
        self._begins = False

    @classmethod
    def of_lines(cls, lines: Iterable[LogLine]) -> MetricHistory:
        """Return the history that the events in log lines report, in their order."""
        history = cls()
        for line in lines:
            event = parse_event(line.text)
            if event is not None:
                history.add(event, line.time)
        return history

    def add(self, event: Event, time: float | None = None) -> None:
        """Add the values of an event from `parse_event`.

        Args:
            event: The event; kinds without metrics are ignored.
            time: Time of its log line, for an event without a time.
        """
        kind = event["event"]
        step = event.get("step")
        time = event.get("time", time)
        if kind == "started":
            self._last_step = 0 if step is None else step
            self._drop_after(self._last_step)
            self._note_samples("train", event.get("train_samples"))
        elif kind == "attempt":
            self._has_attempts = self._begins = True
        elif kind == "step":
            self._last_step = event["step"]
            if self._begins:
                self._begins = False
                self._drop_after(event["step"] - 1)
            for name, value in metric_values(event):
                if not self._has_attempts:
                    self._restart(name, event["step"])
                self._insert(name, MetricValue(event["step"], time, value))
        elif kind == "evaluation":
            at = self._last_step if step is None else step
            self._note_samples(event.get("split"), event.get("samples"))
            for name, value in metric_values(event):
                self._insert(name, MetricValue(at, time, value))

    @property
    def metrics(self) -> Mapping[str, Sequence[MetricValue]]:
        """Values by metric, ordered by step; each metric has at least one."""
        return self._values

    @property
    def samples(self) -> Mapping[str, int]:
        """Samples of each split of the data, as far as the run has reported them."""
        return self._samples

    def select(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the metrics that names select.

        Args:
            names: Metrics such as `train/loss`, or names such as `loss` for all splits; none of them selects all
                metrics but those of the training's speed.

        Raises:
            UserError: no metric has this name.
        """
        if not names:
            return tuple(name for name in self._values if name not in SPEED_METRICS)
        selected: dict[str, None] = {}
        for name in names:
            found = [
                metric for metric in self._values if name in (metric, metric.rpartition("/")[2])
            ]
            if not found:
                raise UserError(f"there is no metric {name!r}", self._suggest(name))
            selected |= dict.fromkeys(found)
        return tuple(selected)

    def only(self, names: Iterable[str]) -> MetricHistory:
        """Return the history of these metrics, in their order."""
        history = MetricHistory()
        history._values = {name: self._values[name] for name in names}
        return history

    def _suggest(self, name: str) -> str:
        if not self._values:
            return "this run has reported no metrics so far"
        short_names = [metric.rpartition("/")[2] for metric in self._values]
        near = nearest(name, [*self._values, *short_names])
        if near:
            return f'did you mean "{near}"?'
        return f"this run has reported {', '.join(self._values)}"

    def rows(self, *, fill: bool = False) -> list[dict[str, Any]]:
        """Return one mapping per step, in their order: `step`, `time`, and the values of the step by metric.

        A row has no key for a metric without value at its step; with `fill` it has the value of an earlier step, once
        there is one. `time` is that of the step's first value.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for name, values in self._values.items():
            for step, time, value in values:
                row = by_step.setdefault(step, {"step": step, "time": time})
                if time is not None and (row["time"] is None or time < row["time"]):
                    row["time"] = time
                row[name] = value
        rows = [by_step[step] for step in sorted(by_step)]
        if not fill:
            return rows
        filled: list[dict[str, Any]] = []
        latest: dict[str, Any] = {}
        for row in rows:
            latest = {**latest, **row}
            filled.append(latest)
        return filled

    def to_json(self, run: str) -> dict[str, Any]:
        """Return the object that `metrics --json` prints."""
        metrics = {
            name: [value._asdict() for value in values] for name, values in self._values.items()
        }
        return {"run": run, "metrics": metrics}

    def to_frame(self, *, fill: bool = False) -> Any:
        """Return the rows as a pandas DataFrame with a column per metric; NaN where a row has no finite value.

        Raises:
            ImportError: pandas is not installed.
        """
        from pandas import DataFrame

        rows = self.rows(fill=fill)
        columns: dict[str, list[Any]] = {"step": [row["step"] for row in rows]}
        for name in ("time", *self._values):
            columns[name] = [
                float("nan") if row.get(name) is None else float(row[name]) for row in rows
            ]
        return DataFrame(columns)

    def _note_samples(self, split: Any, samples: Any) -> None:
        if isinstance(split, str) and isinstance(samples, int):
            self._samples[split] = samples

    def _insert(self, name: str, new: MetricValue) -> None:
        """Insert a value by its step; the newer of two values of a step stays."""
        values = self._values.setdefault(name, [])
        if not values or values[-1].step < new.step:
            # Nearly always. A long log has millions of values.
            values.append(new)
            return
        at = bisect.bisect_left(values, new.step, key=lambda value: value.step)
        if at < len(values) and values[at].step == new.step:
            values[at] = new
        else:
            values.insert(at, new)

    def _restart(self, name: str, step: int) -> None:
        """Drop the steps of an earlier attempt of a script that reports no start of its attempts."""
        values = self._values.get(name, [])
        if values and values[-1].step > step:
            del values[bisect.bisect_left(values, step, key=lambda value: value.step) :]

    def _drop_after(self, step: int) -> None:
        for values in self._values.values():
            del values[bisect.bisect_right(values, step, key=lambda value: value.step) :]
        self._values = {name: values for name, values in self._values.items() if values}
