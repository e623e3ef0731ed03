"""Tables for both kinds of output: all of it in a pipe, what fits the lines on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cloudtrain.console import BOLD, DIM, coloured, column_lines
from cloudtrain.console.cells import cell_count, cut_text
from cloudtrain.console.terminal import strip_escapes, terminal_width
from cloudtrain.support.run_id import short_id

GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: The header in a pipe. A column without a header has an empty one.
        title: The header on a terminal; by default the name in capital letters.
        drop: Where a line is too short, the columns with a number are left out, 1 first. 0 is never left out.
        least: The column is text, which is cut at its end down to this many cells, its header as well; 0 is never cut.
            Columns are left out before a text gets shorter than that.
        is_number: Aligned to the right on a terminal.
        is_dim: Dim on a terminal.
        only: The kind of output that has the column; by default both.
        keep: The kinds of output that have the column also where all its cells are empty.
    """

    name: str
    title: str | None = None
    drop: int = 0
    least: int = 0
    is_number: bool = False
    is_dim: bool = False
    only: Literal["terminal", "pipe"] | None = None
    keep: Literal["both", "pipe"] | None = None


@dataclass(frozen=True)
class Cell:
    """A cell whose text is not the same in both kinds of output, or that has a colour of its own.

    Attributes:
        text: The text in a pipe.
        shown: The text on a terminal, if it is another one.
        colour: Its colour (an ANSI code) on a terminal.
    """

    text: str
    shown: str | None = None
    colour: str = ""


Row = Sequence[str | Cell]


def run_cell(reference: str) -> Cell:
    """Return a cell of a run: its reference or id in a pipe, and on a terminal its last six characters."""
    return Cell(reference, shown=short_id(reference))


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    colours: Mapping[str, str] | None = None,
    has_header: bool = True,
    write: Callable[[str], None] = print,
) -> list[str]:
    """Print a table to standard output; return the names of the columns that a terminal has no room for.

    See `table_lines` for the arguments.
    """
    width = terminal_width()
    for line in table_lines(columns, rows, width, colours=colours, has_header=has_header):
        write(line)
    if width is None:
        return []
    fitting = [column.name for column, _ in _fit(columns, rows, width, has_header=has_header)]
    found = [column.name for column, _ in _filled(columns, rows, "terminal")]
    return [name for name in found if name not in fitting]


def table_lines(
    columns: Sequence[Column],
    rows: Sequence[Row],
    width: int | None,
    *,
    colours: Mapping[str, str] | None = None,
    has_header: bool = True,
) -> list[str]:
    """Return a table as lines. Columns that are empty below the header are left out, unless they are to be kept.

    Args:
        columns: The columns.
        rows: Cells of each row, one for each column.
        width: The cells of a terminal's line; None for a pipe, which gets every column and all of its text.
        colours: Colours (ANSI codes) by the text of a cell, such as those of states.
        has_header: Whether the first line has the names of the columns.
    """
    if width is None:
        return _pipe_lines(columns, rows, has_header=has_header)
    blocks = []
    for column, cells in _fit(columns, rows, width, has_header=has_header):
        room = _width(column, cells, has_header=has_header)
        block = [_paint(cell, room, column, colours or {}) for cell in cells]
        if has_header:
            header = Cell(_title(column), colour=BOLD)
            block.insert(0, _paint(header, room, column, {}))
        blocks.append(block)
    gap = " " * GAP
    return [gap.join(line).rstrip() for line in zip(*blocks, strict=True)]


def _pipe_lines(columns: Sequence[Column], rows: Sequence[Row], *, has_header: bool) -> list[str]:
    texts = [
        [column.name, *(cell.text for cell in cells)]
        for column, cells in _filled(columns, rows, "pipe")
    ]
    if not has_header:
        texts = [column[1:] for column in texts]
    return column_lines(list(zip(*texts, strict=True)))


Fitted = tuple[Column, list[Cell]]


def _filled(
    columns: Sequence[Column], rows: Sequence[Row], kind: Literal["terminal", "pipe"]
) -> list[Fitted]:
    """Return the columns of a kind of output that are kept or not empty, each with its cells."""
    found = []
    for index, column in enumerate(columns):
        cells = [_as_cell(row[index]) for row in rows]
        if column.only not in (None, kind):
            continue
        is_kept = column.keep in ("both", kind)
        if is_kept or any(cell.text if kind == "pipe" else _visible(cell) for cell in cells):
            found.append((column, cells))
    return found


def _fit(
    columns: Sequence[Column], rows: Sequence[Row], width: int, *, has_header: bool
) -> list[Fitted]:
    """Return the columns that a line has room for, with texts cut to it."""
    found = _filled(columns, rows, "terminal")
    found = [(column, [_one_line(cell) for cell in cells]) for column, cells in found]
    for dropped in sorted(column.drop for column, _ in found if column.drop):
        if _least_total(found, has_header=has_header) <= width:
            break
        found = [(column, cells) for column, cells in found if column.drop != dropped]
    widths = [_width(column, cells, has_header=has_header) for column, cells in found]
    _shrink(widths, [column.least for column, _ in found], width)
    return [
        _cut_column(column, cells, room) if column.least else (column, cells)
        for (column, cells), room in zip(found, widths, strict=True)
    ]


def _cut_column(column: Column, cells: Sequence[Cell], room: int) -> Fitted:
    title = cut_text(_title(column), room)
    return replace(column, title=title), [_cut(cell, room) for cell in cells]


def _shrink(widths: list[int], least: Sequence[int], width: int) -> None:
    """Make the widest of the texts narrower until the line fits."""
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    while excess > 0:
        texts = [index for index, size in enumerate(widths) if 0 < least[index] < size]
        if not texts:
            return
        widest = max(texts, key=widths.__getitem__)
        widths[widest] -= 1
        excess -= 1


def _least_total(found: Sequence[Fitted], *, has_header: bool) -> int:
    """Return the cells of a line whose texts are as short as they may be."""
    total = GAP * (len(found) - 1)
    for column, cells in found:
        width = _width(column, cells, has_header=has_header)
        total += min(width, column.least) if column.least else width
    return total


def _width(column: Column, cells: Sequence[Cell], *, has_header: bool) -> int:
    width = max((cell_count(_visible(cell)) for cell in cells), default=0)
    if has_header:
        width = max(width, cell_count(_title(column)))
    return width


def _title(column: Column) -> str:
    return column.name.upper() if column.title is None else column.title


def _as_cell(cell: str | Cell) -> Cell:
    return Cell(cell) if isinstance(cell, str) else cell


def _visible(cell: Cell) -> str:
    """Return what a terminal shows of a cell."""
    return cell.text if cell.shown is None else cell.shown


def _one_line(cell: Cell) -> Cell:
    """Return a terminal's cell without line breaks and escape sequences, which would move the columns after it."""
    return replace(cell, shown=_plain(_visible(cell)))


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    return strip_escapes(text).replace("\n", " ").replace("\t", " ")


def _cut(cell: Cell, room: int) -> Cell:
    """Return a cell cut at its end to a number of cells."""
    return replace(cell, shown=cut_text(_visible(cell), room))


def _paint(cell: Cell, room: int, column: Column, colours: Mapping[str, str]) -> str:
    """Return a terminal's cell with its colours, filled with spaces to the width of its column."""
    shown = _visible(cell)
    colour = cell.colour or colours.get(cell.text, "")
    if column.is_dim and not colour:
        colour = DIM
    spaces = " " * (room - cell_count(shown))
    painted = coloured(shown, colour) if colour and shown else shown
    return spaces + painted if column.is_number else painted + spaces
