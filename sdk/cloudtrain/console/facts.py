"""Names and values for both kinds of output: one fact per line in a pipe, wrapped below its name on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cloudtrain.console import DIM, coloured, column_lines, command_name
from cloudtrain.console.cells import cell_count, pad, wrapped
from cloudtrain.console.tables import GAP
from cloudtrain.console.terminal import terminal_width
from cloudtrain.support.notebook.summary import Row
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_COMMAND = lazy_pattern(r":\s+(?=cloudtrain )")
_LEAST_ROOM = 10


def print_facts(rows: Sequence[Row], *, write: Callable[[str], None] = print) -> None:
    """Print names and values; a row without a name continues the text of the one before it."""
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
    room = max(_LEAST_ROOM, width - names - GAP)
    lines = []
    before = ""
    for name, value in rows:
        # Equal names of consecutive rows are shown once; a pipe gets each.
        shown = "" if name == before else name
        before = name
        start = coloured(pad(shown, names), DIM) + " " * GAP
        for part in _parts(value, room):
            lines.append((start + part).rstrip())
            start = " " * (names + GAP)
    return lines


def _parts(value: str, room: int) -> Iterator[str]:
    """Yield the lines of a value. A command at its end has a line of its own, so that it can be copied."""
    if cell_count(value) <= room or value.startswith((" ", f"{command_name()} ")):
        yield value
        return
    match = _COMMAND.search(value)
    if match is None:
        yield from wrapped(value, room)
        return
    yield from wrapped(value[: match.start() + 1], room)
    yield value[match.end() :]


def print_sentence(text: str, write: Callable[[str], None] = print) -> None:
    """Print a sentence; on a terminal in lines that fit, those after the first one indented further."""
    width = terminal_width()
    for line in [text] if width is None else fitting_lines(text, width):
        write(line)


def fitting_lines(text: str, width: int) -> list[str]:
    """Return a line of text as lines of a width; those after the first one are indented further.

    Words are not broken, and a command at the end has a line of its own, so that paths and commands can be copied.
    """
    # Text with colours has been drawn for this width already.
    if "\x1b" in text or cell_count(text) <= width:
        return [text]
    content = text.lstrip(" ")
    indent = " " * (len(text) - len(content))
    first, *others = _parts(content, max(_LEAST_ROOM, width - len(indent) - GAP))
    return [indent + first, *(f"{indent}{' ' * GAP}{line}" for line in others)]
