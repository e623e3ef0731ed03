"""The line of a file in which a problem is, with a caret below its place, for a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.console import RED, coloured
from cloudtrain.console.cells import CUT, cell_count
from cloudtrain.console.terminal import columns_of, is_terminal
from cloudtrain.errors import Problem
from cloudtrain.secrets.values import (
    is_random_secret,
    is_secret_argument,
    is_secret_variable,
    may_name_secret,
)
from cloudtrain_runtime.contract.redaction import redact

_MAX_BYTES = 1_000_000
_LEAST_ROOM = 20
_MOST_EXCERPTS = 10
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Line breaks of YAML."""
_PAIR = re.compile(r"""(?=(?<![\w-])([\w-]+)["']?(?:\s*[:=,]\s*|\s+)["']?([^\s,}\]"']+))""")
"""A name and what follows it, as in `name: value`, `name=value` and `[--name, value]`."""
_IMPORTS = ("import ", "from ")


@dataclass(frozen=True)
class _Marked:
    """A line without tabs and control characters, and the characters that are marked: `text[start:end]`."""

    text: str
    start: int
    end: int


class Excerpts:
    """The source lines of one error's problems. Each file is read once, and a few excerpts are enough.

    Args:
        newest: A file that was changed later, in seconds since 1970, is not shown: the place may be another one now.
    """

    def __init__(self, *, newest: float) -> None:
        self._newest = newest
        self._files: dict[str, list[str]] = {}
        self._drawn = 0

    def of_problem(self, problem: Problem) -> list[str]:
        """Return the lines to print below a problem: its source line, and carets below its key or value.

        The list is empty where standard error is not a terminal, where the file does not show the problem (it cannot
        be read, lacks the line, or the line does not name the field), where the line may contain a secret, and after
        the first excerpts.
        """
        if problem.line is None or problem.column is None or not self._is_wanted():
            return []
        lines = self._lines_of(problem.file)
        if problem.line > len(lines) or may_name_secret(problem.path):
            return []
        if not _names_field(problem.path, lines[: problem.line]):
            # The place of a field that is missing is that of its section.
            return []
        return self._draw(lines, problem.line, problem.column, problem.file)

    def at_place(self, place: str) -> list[str]:
        """Return the same for a text that begins with `file:line: ` or `file:line:column: `."""
        found = re.match(r"(.+?):(\d+)(?::(\d+))?: ", place)
        if found is None or not self._is_wanted():
            return []
        lines = self._lines_of(found[1])
        number = int(found[2])
        if number > len(lines):
            return []
        line = lines[number - 1]
        indent = len(line) - len(line.lstrip())
        column = int(found[3] or indent + 1)
        return self._draw(lines, number, column, found[1])

    def _is_wanted(self) -> bool:
        return self._drawn < _MOST_EXCERPTS and is_terminal(sys.stderr)

    def _lines_of(self, file: str) -> list[str]:
        if file not in self._files:
            self._files[file] = _read_lines(Path(file), self._newest)
        return self._files[file]

    def _draw(self, lines: list[str], number: int, column: int, file: str) -> list[str]:
        if _may_be_secret(lines, number):
            return []
        drawn = _draw(lines[number - 1], number, column, Path(file).suffix)
        if drawn:
            self._drawn += 1
        return drawn


def _read_lines(file: Path, newest: float) -> list[str]:
    """Return a file's lines without keys and tokens; none if it cannot be read, or was changed later."""
    try:
        status = file.stat()
        if not file.is_file() or status.st_size > _MAX_BYTES or status.st_mtime > newest:
            return []
        text = file.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError):
        return []
    lines = _LINE_BREAK.split(text)
    # Some secrets, such as keys, have several lines.
    redacted = _LINE_BREAK.split(redact(text))
    return redacted if len(redacted) == len(lines) else []


def _names_field(path: str, lines: list[str]) -> bool:
    names = re.findall(r"[^.\[\]\s]*[^.\[\]\s\d][^.\[\]\s]*", path)
    return not names or any(names[-1] in line for line in lines)


def _draw(line: str, number: int, column: int, suffix: str) -> list[str]:
    """Return the line and its carets, as wide as the terminal."""
    start = column - 1
    if not line.strip() or start > len(line):
        return []
    gutter = f"  {number} | "
    room = max(_LEAST_ROOM, columns_of(sys.stderr) - len(gutter) - 1)
    # A tab is one column of a message, and has to be one on the terminal.
    text = "".join(char if char.isprintable() else " " for char in line)
    # The mark ends where the line is cut: a line may have a million characters.
    end = _end_of_token(text[: start + room], start, suffix)
    shown = _cut(_Marked(text, start, max(start + 1, end)), room)
    blank = " " * cell_count(shown.text[: shown.start])
    carets = "^" * max(1, cell_count(shown.text[shown.start : shown.end]))
    empty = " " * (len(gutter) - len("| ")) + "| "
    return [f"{gutter}{shown.text}", f"{empty}{blank}{coloured(carets, RED, sys.stderr)}"]


def _may_be_secret(lines: list[str], number: int) -> bool:
    """Return whether a line may have a secret: by its own words, the line before it, or a section that it is in."""
    line = lines[number - 1]
    return _has_secret(line) or any(map(may_name_secret, [line, *_lines_above(lines, number)]))


def _lines_above(lines: list[str], number: int) -> Iterator[str]:
    """Yield the line before a line, and the first line of each section that it is in."""
    room = _indent_of(lines[number - 1])
    is_first = True
    for line in reversed(lines[: number - 1]):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        indent = _indent_of(line)
        if is_first or indent < room:
            yield line
        is_first = False
        room = min(room, indent)


def _indent_of(line: str) -> float:
    """Return the indent of a line; that of a list's entry is a little more, because its section may have the same."""
    text = line.lstrip()
    indent = len(line) - len(text)
    return indent + 0.5 if text.startswith("-") else indent


def _has_secret(line: str) -> bool:
    if any(map(is_random_secret, re.findall(r"[\w+/=-]{40,}", line))):
        return True
    return any(
        is_secret_variable(name, value) or is_secret_argument(name.lstrip("-"), value)
        for name, value in _PAIR.findall(line)
    )


def _end_of_token(line: str, start: int, suffix: str) -> int:
    """Return where the key or value ends that begins at a place of a line."""
    first = line[start : start + 1]
    if first in ("'", '"'):
        closing = line.find(first, start + 1)
        return len(line.rstrip()) if closing < 0 else closing + 1
    if first in ("{", "["):
        return _end_of_brackets(line, start)
    if suffix == ".py" and not line.startswith(_IMPORTS, start):
        found = re.compile(r"[\w.]+").match(line, start)
        return start if found is None else found.end()
    # In braces and brackets a value ends with a comma.
    before = line[:start]
    is_inside = before.count("{") + before.count("[") > before.count("}") + before.count("]")
    ends = r"\s+#|:(?=\s|$)|\s*=|\s*$"
    if is_inside:
        ends += r"|\s*[,\]}]"
    found = re.compile(ends).search(line, start)
    return len(line) if found is None else found.start()


def _end_of_brackets(line: str, start: int) -> int:
    depth = 0
    for index in range(start, len(line)):
        if line[index] in "{[":
            depth += 1
        elif line[index] in "}]":
            depth -= 1
        if depth == 0:
            return index + 1
    return len(line.rstrip())


def _cut(marked: _Marked, room: int) -> _Marked:
    """Return the part of a line around its marked characters that fits into a number of columns."""
    first = max(0, marked.start - room)
    last = min(len(marked.text), marked.start + room)
    is_whole = first == 0 and last == len(marked.text)
    if is_whole and cell_count(marked.text) <= room:
        return marked
    # A third of the room shows what is before the mark.
    while cell_count(marked.text[first : marked.start]) > room // 3:
        first += 1
    before = CUT if first else ""
    while last > first and cell_count(f"{before}{marked.text[first:last]}{CUT}") > room:
        last -= 1
    after = CUT if last < len(marked.text) else ""
    offset = len(before) - first
    return _Marked(
        text=f"{before}{marked.text[first:last]}{after}",
        start=marked.start + offset,
        end=min(marked.end, last) + offset,
    )
