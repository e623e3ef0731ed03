"""Ranks that are slower than the others, which all wait for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cloudtrain_runtime.metrics.step_timer import StepTimes
from cloudtrain_runtime.process.run_context import Context

OWN_PARTS: Final = ("data", "forward", "optimizer")
"""Parts of a step in which a rank waits for nobody. The backward pass ends when the slowest rank's does."""

_SLOW = 1.2
_LEAST_SECONDS = 1e-3
"""A rank that is later by less than this is not told: on a busy machine small steps differ by that much."""

_IN_A_ROW = 3
_APART_SECONDS = 0.1
"""Least time between two readings that are compared: three in a row are to be more than a moment of a busy machine."""

NUMBERS_PER_RANK: Final = len(OWN_PARTS) + 2
"""How many numbers a rank tells."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow, or is no longer.

    Attributes:
        ratio: Its own time per step, as a multiple of the median.
        part: The part of a step that makes most of the difference.
        is_over: Whether it keeps up again.
    """

    rank: int
    host: str
    ratio: float
    part: str
    is_over: bool = False


class StragglerMonitor:
    """Compares the ranks' own times per step.

    Attributes:
        compared: How many readings were compared so far; those that follow each other very fast are passed over.

    Args:
        place: This rank's place.
        stage: Ranks are compared with those of the same stage: others have other layers.
    """

    def __init__(self, place: Context, stage: int = 0) -> None:
        self._place = place
        self._stage = stage
        self._judge = StragglerDetector(place.world_size)
        self._seconds = 0.0  # since the last readings that were compared
        self.compared = 0

    def numbers(self, reading: StepTimes) -> tuple[float, ...]:
        """Return what the other ranks must know of a reading."""
        own = (reading.split.get(part, 0.0) for part in OWN_PARTS)
        return (*own, reading.seconds, float(self._stage))

    def compare(self, rows: Sequence[Sequence[float]]) -> list[Straggler]:
        """Return what has changed by a reading. All ranks come to the same.

        Args:
            rows: What `numbers` has returned on each rank, in rank order.
        """
        self._seconds += max(row[len(OWN_PARTS)] for row in rows)
        if self._seconds < _APART_SECONDS or len(rows) == 1:
            return []
        self._seconds = 0.0
        self.compared += 1
        per_host, hosts = self._place.local_world_size, self._place.hosts
        return [
            Straggler(rank, hosts[min(rank // per_host, len(hosts) - 1)], ratio, part, is_over)
            for rank, ratio, part, is_over in self._judge.changes(rows)
        ]


class StragglerDetector:
    """Tells who is slow for several readings in a row, and tells it once.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._in_a_row = [0] * world_size
        self._told = [False] * world_size

    def changes(self, rows: Sequence[Sequence[float]]) -> Iterator[tuple[int, float, str, bool]]:
        """Yield rank, ratio, part and whether it is over, for each rank that has become slow or is no longer.

        Args:
            rows: By rank, the seconds of each of `OWN`, and last the stage.
        """
        if any(sum(row[: len(OWN_PARTS)]) <= 0 for row in rows):
            return  # not every rank has a reading yet
        for rank, row in enumerate(rows):
            peers = [other[: len(OWN_PARTS)] for other in rows if other[-1] == row[-1]]
            # The lower one of the two in the middle, so that of two ranks one can be slower than the other.
            median = statistics.median_low(sum(peer) for peer in peers)
            own = sum(row[: len(OWN_PARTS)])
            is_slow = own >= _SLOW * median and own - median >= _LEAST_SECONDS
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow != self._told[rank] else 0
            if self._in_a_row[rank] >= _IN_A_ROW:
                self._in_a_row[rank], self._told[rank] = 0, is_slow
                yield rank, own / median, _part(row, peers), not is_slow


def _part(row: Sequence[float], peers: Sequence[Sequence[float]]) -> str:
    """Return the part of a step in which a rank is furthest behind."""
    behind = [row[part] - statistics.median_low(peer[part] for peer in peers) for part in range(len(OWN_PARTS))]
    return OWN_PARTS[behind.index(max(behind))]
