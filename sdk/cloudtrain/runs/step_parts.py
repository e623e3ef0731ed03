"""What the time of a step is spent on."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain_runtime.contract.metric_values import STEP_PARTS


def step_parts(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the seconds of each known part of a step, by its name; nothing while all are zero."""
    parts = {part: metrics.get(f"train/{part}_seconds") for part in STEP_PARTS}
    known = {part: seconds for part, seconds in parts.items() if seconds is not None}
    return known if sum(known.values()) else {}


def describe_seconds(seconds: float) -> str:
    """Return the duration of a step: `25 ms`, `1.3 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
