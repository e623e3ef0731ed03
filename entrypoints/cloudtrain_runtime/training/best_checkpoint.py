"""Which step had the best weights so far, by a metric of the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cloudtrain_runtime.contract import TrainConfig
from cloudtrain_runtime.contract.manifest import BEST_STATE
from cloudtrain_runtime.errors import JobError, TaskError

_KEPT_MARKS = 8
"""Should the checkpoints of the newest marks be missing, the one before them counts."""


@dataclass(frozen=True)
class Improvement:
    """An evaluation that was better than all before.

    Attributes:
        step: Optimizer steps done.
        value: Of the metric.
        values: All that was measured then.
        place: Uri of the folder that its checkpoint lies in, or an empty string for this run's own.
    """

    step: int
    value: float
    values: Mapping[str, float]
    place: str = ""


@dataclass
class BestTracker:
    """The best weights so far.

    Attributes:
        metric: What they are chosen by.
        mode: Whether less (`min`) or more (`max`) of it is better.
        marks: Improvements, the best last.
    """

    metric: str
    mode: str
    marks: list[Improvement] = field(default_factory=list)

    @classmethod
    def of(cls, train: TrainConfig, splits: Iterable[str]) -> BestTracker | None:
        """Return what a job asks for: None where the last weights are wanted.

        Raises:
            JobError: nothing tells which weights are best.
        """
        if train.export != "best":
            return None
        if "validation" not in splits:
            raise JobError(
                "train.export: best is told by the validation split, and datasets() has none: add it, or set "
                "train.export: last"
            )
        rule = train.early_stopping
        return cls(rule.metric, rule.mode) if rule is not None else cls("validation/loss", "min")

    @property
    def mark(self) -> Improvement | None:
        """The best one."""
        return self.marks[-1] if self.marks else None

    def improves(self, step: int, values: Mapping[str, float]) -> bool:
        """Note an evaluation of the validation split; return whether it is the best so far.

        Raises:
            TaskError: the metric is not measured.
        """
        value = metric_value(self.metric, values)
        sign = 1.0 if self.mode == "min" else -1.0
        if not math.isfinite(value) or (self.marks and sign * (self.marks[-1].value - value) <= 0):
            return False
        self.marks = [*self.marks[1 - _KEPT_MARKS :], Improvement(step, value, dict(values))]
        return True

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; its retention reads the marks."""
        return {"metric": self.metric, "mode": self.mode, "marks": [asdict(mark) for mark in self.marks]}

    def resume(self, state: Mapping[str, Any], place: str) -> None:
        """Go on from what a checkpoint has kept; marks of another metric are none.

        Args:
            state: The state in its manifest.
            place: Uri of the folder that it lies in, or an empty string for this run's own.
        """
        saved = state.get(BEST_STATE)
        if saved is not None and (saved["metric"], saved["mode"]) == (self.metric, self.mode):
            marks = [Improvement(**mark) for mark in saved["marks"]]
            self.marks = [replace(mark, place=mark.place or place) for mark in marks]


def metric_value(metric: str, values: Mapping[str, float]) -> float:
    """Return a metric such as `validation/loss` of an evaluation.

    Raises:
        TaskError: it is not measured.
    """
    name = metric.removeprefix("validation/")
    if name not in values:
        raise TaskError(f"train.early_stopping.metric: no {metric}; the Task measures {', '.join(values)}")
    return values[name]
