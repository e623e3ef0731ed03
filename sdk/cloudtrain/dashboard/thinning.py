"""Thinning of curves: fewer points, with every spike."""

from __future__ import annotations

from collections.abc import Sequence

from cloudtrain.runs.history import MetricValue

_POINTS_PER_PART = 5
"""Most points that are kept of a part: first, lowest, highest, last, and one that is not finite."""


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
        first, end = len(values) * part // parts, len(values) * (part + 1) // parts
        kept += [values[index] for index in sorted(_indices(values, first, end))]
    return kept


def _indices(values: Sequence[MetricValue], first: int, end: int) -> set[int]:
    """Return the indices of the values of one part that stay."""
    low = high = bad = None
    lowest, highest = float("inf"), float("-inf")
    for index in range(first, end):
        value = values[index].value
        if value is None:
            bad = index if bad is None else bad
            continue
        if value < lowest:
            low, lowest = index, value
        if value > highest:
            high, highest = index, value
    return {first, end - 1, *(index for index in (low, high, bad) if index is not None)}
