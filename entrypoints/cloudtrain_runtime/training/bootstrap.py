"""Confidence intervals of means by the bootstrap: samples are drawn anew, with replacement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

_RESAMPLES = 1_000
_LEAST_RESAMPLES = 200
_MOST_DRAWS = 200_000_000
"""Draws of all resamples together: large splits get fewer resamples, down to 200."""

_TAIL = 0.025


@dataclass(frozen=True)
class Measured:
    """A metric with the bounds of its 95 % confidence interval, which are None where they are unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, function: Callable[[float], float]) -> Measured:
        """Return a monotonic function of the value and its bounds."""
        bounds = [None if each is None else float(function(each)) for each in (self.low, self.high)]
        return Measured(float(function(self.value)), *bounds)


@torch.no_grad()
def bootstrap_mean(values: torch.Tensor, counts: torch.Tensor, seed: int) -> Measured | None:
    """Return a mean with its 95 % interval (percentiles of resampled means); None without values.

    Equal seeds and lengths draw equal samples.

    Args:
        values: Values of a metric, [N]: of each sample, or the sum of each group of samples.
        counts: Number of samples that each value is a sum of, [N].
        seed: Seed of the draws.
    """
    size = len(counts)
    if size == 0:
        return None
    values = values.double()
    weights = counts.double()
    mean = float(values.sum() / weights.sum())
    if size == 1:
        return Measured(mean)
    generator = torch.Generator().manual_seed(seed)
    resamples = max(_LEAST_RESAMPLES, min(_RESAMPLES, _MOST_DRAWS // size))
    drawn = torch.empty(resamples, dtype=torch.float64)
    for index in range(resamples):
        picked = torch.randint(size, (size,), generator=generator)
        drawn[index] = values[picked].sum() / weights[picked].sum()
    ordered = drawn.sort().values
    low = ordered[math.floor(_TAIL * (resamples - 1))]
    high = ordered[math.ceil((1 - _TAIL) * (resamples - 1))]
    return Measured(mean, float(low), float(high))
