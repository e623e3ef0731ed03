"""Tracebacks, read line by line as they were printed, by one rank or by several into the same stream."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

_HEADER = re.compile(r"^(?:Original )?Traceback \(most recent call last\):")
_LAUNCHER_HEADER = re.compile(r"^rank (?P<rank>\d+) on \S+ \(local rank \d+\) failed: ")
"""What cloudtrain_runtime.launcher.agent says last: message, then the end of the rank's traceback."""

_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_NAME = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
_EXCEPTION = re.compile(
    rf"^(?P<type>{_NAME}(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Iteration|Invalid|NotFound|Warning|Group))"
    r"(?::|$)"
)
_ANY_EXCEPTION = re.compile(rf"^{_NAME}(?:: |$)")
_CARET = re.compile(r"^\s+[~^]+\s*$")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3[\d.]*/|<frozen |<string>|/cloudtrain_runtime/|cloudtrain_worker\.py"
    r"|/bin/torchrun|multiprocessing/spawn\.py"
)
_FRAMES_KEPT = 60
_FOREIGN_LINES = 40
"""A traceback whose end has not come after so many lines of others was cut short."""

_TEXT_CHARACTERS = 500
_USER_FRAMES = 3
_LIBRARY_FRAMES = 2


@dataclass(frozen=True)
class Frame:
    """One place of a traceback; `code` may be empty."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def is_users(self) -> bool:
        """Whether it lies in the job's code, not in a library, the interpreter or the runtime."""
        return _LIBRARY.search(self.file) is None

    @property
    def place(self) -> str:
        """`train.py:12`, below the code folder."""
        _, _, below = self.file.rpartition("/opt/ml/code/")
        return f"{below}:{self.line}"

    def lines(self) -> tuple[str, ...]:
        """Return what Python prints of it."""
        head = f'  File "{self.place.rpartition(":")[0]}", line {self.line}, in {self.function or "<module>"}'
        return (head, f"    {self.code}") if self.code else (head,)


@dataclass(frozen=True)
class Raised:
    """An exception that ended somewhere at the top. `text` is `Type: message`."""

    text: str
    frames: tuple[Frame, ...] = ()

    @property
    def last_user_frame(self) -> Frame | None:
        """The innermost frame in the job's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_users), None)

    def shortest(self) -> tuple[str, ...]:
        """Return the part that its reader needs: the user's frames, else the innermost ones, and the exception."""
        frames = [frame for frame in self.frames if frame.is_users][-_USER_FRAMES:]
        frames = frames or list(self.frames[-_LIBRARY_FRAMES:])
        return (*(line for frame in frames for line in frame.lines()), *self.text.splitlines())


@dataclass
class OpenTraceback:
    """A traceback whose exception has not come yet.

    Ranks without a prefix print into one stream: then several are open at once, mostly the same, and a frame that was
    seen already is not taken again.
    """

    opened: int = 1
    rank: int | None = None
    frames: list[Frame] = field(default_factory=list)
    foreign: int = 0
    _expects: bool = False

    def open_another(self) -> None:
        """Take note of one more header before the first has ended."""
        self.opened += 1

    @property
    def is_lost(self) -> bool:
        """Whether its end will not come any more."""
        return self.foreign > _FOREIGN_LINES

    def take(self, text: str) -> Raised | bool:
        """Take a line; return the exception that it ends with, or whether it belongs here."""
        if (match := _FRAME.match(text)) is not None:
            self._add(Frame(match["file"], int(match["line"]), match["function"] or ""))
            self._expects = True
            return True
        if text[:1].isspace() or not text:
            self._take_code(text)
            return True
        if _EXCEPTION.match(text) or (self._expects and _ANY_EXCEPTION.match(text)):
            return Raised(text[:_TEXT_CHARACTERS], tuple(self.frames))
        self.foreign += 1
        self._expects = False
        return False

    def _add(self, frame: Frame) -> None:
        if self.opened > 1 and any((f.file, f.line) == (frame.file, frame.line) for f in self.frames):
            return
        self.frames.append(frame)
        if len(self.frames) > _FRAMES_KEPT:
            del self.frames[1]  # of a recursion the ends tell more than the middle

    def _take_code(self, text: str) -> None:
        if self.frames and text.strip() and not self.frames[-1].code and not _CARET.match(text):
            self.frames[-1] = dataclasses.replace(self.frames[-1], code=text.strip()[:_TEXT_CHARACTERS])


def opens(text: str) -> OpenTraceback | None:
    """Return a new traceback when this line is the head of one."""
    if text.startswith(("Traceback (", "Original Traceback (")) and _HEADER.match(text):
        return OpenTraceback()
    if text.startswith("rank ") and (match := _LAUNCHER_HEADER.match(text)):
        return OpenTraceback(rank=int(match["rank"]))
    return None


def as_exception(text: str) -> Raised | None:
    """Return the exception that `Type: message` is, or None."""
    return Raised(text[:_TEXT_CHARACTERS]) if _EXCEPTION.match(text) else None
