"""The form of a module that was written from the cells of a notebook: a heading above the code of each cell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "# Written by cloudtrain from "
"""How the first line of such a module begins; the notebook's name follows."""

VALUES: Final = "# %% values of names"
"""The line above code that comes from no cell: what names had when the code was sent."""

_CELL: Final = re.compile(r"# %% (.+), line (\d+)")


def cell_heading(cell: str, line: int) -> str:
    """Return the line above code of a cell, which editors show as a cell of its own.

    Args:
        cell: What tracebacks call the cell.
        line: Line of the cell where the code begins, from 1.
    """
    return f"# %% {cell}, line {line}"


def is_written(path: str | None) -> bool:
    """Return whether the file of a module was written from cells."""
    if path is None:
        return False
    with Path(path).open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


@dataclass(frozen=True)
class Part:
    """A part of a module that comes from a cell.

    Attributes:
        place: What tracebacks call the cell.
        line: Its first line there.
        start: Its first line in the module.
        code: Its code.
    """

    place: str
    line: int
    start: int
    code: str


def split_cells(text: str) -> tuple[Part, ...]:
    """Return the parts of a module that come from cells, in its order."""
    found = list[Part]()
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if line == VALUES or _CELL.fullmatch(line)]
    for index, following in zip(starts, [*starts[1:], len(lines)], strict=True):
        heading = _CELL.fullmatch(lines[index])
        if heading is not None:
            code = "\n".join(lines[index + 1 : following]) + "\n"
            found.append(Part(heading[1], int(heading[2]), index + 2, code))
    return tuple(found)
