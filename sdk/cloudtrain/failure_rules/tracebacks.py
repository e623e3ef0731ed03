"""Parser of Python tracebacks in logs, also of several ranks that print into the same stream."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from cloudtrain.runs.log_lines import RANK_FAILED
from cloudtrain.support.container_paths import CODE_PREFIX

_HEADER = re.compile(r"^(?:Original )?Traceback \(most recent call last\):")
FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_NAME = r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
_EXCEPTION = re.compile(
    rf"^(?P<type>{_NAME}(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Iteration|Invalid|NotFound|Warning|ErrorGroup))"
    r"(?::|$)"
)
_ANY_EXCEPTION = re.compile(rf"^{_NAME}(?:: |$)")
_CARET = re.compile(r"^\s+[~^]+\s*$")
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3[\d.]*/|<frozen |<string>|/cloudtrain_runtime/|cloudtrain_worker\.py"
    r"|/bin/torchrun|multiprocessing/spawn\.py"
    # code of a model that transformers has fetched from the Hub
    r"|/modules/transformers_modules/"
)
_COMMAND = re.compile(r"/bin/[^/.]+$")
"""The script by which pip starts a package's command."""

_IMPORT = re.compile(r"(?:import|from) (?P<package>[A-Za-z_]\w*)")
_FRAMES_KEPT = 60
MOST_FOREIGN_LINES = 40
"""A traceback that has not ended after this many other lines was cut off."""

_TEXT_CHARACTERS = 500
_USER_FRAMES = 3
_LIBRARY_FRAMES = 2


@dataclass(frozen=True)
class Frame:
    """A frame of a traceback; `code` may be empty."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def is_user_code(self) -> bool:
        """Whether it is in the job's code, not in a library, the interpreter or the runtime."""
        is_command = _COMMAND.search(self.file) is not None and self.code.startswith("sys.exit(")
        return LIBRARY.search(self.file) is None and not is_command

    @property
    def place(self) -> str:
        """The file, relative to the code folder, and the line: `train.py:12`."""
        _, _, below = self.file.rpartition(CODE_PREFIX)
        return f"{below}:{self.line}"

    def lines(self) -> tuple[str, ...]:
        """Return the lines that Python prints for it."""
        head = f'  File "{self.place.rpartition(":")[0]}", line {self.line}, in {self.function or "<module>"}'
        if not self.code:
            return (head,)
        return (head, f"    {self.code}")


@dataclass(frozen=True)
class RaisedException:
    """An uncaught exception. `text` is `Type: message`."""

    text: str
    frames: tuple[Frame, ...] = ()

    @property
    def file(self) -> str:
        """The file whose code has raised it; empty if no frame is known."""
        return self.frames[-1].file if self.frames else ""

    @property
    def last_user_frame(self) -> Frame | None:
        """The innermost frame in the job's own code."""
        return next((frame for frame in reversed(self.frames) if frame.is_user_code), None)

    @property
    def imported(self) -> str:
        """The package that the job's code was importing when a library raised it; else empty."""
        frame = self.last_user_frame
        if frame is None or frame is self.frames[-1]:
            return ""
        match = _IMPORT.match(frame.code)
        return "" if match is None else match["package"]

    def format_short(self) -> tuple[str, ...]:
        """Return the frames in the job's code, or else the innermost frames, and the exception."""
        frames = [frame for frame in self.frames if frame.is_user_code][-_USER_FRAMES:]
        frames = frames or list(self.frames[-_LIBRARY_FRAMES:])
        lines = [line for frame in frames for line in frame.lines()]
        return (*lines, *self.text.splitlines())


@dataclass
class OpenTraceback:
    """Tracebacks without their exceptions so far.

    Ranks without a prefix print into one stream. Then several tracebacks are open at once, which usually are the same;
    repeated frames are dropped.

    Attributes:
        rank: Rank in the launcher's head, or None.
        foreign_lines: Lines so far that do not belong to a traceback.
    """

    open_count: int = 1
    rank: int | None = None
    frames: list[Frame] = field(default_factory=list)
    foreign_lines: int = 0
    _is_after_frame: bool = False

    def add_line(self, text: str) -> RaisedException | bool:
        """Read a line; return the exception that ends the traceback, or whether the line belongs to it."""
        if (match := FRAME.match(text)) is not None:
            frame = Frame(match["file"], int(match["line"]), match["function"] or "")
            # The frames of several ranks are the same.
            if self.open_count == 1 or not self._has(frame):
                self.frames.append(frame)
            if len(self.frames) > _FRAMES_KEPT:
                # In a recursion, both ends matter more than the middle.
                del self.frames[1]
            self._is_after_frame = True
            return True
        if text[:1].isspace() or not text:
            if self.frames and text.strip() and not self.frames[-1].code and not _CARET.match(text):
                self.frames[-1] = dataclasses.replace(
                    self.frames[-1], code=text.strip()[:_TEXT_CHARACTERS]
                )
            return True
        if _EXCEPTION.match(text) or (self._is_after_frame and _ANY_EXCEPTION.match(text)):
            return RaisedException(text[:_TEXT_CHARACTERS], tuple(self.frames))
        self.foreign_lines += 1
        self._is_after_frame = False
        return False

    def _has(self, frame: Frame) -> bool:
        return any((each.file, each.line) == (frame.file, frame.line) for each in self.frames)


HEAD_AT_END = "Traceback (most recent call last):"
"""The head of a traceback, which can follow a progress bar or the words of a logger in the same line."""


def open_traceback(text: str) -> OpenTraceback | None:
    """Return a new traceback if this line is the head of one."""
    if text.startswith(("Traceback (", "Original Traceback (")) and _HEADER.match(text):
        return OpenTraceback()
    # After a progress bar, or after the words of a logger.
    if text.endswith(HEAD_AT_END):
        return OpenTraceback()
    if text.startswith("rank ") and (match := RANK_FAILED.match(text)):
        return OpenTraceback(rank=int(match["rank"]))
    return None


def parse_exception(text: str) -> RaisedException | None:
    """Parse `Type: message`; return None if it is no exception."""
    if not _EXCEPTION.match(text):
        return None
    return RaisedException(text[:_TEXT_CHARACTERS])
