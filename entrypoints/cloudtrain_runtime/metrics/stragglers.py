"""Detection of stragglers: ranks that are slower than the others, which all wait for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cloudtrain_runtime.metrics.step_timer import StepTimes
from cloudtrain_runtime.process.run_context import Context

OWN_PARTS: Final = ("data", "forward", "optimizer")
"""Parts of a step in which a rank waits for no other. The backward pass ends when that of the slowest rank does."""

_SLOW = 1.2
GPU_DELAY_SECONDS: Final = 1e-3
"""Smallest delay of a rank on a GPU that is reported: on a busy machine, small steps differ by that much."""

CPU_DELAY_SECONDS: Final = 0.05
"""The same of a rank on a CPU: ranks that share cores delay each other by turns, which says nothing about a host."""

_IN_A_ROW = 3
_MIN_INTERVAL_SECONDS = 0.1
"""Shortest time between two compared readings: three in a row must last longer than a moment of load."""

NUMBERS_PER_RANK: Final = len(OWN_PARTS) + 2
"""How many numbers each rank sends to the others."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow or fast again. The event has the same fields."""

    rank: int
    host: str  # name of its host
    ratio: float  # its time per step without waiting, as a multiple of the median
    part: str  # the part of a step with the largest delay
    is_over: bool = False  # whether the rank is as fast as the others again


class StragglerMonitor:
    """Compares the times per step of all ranks, and reports once that a rank is slow in several readings in a row.

    Readings in quick succession are skipped.

    Args:
        stage: This rank's pipeline stage: a rank is compared with the ranks that compute the same layers.
        least_seconds: Smallest delay that is reported.
    """

    def __init__(
        self, context: Context, stage: int = 0, least_seconds: float = GPU_DELAY_SECONDS
    ) -> None:
        self._least_seconds = least_seconds
        self._context = context
        self._stage = stage
        self._in_a_row = [0] * context.world_size
        self._reported = [False] * context.world_size
        self._seconds = 0.0  # since the last comparison

    def numbers(self, reading: StepTimes) -> tuple[float, ...]:
        """Return this rank's numbers for the other ranks."""
        own = (reading.split.get(part, 0.0) for part in OWN_PARTS)
        return (*own, reading.seconds, float(self._stage))

    def compare(self, rows: Sequence[Sequence[float]]) -> list[Straggler]:
        """Return the ranks that have become slow or fast again, from the `numbers` of each; equal on all ranks."""
        self._seconds += max(row[len(OWN_PARTS)] for row in rows)
        if self._seconds < _MIN_INTERVAL_SECONDS or len(rows) == 1:
            return []
        self._seconds = 0.0
        return list(self._changes(rows))

    def _changes(self, rows: Sequence[Sequence[float]]) -> Iterator[Straggler]:
        if any(sum(row[: len(OWN_PARTS)]) <= 0 for row in rows):
            return  # some rank has no reading yet
        per_host, hosts = self._context.local_world_size, self._context.hosts
        for rank, row in enumerate(rows):
            peers = [other[: len(OWN_PARTS)] for other in rows if other[-1] == row[-1]]
            # The lower median, so that of two ranks one can be slower than the median.
            median = statistics.median_low(sum(peer) for peer in peers)
            own = sum(row[: len(OWN_PARTS)])
            is_slow = own >= _SLOW * median and own - median >= self._least_seconds
            self._in_a_row[rank] = (
                self._in_a_row[rank] + 1 if is_slow != self._reported[rank] else 0
            )
            if self._in_a_row[rank] >= _IN_A_ROW:
                self._in_a_row[rank], self._reported[rank] = 0, is_slow
                host = hosts[min(rank // per_host, len(hosts) - 1)]
                yield Straggler(rank, host, own / median, _part(row, peers), not is_slow)


def _part(row: Sequence[float], peers: Sequence[Sequence[float]]) -> str:
    """Return the part of a step with the largest delay of a rank."""
    behind = [
        row[part] - statistics.median_low(peer[part] for peer in peers)
        for part in range(len(OWN_PARTS))
    ]
    return OWN_PARTS[behind.index(max(behind))]
