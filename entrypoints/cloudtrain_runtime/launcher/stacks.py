"""Where ranks stand: the stacks that Python's faulthandler writes, and which rank is unlike the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract import WORKER_SCRIPT

_THREAD = re.compile(r"(?P<current>Current thread|Thread) 0x(?P<ident>[0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|lib/python\d[^/]*|cloudtrain_runtime)/|^<frozen ")
_WAITING = re.compile(
    r"/torch/(?:distributed|autograd|nn/parallel|cuda)/|/(?:torch/_tensor|cloudtrain_runtime/ranks)\.py$"
)
"""Where a healthy rank waits for another one: in a collective, or in a backward pass or on a device that holds one."""


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def show(self, code: Path) -> str:
        """Return `train.py:17 in forward`: short paths for the job's code and for packages."""
        path = Path(self.file)
        if path.is_relative_to(code):
            short = str(path.relative_to(code))
        else:
            short = re.sub(r"^.*/(?:site-packages|dist-packages|lib/python\d[^/]*)/", "", self.file)
        return f"{short}:{self.line} in {self.function}"


@dataclass(frozen=True)
class RankStack:
    """Where one rank stands.

    Attributes:
        rank: Index among all ranks.
        step: Its last step.
        is_silent: Whether it is one that has had no step for too long.
        frames: The stack of its main thread, the innermost frame first; empty when there is none.
        trouble: What keeps it from answering, such as `is stopped`, or an empty string.
    """

    rank: int
    step: int
    is_silent: bool
    frames: tuple[Frame, ...]
    trouble: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it seems to wait for other ranks."""
        return bool(self.frames) and _WAITING.search(self.frames[0].file) is not None

    def show(self, code: Path) -> str:
        """Return where it stands in words: the innermost frame of the job's own code, and whether that waits."""
        own = user_frame(self.frames)
        if own is None:
            place = "shows no Python frame"
        elif not self.is_waiting:
            place = f"stands in {own.show(code)}"
        elif own is self.frames[0]:  # the job's own code is not on the way there
            place = f"waits in {own.show(code)}"
        else:
            place = f"stands in {own.show(code)} (waits in {self.frames[0].show(code)})"
        return f"{self.trouble}, and {place}" if self.trouble else place


def main_stack(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Return the frames of the main thread in the last dump of a text, the innermost first.

    Args:
        text: What faulthandler has written.
        main_thread: The thread's identifier. Among more than 100 threads it may be missing; then the one that took the
            signal is taken.
    """
    threads: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            frames = threads[int(thread["ident"], 16)] = []
            current = frames if thread["current"] == "Current thread" else current
        elif (frame := _FRAME.match(line)) is not None:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(threads.get(main_thread, current))


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the job's own code, or the innermost of all when there is none of it."""
    own = (f for f in frames if not _LIBRARY.search(f.file) and Path(f.file).name != WORKER_SCRIPT)
    return next(own, frames[0] if frames else None)


def find_outliers(stands: Sequence[RankStack]) -> list[RankStack]:
    """Return the ranks that are unlike the others, or nothing when all are alike.

    A rank that cannot answer, one that alone has no steps, one that is behind, one that does not wait while others do,
    one that stands where most do not: the first of these that tells some ranks from others decides.
    """
    places = Counter(stand.frames[:1] for stand in stands)
    common, count = places.most_common(1)[0] if places else ((), 0)
    last_step = max((stand.step for stand in stands), default=0)
    has_majority = count * 2 > len(stands)
    for told in (
        [stand for stand in stands if stand.trouble],
        [stand for stand in stands if stand.is_silent],
        [stand for stand in stands if stand.step < last_step],
        [stand for stand in stands if not stand.is_waiting],
        [stand for stand in stands if has_majority and stand.frames[:1] != common],
    ):
        if 0 < len(told) < len(stands):
            return told
    return []
