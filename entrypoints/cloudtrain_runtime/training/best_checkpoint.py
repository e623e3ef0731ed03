"""Best weights so far, and early stopping, by a metric of the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cloudtrain_runtime.contract import EarlyStopping, TrainConfig
from cloudtrain_runtime.contract.manifest import BEST_STATE
from cloudtrain_runtime.errors import JobError, TaskError

LOWEST_LOSS = EarlyStopping("validation/loss", patience=0)
"""The metric of a job without early stopping."""

_MAX_IMPROVEMENTS = 8
"""Improvements kept: if the checkpoint of the newest one is missing, an earlier one is exported."""


@dataclass(frozen=True)
class Improvement:
    """An evaluation with a better metric than all earlier ones. Checkpoints store the fields by name."""

    # optimizer steps done
    step: int
    # value of the metric
    value: float
    # all metrics of the evaluation by name
    values: Mapping[str, float]
    # URI of the folder with its checkpoint; empty for this run's own folder
    place: str = ""


@dataclass
class BestTracker:
    """Tracks which step had the best weights."""

    # metric that the weights are chosen by
    metric: str
    # whether a lower (`min`) or a higher (`max`) value is better
    mode: str
    # the evaluations that were the best so far, the best last
    improvements: list[Improvement] = field(default_factory=list)

    @classmethod
    def of(cls, train: TrainConfig, splits: Iterable[str]) -> BestTracker | None:
        """Return the tracker that a job needs; None where it exports the last weights.

        Raises:
            JobError: the Task has no validation split.
        """
        if train.export != "best":
            return None
        if "validation" not in splits:
            raise JobError(
                "train.export: best needs a validation split, and datasets() has none: add one, or set "
                "train.export: last"
            )
        rule = train.early_stopping or LOWEST_LOSS
        return cls(rule.metric, rule.mode)

    @property
    def latest(self) -> Improvement | None:
        """The latest improvement: the best evaluation so far."""
        return self.improvements[-1] if self.improvements else None

    def record(self, step: int, values: Mapping[str, float]) -> bool:
        """Record an evaluation of the validation split; return whether it is the best so far.

        Raises:
            TaskError: the Task does not measure the metric.
        """
        value = metric_value(self.metric, values)
        sign = 1.0 if self.mode == "min" else -1.0
        if not math.isfinite(value):
            return False
        if self.improvements and sign * (self.improvements[-1].value - value) <= 0:
            return False
        self.improvements = [
            *self.improvements[1 - _MAX_IMPROVEMENTS :],
            Improvement(step, value, dict(values)),
        ]
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the retention of checkpoints reads `marks`."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "marks": [asdict(each) for each in self.improvements],
        }

    def resume(self, state: Mapping[str, Any], place: str) -> None:
        """Restore the state in a checkpoint's manifest, unless it was tracked by another metric.

        `place` is the uri of the folder with the checkpoint; empty for this run's own folder.
        """
        saved = state.get(BEST_STATE)
        if saved is None:
            return
        if (saved["metric"], saved["mode"]) != (self.metric, self.mode):
            return
        improvements = [Improvement(**each) for each in saved["marks"]]
        self.improvements = [replace(each, place=each.place or place) for each in improvements]


@dataclass
class EarlyStoppingState:
    """Best value so far, and the evaluations since. Checkpoints store the fields by name."""

    # best value of the metric; None before the first finite one
    best: float | None = None
    # evaluations in a row that did not improve on it
    waited: int = 0

    def should_stop(self, rule: EarlyStopping, value: float) -> bool:
        """Record an evaluation; return whether training should stop."""
        sign = 1.0 if rule.mode == "min" else -1.0
        # A value that is not finite is never an improvement: no later value could be better than
        # it.
        is_better = math.isfinite(value) and (
            self.best is None or sign * (self.best - value) > rule.min_delta
        )
        if is_better:
            self.best = value
            self.waited = 0
        else:
            self.waited += 1
        return self.waited >= rule.patience


def metric_value(metric: str, values: Mapping[str, float]) -> float:
    """Return the value of a metric such as `validation/loss` in an evaluation.

    Raises:
        TaskError: the Task does not measure it.
    """
    name = metric.removeprefix("validation/")
    if name not in values:
        raise TaskError(
            f"train.early_stopping.metric: no {metric}; the Task measures {', '.join(values)}"
        )
    return values[name]
