"""Missing ranks of a collective, found in the messages of the waiting ranks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_TIMED_OUT = re.compile(
    r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<operation>\w+).*?ran for (?P<milliseconds>\d+) milliseconds"
)
_ENQUEUED = re.compile(r"Rank (?P<rank>\d+)\].*last enqueued (?:NCCL )?work: (?P<number>-?\d+)")
"""Source: ProcessGroupNCCL.cpp, torch 2.5 (with `NCCL`) to 2.9 (without)."""

_DESYNC = re.compile(
    r"\[(?P<ranks>\d[\d, ]*)\] finished collective #\d+, but didn't join collective #(?P<number>\d+)"
)
"""Source: TraceUtils.h, with TORCH_NCCL_DESYNC_DEBUG=1."""

_BARRIER = re.compile(r"Ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier")


@dataclass
class CollectiveTimeouts:
    """State of each rank when a collective timed out.

    Attributes:
        timed_out: By rank, number and kind of the collective that it waited for.
        enqueued: By rank, number of the last collective that it enqueued.
        reported: Ranks that torch itself reports as missing.
        seconds: Longest time that a rank waited.
    """

    timed_out: dict[int, tuple[int, str]] = field(default_factory=dict)
    enqueued: dict[int, int] = field(default_factory=dict)
    reported: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def read(self, text: str) -> None:
        """Read a log line."""
        if not ("collective" in text or "monitoredBarrier" in text or "enqueued" in text):
            return
        if (match := _TIMED_OUT.search(text)) is not None:
            rank = int(match["rank"])
            work = (int(match["number"]), match["operation"])
            self.timed_out[rank] = min(self.timed_out.get(rank, work), work)
            self.seconds = max(self.seconds, int(match["milliseconds"]) / 1000)
        elif (match := _ENQUEUED.search(text)) is not None:
            self.enqueued[int(match["rank"])] = int(match["number"])
        elif (match := _DESYNC.search(text) or _BARRIER.search(text)) is not None:
            self.reported |= {int(rank) for rank in re.findall(r"\d+", match["ranks"])}

    @property
    def waited_for(self) -> tuple[int, str] | None:
        """Number and kind of the collective that most ranks waited for."""
        counted = Counter(self.timed_out.values())
        if not counted:
            return None
        # Of equally many the earliest: the later ones wait for it.
        return max(counted, key=lambda work: (counted[work], -work[0]))

    def missing_ranks(self, world_size: int | None) -> tuple[int, ...]:
        """Return the ranks that did not join, or nothing if the log does not show them.

        Args:
            world_size: Number of ranks, or None; without it, ranks that printed nothing cannot be found.
        """
        if self.reported:
            return tuple(sorted(self.reported))
        work = self.waited_for
        if work is None:
            return ()
        elsewhere = {rank for rank, own in self.timed_out.items() if own != work}
        behind = {rank for rank, number in self.enqueued.items() if number < work[0]}
        silent = set(range(world_size or 0)) - self.timed_out.keys()
        for guess in (behind, elsewhere, silent):
            # If more than half seem to be missing, the log is incomplete.
            if guess and len(guess) * 2 <= max(world_size or 0, len(self.timed_out)):
                return tuple(sorted(guess))
        return ()
