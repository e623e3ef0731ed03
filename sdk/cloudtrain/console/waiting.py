"""What a command shows while it waits: on a terminal one line that changes, elsewhere one line a minute.

The line says what is waited for, how far it is, and for how long. It appears after a second without output and is
erased before other output and at the end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from cloudtrain.console import CYAN, DIM, coloured, print_message
from cloudtrain.console.cells import CUT
from cloudtrain.console.terminal import (
    CHANGING_LINE,
    behind_filter,
    can_show,
    columns_of,
    filtered_streams,
    is_terminal,
    strip_escapes,
)
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.redaction import redact

if TYPE_CHECKING:
    from types import TracebackType

DELAY_SECONDS = 1.0
"""Time without output after which the line appears."""
LEAST_SECONDS = 0.3
"""A wait that ends sooner shows no line, however long the time without output."""
LONG_SECONDS = 5.0
"""Time after which a step that has ended leaves a line."""
LINE_SECONDS = 60.0
"""Time between the lines where no line can change."""
_TICK_SECONDS = 0.1
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"

_waits: list[Waiting] = []
"""The waits of this process. The last one is shown."""
_showing = threading.RLock()
"""Held while a line is shown, so that a wait that is hidden has stopped to draw."""


class Waiting:
    """Something that is waited for, as a context manager. Its methods may be called from any thread.

    Args:
        text: What is done, such as `checking the account`.
        is_long: Whether it takes long, so that it is announced where no line can change.
        ends_at_output: Whether the first output of the command ends it.
    """

    def __init__(self, text: str, *, is_long: bool = False, ends_at_output: bool = False) -> None:
        self._text = text
        self._detail = ""
        self._ending = ""
        self._is_long = is_long
        self._ends_at_output = ends_at_output
        self._began = time.monotonic()
        self._last_line = self._began
        self._is_hidden = False
        self._ended = threading.Event()
        self._frame = 0

    def __enter__(self) -> Self:
        self._stream = behind_filter(sys.stderr)
        self._is_live = is_terminal(self._stream)
        self._announce()
        _waits.append(self)
        self._thread = threading.Thread(target=self._tick_until_end, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        try:
            self._thread.join()
        finally:
            _waits.remove(self)
            CHANGING_LINE.erase()
        if kind is None:
            self._leave_line()

    @property
    def seconds(self) -> float:
        """Seconds since the present step has begun."""
        return time.monotonic() - self._began

    def begin(self, text: str, *, is_long: bool = False) -> None:
        """Begin another step, with its own time. The line of the last one is left if it has an ending."""
        self._leave_line()
        self._text = text
        self._detail = ""
        self._ending = ""
        self._is_long = is_long
        self._began = time.monotonic()
        self._announce()

    def show(self, detail: str) -> None:
        """Show how far the present step is."""
        self._detail = detail

    def end(self, text: str) -> None:
        """Set the line that is left when the step took long, such as `Installed 14 packages`; its time is added."""
        self._ending = text

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Show no line during the block, which draws on the terminal itself."""
        with _showing:
            self._is_hidden = True
            CHANGING_LINE.erase()
        try:
            yield
        finally:
            self._is_hidden = False

    def _announce(self) -> None:
        if self._is_long and not self._is_live:
            print_message(self._text)

    def _leave_line(self) -> None:
        if self._ending and self.seconds >= LONG_SECONDS:
            print_message(f"{self._ending} in {format_duration(round(self.seconds))}")

    def _tick_until_end(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            if self._ends_at_output and CHANGING_LINE.has_output:
                return
            try:
                with _showing:
                    self._tick()
            except (OSError, ValueError):
                # The terminal was closed.
                return

    def _tick(self) -> None:
        if self._is_hidden or _waits[-1:] != [self]:
            return
        now = time.monotonic()
        if not self._is_live:
            if now - max(self._last_line, self._began) >= LINE_SECONDS:
                self._last_line = now
                print_message(
                    f"{_joined(self._text, self._detail)}: {format_duration(round(self.seconds))}"
                )
            return
        is_silent = now - CHANGING_LINE.last_output >= DELAY_SECONDS
        if is_silent and self.seconds >= LEAST_SECONDS:
            CHANGING_LINE.draw(self._stream, self._line())

    def _line(self) -> str:
        """Return the line, cut to the width of the terminal: the details first, never the time."""
        # The first import of rich takes a tenth of a second, which a short command does not have.
        from rich.cells import cell_len, set_cell_size

        frames = _FRAMES
        mark = CUT
        if not can_show(frames, self._stream):
            frames = _ASCII_FRAMES
            mark = "..."
        self._frame = (self._frame + 1) % len(frames)
        frame = frames[self._frame]
        elapsed = format_duration(int(self.seconds))
        text = strip_escapes(redact(_joined(self._text, self._detail))).replace("\n", " ")
        # The last column stays empty: a terminal may begin a new line after it.
        room = max(0, columns_of(self._stream) - 1 - len(f"{frame}   {elapsed}"))
        if cell_len(text) > room:
            text = set_cell_size(text, max(0, room - len(mark))) + mark
        shown = coloured(frame, CYAN, self._stream)
        return f"{shown} {text}  {coloured(elapsed, DIM, self._stream)}"


@contextmanager
def waiting(text: str, *, is_long: bool = False) -> Iterator[Waiting]:
    """Show what a block waits for; see `Waiting`. Output of the block does not mix with the line.

    Args:
        text: What is done, such as `checking the account`.
        is_long: Whether it takes long, so that it is announced where no line can change.
    """
    with filtered_streams(), Waiting(text, is_long=is_long) as wait:
        yield wait


@contextmanager
def waiting_for_output(command: str) -> Iterator[None]:
    """Show on a terminal that a command works, until its first output or what it shows itself.

    Args:
        command: The name of the command; no line is shown without one.
    """
    # A completion is on the line that the user writes.
    is_completion = "_CLOUDTRAIN_COMPLETE" in os.environ
    if is_completion or not command or not is_terminal(sys.stderr):
        yield
        return
    with Waiting(f"cloudtrain {command}", ends_at_output=True):
        yield


@contextmanager
def all_hidden() -> Iterator[None]:
    """Show no line of a wait during the block, which draws on the terminal itself."""
    if not _waits:
        yield
        return
    with _waits[-1].hidden():
        yield


def _joined(text: str, detail: str) -> str:
    return f"{text}  {detail}" if detail else text
