"""Names and values for both kinds of output: one fact per line in a pipe, wrapped below its name on a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from cloudtrain.console import coloured, column_lines
from cloudtrain.console.tables import cell_count, terminal_width
from cloudtrain.support.notebook.summary import Row

_COMMAND = re.compile(r":\s+(?=cloudtrain )")
_LEAST_ROOM = 20
_INDENT = 2
_DIM = "2"


def print_facts(rows: Sequence[Row], *, write: Callable[[str], None] = print) -> None:
    """Print names and values; a row without a name continues the one before it."""
    for line in fact_lines(rows, terminal_width()):
        write(line)


def fact_lines(rows: Sequence[Row], width: int | None) -> list[str]:
    """Return names and values as lines.

    Args:
        rows: The rows.
        width: The cells of a terminal's line; None for a pipe, where a line is never wrapped.
    """
    if width is None:
        return column_lines(rows)
    names = max((cell_count(name) for name, _ in rows), default=0)
    room = max(_LEAST_ROOM, width - names - _INDENT)
    lines = []
    for name, value in rows:
        start = coloured(f"{name:<{names}}", _DIM) + " " * _INDENT
        for part in _parts(value, room):
            lines.append((start + part).rstrip())
            start = " " * (names + _INDENT)
    return lines


def _parts(value: str, room: int) -> Iterator[str]:
    """Yield the lines of a value. A command at its end has a line of its own, so that it can be copied."""
    if cell_count(value) <= room or value.startswith(" "):
        yield value
        return
    match = _COMMAND.search(value)
    if match is None:
        yield from wrapped(value, room)
        return
    yield from wrapped(value[: match.start() + 1], room)
    yield value[match.end() :]


def wrapped(text: str, room: int) -> list[str]:
    """Return a text in lines of at most this many cells; a longer word, such as a path, has a line of its own."""
    # Its import takes 2 ms.
    import textwrap

    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
