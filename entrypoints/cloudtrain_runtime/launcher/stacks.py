"""Stacks of hung ranks: parse faulthandler's output, and find the ranks that differ from the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract import WORKER_SCRIPT

_THREAD = re.compile(
    r"(?P<current>Current thread|Thread) 0x(?P<ident>[0-9a-f]+).*\(most recent call first\):"
)
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages|lib/python\d[^/]*|cloudtrain_runtime)/|^<(?:frozen |string>)"
)
_WAITING = re.compile(
    r"/torch/(?:distributed|autograd|nn/parallel|cuda)/|/(?:torch/_tensor|cloudtrain_runtime/process/process_group)\.py$"
)
"""Files in which a healthy rank waits for another one: in a collective, or in a backward pass or a device
synchronization that contains one."""


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
    """The stack of one rank and what it shows."""

    # index among all ranks
    rank: int
    # its last step
    step: int
    # whether the rank has had no step for too long
    is_stalled: bool
    # the stack of its main thread, innermost frame first; empty if unknown
    frames: tuple[Frame, ...]
    # why the process cannot respond, such as `is stopped by a debugger`, or an empty string
    condition: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the rank appears to wait for other ranks."""
        return bool(self.frames) and _WAITING.search(self.frames[0].file) is not None

    def show(self, code: Path) -> str:
        """Return a description: the innermost frame of the job's own code, and whether the rank waits."""
        own = user_frame(self.frames)
        if own is None:
            position = "shows no Python frame"
        elif not self.is_waiting:
            position = f"is at {own.show(code)}"
        elif own is self.frames[0]:
            # The stack has no frame of the job's own code.
            position = f"waits in {own.show(code)}"
        else:
            position = f"is at {own.show(code)} (waits in {self.frames[0].show(code)})"
        if self.condition:
            return f"{self.condition}, and {position}"
        return position


def main_stack(text: str, main_thread: int) -> tuple[Frame, ...]:
    """Return the frames of the main thread in the last dump of faulthandler in a text, innermost first.

    faulthandler prints at most 100 threads; if the main thread is missing, the thread that received the signal is used.
    """
    threads: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            frames = threads[int(thread["ident"], 16)] = []
            if thread["current"] == "Current thread":
                current = frames
        elif (frame := _FRAME.match(line)) is not None:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return tuple(threads.get(main_thread, current))


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the job's own code, or the innermost frame if there is none."""
    for frame in frames:
        if not _LIBRARY.search(frame.file) and Path(frame.file).name != WORKER_SCRIPT:
            return frame
    return frames[0] if frames else None


def find_outliers(stacks: Sequence[RankStack]) -> list[RankStack]:
    """Return the ranks that differ from the others; an empty list if none does.

    The first criterion that holds for some ranks and not for all of them decides: the process cannot respond; the rank
    has no steps; it is behind; it does not wait while others do; its innermost frame is not that of the majority.
    """
    innermost = Counter(stack.frames[:1] for stack in stacks)
    common, count = innermost.most_common(1)[0] if innermost else ((), 0)
    last_step = max((stack.step for stack in stacks), default=0)
    has_majority = count * 2 > len(stacks)
    for outliers in (
        [stack for stack in stacks if stack.condition],
        [stack for stack in stacks if stack.is_stalled],
        [stack for stack in stacks if stack.step < last_step],
        [stack for stack in stacks if not stack.is_waiting],
        [stack for stack in stacks if has_majority and stack.frames[:1] != common],
    ):
        if 0 < len(outliers) < len(stacks):
            return outliers
    return []
