"""Small curves of the runs' key metrics, for the list of runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.errors import CloudtrainError
from cloudtrain.features.dashboard.run_record import thin_values
from cloudtrain.runs.history import EVENT_LINES, MetricHistory, MetricValue
from cloudtrain.runs.log_lines import LogLine, LogSource
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.status import Status
from cloudtrain.support.backend_facts import facts_of
from cloudtrain_runtime.contract import parse_event

MOST_POINTS = 40
"""Most points of a sparkline, which is about 100 pixels wide."""

_DIGITS = 4
_LINES_PER_LOOK = 200
"""Lines of a log between two looks at the clock."""


@dataclass
class _Known:
    """What is known of a run's key metric.

    Attributes:
        metric: Its name, such as `validation/loss`.
        values: Its values, which are thinned now and then.
        is_read: Whether the log up to now is in the values, or is not to be read.
    """

    metric: str
    values: list[MetricValue] = field(default_factory=list)
    is_read: bool = False

    def add(self, step: int, value: float | None) -> None:
        """Add the newest value, as a status shows it."""
        while self.values and self.values[-1].step > step:
            # A later attempt repeats these steps.
            self.values.pop()
        if self.values and (self.values[-1].step == step or self.values[-1].value == value):
            # A metric of an evaluation keeps its value while the steps go up.
            return
        self.values.append(MetricValue(step, None, value))
        if len(self.values) > 2 * MOST_POINTS:
            self.values = thin_values(self.values, MOST_POINTS)


@dataclass
class _Reading:
    """A log that is read in several parts, because it is long."""

    reference: str
    lines: Iterator[LogLine]
    history: MetricHistory


class Sparklines:
    """The sparklines of all runs of the list.

    The log of a run without an account is read once. After that, and for all other runs, points come from the statuses
    that the list reads anyway: a log in an account costs calls.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._reading: _Reading | None = None

    def note(self, status: Status) -> None:
        """Add the value that a status shows."""
        metrics = status.progress.metrics
        name = main_metric(metrics)
        if name is None:
            return
        known = self._known.get(status.reference)
        if known is None or known.metric != name:
            # An evaluation takes the place of the training's loss: its values so far are in the log.
            known = _Known(name, is_read=facts_of(status.backend).uses_account)
            self._known[status.reference] = known
        if known.is_read and status.progress.last_step is not None:
            known.add(status.progress.last_step, metrics[name])

    def forget(self, reference: str) -> None:
        """Forget a run that was deleted."""
        self._known.pop(reference, None)
        if self.reading == reference:
            self._reading = None

    @property
    def reading(self) -> str:
        """The reference of the run whose log is read in part; empty for none."""
        return "" if self._reading is None else self._reading.reference

    def is_complete(self, reference: str) -> bool:
        """Return whether the run's log is read, or need not be."""
        known = self._known.get(reference)
        return known is None or known.is_read

    def read(self, run: LogSource, reference: str, deadline: float) -> bool:
        """Read a run's log for its sparkline, and return whether it is read to its end.

        Args:
            run: The run.
            reference: Its reference.
            deadline: When to stop, as `time.monotonic` counts. The next call for this run continues.
        """
        try:
            reading = self._begin(run, reference)
            while lines := list(itertools.islice(reading.lines, _LINES_PER_LOOK)):
                for line in lines:
                    if (event := parse_event(line.text)) is not None:
                        reading.history.add(event, line.time)
                if time.monotonic() > deadline:
                    return False
            self._keep(reference, reading.history)
        except CloudtrainError:
            # The list is of use without this curve. The page of the run says what is wrong with its log.
            self._keep(reference, MetricHistory())
        self._reading = None
        return True

    def curve(self, reference: str) -> Mapping[str, Any] | None:
        """Return a run's sparkline as the page reads it: `steps` and `values` (None: not finite); None without one."""
        known = self._known.get(reference)
        if known is None or len(known.values) < 2:  # noqa: PLR2004 (one value is no line)
            return None
        points = thin_values(known.values, MOST_POINTS)
        return {
            "steps": [each.step for each in points],
            "values": [None if each.value is None else _rounded(each.value) for each in points],
        }

    def _begin(self, run: LogSource, reference: str) -> _Reading:
        """Return the reading of this run's log, which an earlier call may have begun."""
        reading = self._reading
        if reading is None or reading.reference != reference:
            # It also closes the files of another reading.
            reading = _Reading(reference, iter(run.logs(only=EVENT_LINES)), MetricHistory())
            self._reading = reading
        return reading

    def _keep(self, reference: str, history: MetricHistory) -> None:
        known = self._known.get(reference)
        if known is None:
            return
        known.is_read = True
        known.values = thin_values(history.metrics.get(known.metric, ()), MOST_POINTS)


def _rounded(value: float) -> float:
    """Return a value with the digits that a drawing can show."""
    return float(f"{value:.{_DIGITS}g}")
