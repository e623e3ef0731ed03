"""The latest metrics of a run as text: which are shown, in which order, and how. One rule for every screen."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain.runs.history import SPEED_METRICS
from cloudtrain.runs.main_metric import TRAINING_LOSS
from cloudtrain.support.units import format_number

_NOT_PLAIN = SPEED_METRICS | {"train/grad_norm"}
_MOST = 6


def plain_metrics(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the metrics without those of speed and the norm of the gradient, which have rows of their own."""
    return {name: value for name, value in metrics.items() if name not in _NOT_PLAIN}


def shown_metrics(metrics: Mapping[str, float | None]) -> list[str]:
    """Return the most important metrics, each as `train/loss 0.25`.

    The training loss comes first, then metrics of the test data, of other evaluations, and of the training.
    """
    plain = plain_metrics(metrics)
    return [f"{name} {describe_metric(plain[name])}" for name in sorted(plain, key=_order)[:_MOST]]


def describe_metric(value: float | None) -> str:
    """Return a metric's value as text."""
    return "not finite" if value is None else format_number(value)


def _order(name: str) -> tuple[bool, int, str]:
    split = name.partition("/")[0]
    return name != TRAINING_LOSS, {"test": 0, "train": 2}.get(split, 1), name
