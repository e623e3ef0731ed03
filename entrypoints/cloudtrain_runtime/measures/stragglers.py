"""Ranks that are slower than the others, which all wait for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from cloudtrain_runtime.context import Context
from cloudtrain_runtime.measures.clock import Reading

OWN: Final = ("data", "forward", "optimizer")
"""Parts of a step in which a rank waits for nobody. The backward pass ends when the slowest rank's does."""

_SLOW = 1.2
_LEAST_SECONDS = 1e-3
"""A rank that is later by less than this is not told: on a busy machine small steps differ by that much."""

_IN_A_ROW = 3
_APART_SECONDS = 0.1
"""Least time between two exchanges: one takes half a millisecond from the steps where cores are full."""

_MOST_SKIPPED = 50


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


class Stragglers:
    """Compares the ranks' own times per step: what is sent at one reading is judged at a later one, so nobody waits.

    Attributes:
        exchanges: How many readings were compared so far; those that follow each other very fast are passed over.

    Args:
        place: This rank's place.
        group: Group of all ranks for CPU tensors; None for one rank.
        stage: Ranks are compared with those of the same stage: others have other layers.
    """

    def __init__(self, place: Context, group: dist.ProcessGroup | None, stage: int = 0) -> None:
        self._place = place
        self._group = group
        self._stage = stage
        self._judge = Judge(place.world_size)
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._skip = 0
        self.exchanges = 0

    def note(self, reading: Reading) -> list[Straggler]:
        """Send this rank's reading, and return what has changed by the last one. All ranks call it."""
        if self._group is None:
            return []
        if self._skip:
            self._skip -= 1
            return []
        self.exchanges += 1
        changes = self._finish()
        own = [reading.split.get(part, 0.0) for part in OWN]
        rows = torch.zeros(self._place.world_size, len(OWN) + 2, dtype=torch.float64)
        rows[self._place.rank] = torch.tensor([*own, reading.seconds, float(self._stage)], dtype=torch.float64)
        work = dist.all_reduce(rows, group=self._group, async_op=True)
        if work is not None:
            self._pending = (rows, work)
        return changes

    def _finish(self) -> list[Straggler]:
        if self._pending is None:
            return []
        rows, work = self._pending
        work.wait()
        self._pending = None
        # All ranks know the same rows, so all skip the same readings.
        apart = max(float(rows[:, len(OWN)].max()), 1e-6)
        self._skip = min(int(_APART_SECONDS / apart), _MOST_SKIPPED)
        per_host = self._place.local_world_size
        hosts = self._place.hosts
        return [
            Straggler(rank, hosts[min(rank // per_host, len(hosts) - 1)], ratio, part, is_over)
            for rank, ratio, part, is_over in self._judge.changes(rows.tolist())
        ]


class Judge:
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
        if any(sum(row[: len(OWN)]) <= 0 for row in rows):
            return  # not every rank has a reading yet
        for rank, row in enumerate(rows):
            peers = [other[: len(OWN)] for other in rows if other[-1] == row[-1]]
            # The lower one of the two in the middle, so that of two ranks one can be slower than the other.
            median = statistics.median_low(sum(peer) for peer in peers)
            own = sum(row[: len(OWN)])
            is_slow = own >= _SLOW * median and own - median >= _LEAST_SECONDS
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow != self._told[rank] else 0
            if self._in_a_row[rank] >= _IN_A_ROW:
                self._in_a_row[rank], self._told[rank] = 0, is_slow
                yield rank, own / median, _part(row, peers), not is_slow


def _part(row: Sequence[float], peers: Sequence[Sequence[float]]) -> str:
    """Return the part of a step in which a rank is furthest behind."""
    behind = [row[part] - statistics.median_low(peer[part] for peer in peers) for part in range(len(OWN))]
    return OWN[behind.index(max(behind))]
