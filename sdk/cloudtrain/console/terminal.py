"""Filter for terminal output: only text, tabs, newlines and colours pass, and hidden marks become visible.

Logs, reasons, names and errors contain text of third parties. Escape sequences in it could set the window's title or
the clipboard, move the cursor, or send input as if the user had typed it. `filtered_streams` puts one filter in front
of standard output and standard error.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_SEQUENCE = lazy_pattern(
    # OSC: titles, links, the clipboard.
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    # DCS, SOS, PM, APC.
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]*(?:\x1b\\|\x9c)"
    # CSI: the cursor, the screen, colours.
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    # Other escapes, and unterminated ones.
    r"|\x1b[ -/]*[0-~]?"
    # Control characters except tab and newline.
    r"|[\x00-\x08\x0b-\x1f\x80-\x9f]"
)
_HIDDEN = lazy_pattern(
    # Marks that change the order of what follows.
    "[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    # Invisible ones.
    "|[\u00ad\u200b\u2060-\u2064\ufeff]"
)
_COLOUR = lazy_pattern(r"\x1b\[[0-9;:]*m")
_RESETS = frozenset({"\x1b[m", "\x1b[0m"})
_COLUMNS = 80


def is_terminal(stream: IO[str] | None = None) -> bool:
    """Return whether a stream, by default standard output, is a terminal: no pipe, notebook, CI log or `TERM=dumb`."""
    if os.environ.get("CI") or os.environ.get("JPY_PARENT_PID"):
        return False
    return os.environ.get("TERM") != "dumb" and is_tty(sys.stdout if stream is None else stream)


def terminal_width(stream: IO[str] | None = None) -> int | None:
    """Return the cells of a line of a stream, by default standard output; None where it is no terminal."""
    chosen = sys.stdout if stream is None else stream
    return columns_of(chosen) if is_terminal(chosen) else None


def columns_of(stream: IO[str]) -> int:
    """Return the cells of a terminal's line: those that the variable COLUMNS or the terminal says, else 80."""
    wanted = os.environ.get("COLUMNS", "")
    # Unlike isdigit(), isdecimal() is false for what int() refuses.
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    try:
        # 0 for a terminal that does not know its size.
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except (OSError, ValueError):
        return _COLUMNS


def can_show(text: str, stream: TextIO) -> bool:
    """Return whether the encoding of a stream has the characters of a text."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def strip_escapes(text: str) -> str:
    """Return a text without control characters and escape sequences, also without colours. Tabs and newlines stay."""
    return show_hidden(_SEQUENCE.sub("", text))


def show_hidden(text: str) -> str:
    """Return a text with invisible marks, such as right-to-left ones, as backslash escapes.

    A name such as `gnp.exe` can look like `exe.png` with them.
    """
    if text.isprintable():
        return text
    return _HIDDEN.sub(lambda mark: f"\\u{ord(mark[0]):04x}", text)


def strip_unsafe_escapes(text: str) -> str:
    """Return a text without control characters and escape sequences except colours, which are reset at a line's end."""
    text = show_hidden(text)
    if text.isprintable() or _SEQUENCE.search(text) is None:
        return text
    return "\n".join(_safe_line(line) for line in text.split("\n"))


def _safe_line(line: str) -> str:
    last = ""

    def keep(match: re.Match[str]) -> str:
        nonlocal last
        if _COLOUR.fullmatch(match[0]) is None:
            return ""
        last = match[0]
        return last

    kept = _SEQUENCE.sub(keep, line)
    return kept if not last or last in _RESETS else f"{kept}\x1b[0m"


def visible_part(text: str) -> str:
    """Return the part of a line that stays visible after carriage returns, such as a progress bar's last state."""
    return text.rstrip("\r").rpartition("\r")[2]


def is_tty(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal; a closed one is none."""
    try:
        return stream.isatty()
    except ValueError:
        return False


class ChangingLine:
    """The last line of the terminal while something is waited for. It is erased before other output.

    There is one per process, because a process has one terminal.

    Attributes:
        last_output: When other output was written last, on the monotonic clock.
        has_output: Whether the command has written anything, or draws on the terminal itself.
    """

    def __init__(self) -> None:
        self.last_output = time.monotonic()
        self.has_output = False
        self._lock = threading.RLock()
        self._stream: TextIO | None = None
        self._is_below_a_line = True

    def draw(self, stream: TextIO, text: str) -> None:
        """Write the line anew, unless other output has begun a line and not ended it, such as a question."""
        with self._lock:
            if not self._is_below_a_line:
                return
            stream.write(f"\r{text}\x1b[K")
            stream.flush()
            self._stream = stream

    def erase(self) -> None:
        """Remove the line."""
        with self._lock:
            if self._stream is None:
                return
            stream = self._stream
            self._stream = None
            stream.write("\r\x1b[K")
            stream.flush()

    @contextmanager
    def undrawn(self) -> Iterator[None]:
        """Remove the line, and draw it after the block at the earliest."""
        with self._lock:
            self.erase()
            yield

    @contextmanager
    def erased(self, text: str) -> Iterator[None]:
        """Remove the line before other output is written to the terminal.

        Args:
            text: The other output.
        """
        with self.undrawn():
            yield
            self.last_output = time.monotonic()
            if text:
                self._is_below_a_line = text.endswith("\n")


CHANGING_LINE = ChangingLine()


class FilteredStream:
    """A text stream that filters what may not reach a terminal. Other attributes are those of the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        """Write a text. Characters that the stream's encoding lacks become backslash escapes."""
        kept = strip_unsafe_escapes(text)
        CHANGING_LINE.has_output = True
        # Also in a pipe: `cloudtrain logs | cat` writes to the terminal of the line.
        with CHANGING_LINE.erased(kept):
            self._write(kept)
        return len(text)

    def flush(self) -> None:
        """Write what the wrapped stream has kept back."""
        with CHANGING_LINE.undrawn():
            self.unfiltered.flush()

    def _write(self, kept: str) -> None:
        try:
            self.unfiltered.write(kept)
        except UnicodeEncodeError:
            encoding = self.unfiltered.encoding or "ascii"
            self.unfiltered.write(kept.encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered(stream: TextIO) -> TextIO:
    """Return the stream behind the filter, for code that draws on the terminal and for `--raw`."""
    with CHANGING_LINE.erased(""):
        CHANGING_LINE.has_output = True
    return behind_filter(stream)


def behind_filter(stream: TextIO) -> TextIO:
    """Return the stream behind the filter, for the line that changes."""
    return stream.unfiltered if isinstance(stream, FilteredStream) else stream


@contextmanager
def filtered_streams() -> Iterator[None]:
    """Filter what is written to standard output and standard error."""
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        if stream is not None and not isinstance(stream, FilteredStream):
            setattr(sys, name, cast("TextIO", FilteredStream(stream)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
