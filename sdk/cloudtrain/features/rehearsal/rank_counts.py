"""Whether the losses of a training that was resumed with another number of ranks show a dependence on that number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cloudtrain.support.checks import Result

TOLERANCE = 0.05
"""Relative difference of losses with the same samples, up to which another order of summation explains them."""
_EQUAL = 1e-3
"""Relative difference of the first losses below which forward passes are the same: rounding, and no dropout."""


def judge_losses(
    reference: Mapping[int, float | None],
    resumed: Mapping[int, float | None],
    before: int,
    after: int,
) -> tuple[Result, str]:
    """Compare losses of the same samples, by step, with `before` and `after` ranks; return the result and its reason.

    The first step after the resume has the same weights. If its losses are equal, nothing is random, and a later
    difference comes from the updates: a learning rate or a gradient that depends on the number of ranks. If they differ
    in the ratio of the ranks, the loss itself does, as a sum in place of a mean. Another difference may be dropout or
    batch statistics.
    """
    pairs = {
        step: (expected, loss)
        for step, loss in sorted(resumed.items())
        if loss is not None and (expected := reference.get(step)) is not None
    }
    if not pairs:
        return Result.PASS, ""
    apart = {
        step: abs(loss - expected) / max(abs(expected), 1e-12)
        for step, (expected, loss) in pairs.items()
    }
    first = next(iter(pairs))
    text = f", losses differ by {max(apart.values()):.1e} at most"
    if max(apart.values()) <= TOLERANCE:
        return Result.PASS, text
    if apart[first] <= _EQUAL:
        why = f"that of step {first}, with the weights of the checkpoint, is equal: the updates depend on the ranks"
        return Result.FAIL, f"{text}; {why}"
    expected, loss = pairs[first]
    ratio = loss / expected if expected else math.inf
    if before != after and any(
        abs(ratio / each - 1) <= TOLERANCE for each in (after / before, before / after)
    ):
        why = f"that of step {first} is {ratio:.2g} times as large: it is in proportion to the number of ranks"
        return Result.FAIL, f"{text}; {why}"
    return (
        Result.UNKNOWN,
        f"{text}, more than {TOLERANCE:.0%}: dropout, batch statistics, or a fault",
    )
