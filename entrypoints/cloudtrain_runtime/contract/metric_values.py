"""The metrics in an event, by `split/name`: the names that `status`, histories and MLflow use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

SPEED_FIELDS: Final = (
    "samples_per_second",
    "tokens_per_second",
    "data_wait",
    "mfu",
    "memory_bytes",
)
STEP_PARTS: Final = ("data", "forward", "backward", "optimizer", "checkpoint")
"""Parts of a step's time, in the metrics `train/<part>_seconds`."""

NULL_IF_NONFINITE: Final = ("loss", "grad_norm")
"""Metrics that are null only if they are not finite. Other metrics are null if they are unknown."""

EVALUATION_FIELDS: Final = frozenset(
    {"event", "split", "step", "epoch", "time", "samples", "host", "rank"}
)
"""Fields of an evaluation event that are not metrics."""


def metric_values(event: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the metrics of a valid event with their values; None for a value that is not finite.

    Events other than `step` and `evaluation` have none.
    """
    if event["event"] == "step":
        yield from step_values(event)
    elif event["event"] == "evaluation":
        split = event.get("split", "validation")
        yield from (
            (f"{split}/{name}", value)
            for name, value in event.items()
            if name not in EVALUATION_FIELDS
        )


def step_values(event: Mapping[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Yield the metrics in the fields of a step, which events of the end of a run can have, too."""
    for name in ("loss", "learning_rate", "grad_norm"):
        if event.get(name) is not None or (name in event and name in NULL_IF_NONFINITE):
            yield f"train/{name}", event[name]
    for name, value in event.get("metrics", {}).items():
        yield (name if "/" in name else f"train/{name}"), value
    for name in SPEED_FIELDS:
        if event.get(name) is not None:
            yield f"train/{name}", event[name]
    split = event.get("split", {})
    for part in STEP_PARTS:
        if split.get(part) is not None:
            yield f"train/{part}_seconds", split[part]
