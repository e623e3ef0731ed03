"""Confidence intervals of means by the bootstrap: samples are drawn anew, with replacement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
def bootstrap_means(
    sums: Mapping[str, torch.Tensor], counts: torch.Tensor, seed: int
) -> dict[str, Measured]:
    """Return means with their 95 % intervals (percentiles of resampled means).

    All metrics are resampled together. Equal seeds and lengths draw equal samples.

    Args:
        sums: Values by metric, [N]: of each sample, or the sum of each group of samples.
        counts: Number of samples that each value is a sum of, [N].
        seed: Seed of the draws.
    """
    size = len(counts)
    if not sums or size == 0:
        return {}
    # Shape [metrics, N].
    values = torch.stack([each.double() for each in sums.values()])
    weights = counts.double()
    means = values.sum(dim=1) / weights.sum()
    if size == 1:
        return {name: Measured(float(mean)) for name, mean in zip(sums, means, strict=True)}
    generator = torch.Generator().manual_seed(seed)
    resamples = max(_LEAST_RESAMPLES, min(_RESAMPLES, _MOST_DRAWS // size))
    drawn = torch.empty(len(sums), resamples, dtype=torch.float64)
    for index in range(resamples):
        picked = torch.randint(size, (size,), generator=generator)
        drawn[:, index] = values[:, picked].sum(dim=1) / weights[picked].sum()
    ordered = drawn.sort(dim=1).values
    low = math.floor(_TAIL * (resamples - 1))
    high = math.ceil((1 - _TAIL) * (resamples - 1))
    return {
        name: Measured(float(mean), float(ordered[row, low]), float(ordered[row, high]))
        for row, (name, mean) in enumerate(zip(sums, means, strict=True))
    }
