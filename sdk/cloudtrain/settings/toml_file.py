"""TOML settings files: values, the lines they are on, and edits that keep comments and order."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cloudtrain.errors import SettingsError

TablePath = tuple[str, ...]
"""Names from the top level down: `("profiles", "big")` for `[profiles.big]`."""

Value = str | Sequence[str]

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True)
class _Statement:
    """The header of `table` or a value in it: its path from the top level, and its first and last line, 1-based."""

    table: TablePath
    path: TablePath
    lines: tuple[int, int]


class TomlFile:
    """The text of a TOML file. An edit returns a new `TomlFile`; nothing is written to disk.

    Raises:
        SettingsError: The text is not TOML; the message names file, line and column.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        try:
            self.values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(*_explain(error, text, file)) from None

    def line_of(self, *path: str) -> int | None:
        """Return the 1-based line of a value or table, None if the file does not have it.

        A value inside an inline table has the line on which the inline table begins.
        """
        best = max(self._statements, key=lambda each: _common_length(each.path, path), default=None)
        if best is None or not _common_length(best.path, path):
            return None
        return best.lines[0]

    def location_of(self, *path: str) -> str:
        """Return `file:line` of a value or table, or the file alone if the file does not have it."""
        line = self.line_of(*path)
        if line is None:
            return self.file
        return f"{self.file}:{line}"

    def with_values(self, table: TablePath, changes: Mapping[str, Value | None]) -> TomlFile:
        """Return the file with other values in a table.

        Args:
            table: The table; it is added at the end if the file does not have it.
            changes: Values by name; None removes a value.

        Raises:
            SettingsError: The file is written in a way that cannot be edited.
        """
        stored = _find_or_add(copy.deepcopy(self.values), table)
        wanted = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in changes.items()
        }
        changed = {name: value for name, value in wanted.items() if stored.get(name) != value}

        def change(values: Any) -> None:
            inner = _find_or_add(values, table)
            for name, value in changed.items():
                if value is None:
                    del inner[name]
                else:
                    inner[name] = value

        if not changed:
            return self
        return self._edited(table, change)

    def without(self, table: TablePath) -> TomlFile:
        """Return the file without a table. Comments above its header and after its last value stay.

        Raises:
            SettingsError: The file is written in a way that cannot be edited.
        """
        return self._edited(table, lambda values: _find_or_add(values, table[:-1]).pop(table[-1]))

    @cached_property
    def _lines(self) -> tuple[str, ...]:
        return tuple(io.StringIO(self.text, newline="\n"))

    @cached_property
    def _statements(self) -> tuple[_Statement, ...]:
        return tuple(_read_statements(self._lines))

    def _span(self, table: TablePath) -> tuple[int, int] | None:
        """Return where a table begins and ends: `lines[first:last]`, None if it has no header.

        The lines end with the last value of the table. For tomlkit the comments after it belong to the table, but they
        usually describe the next one; an edit of these lines alone leaves such comments where they are.
        """
        own = [each.lines for each in self._statements if each.table == table]
        if not table:
            # The top level has no header, and begins with the file.
            return 0, own[-1][1] if own else 0
        if not own:
            return None
        return own[0][0] - 1, own[-1][1]

    def _edited(self, table: TablePath, change: Callable[[Any], object]) -> TomlFile:
        """Return the file after a change of one table, unless that would change other values, too."""
        import tomlkit

        expected = copy.deepcopy(self.values)
        change(expected)
        first, last = self._span(table) or (0, len(self._lines))
        part = "".join(self._lines[first:last])
        if part and not part.endswith("\n"):
            part += "\n"
        document = tomlkit.parse(part)
        change(document)
        space = "\n" if last == 0 and self._lines else ""
        text = "".join([*self._lines[:first], document.as_string() + space, *self._lines[last:]])
        if "\n" in self.text and "\n" not in self.text.replace("\r\n", ""):
            # All lines end with \r\n, and tomlkit ends new ones with \n.
            text = text.replace("\r\n", "\n").replace("\n", "\r\n")
        with contextlib.suppress(SettingsError):
            edited = TomlFile(text, self.file)
            if _without_empty(edited.values) == _without_empty(expected):
                return edited
        raise SettingsError(
            f"{self.location_of(*table)}: cannot change this table without changing other values",
            "edit the file by hand; nothing was changed",
        )


def _explain(error: tomllib.TOMLDecodeError, text: str, file: str) -> tuple[str, str]:
    message = str(error)
    place = _PLACE.search(message)
    if place is None or place[1] is None:
        # At the end of the file.
        lines = text.split("\n")
        line = len(lines)
        column = len(lines[-1]) + 1
    else:
        line = int(place[1])
        column = int(place[2])
    reason = message[: place.start()] if place is not None else message
    return f"{file}:{line}:{column}: {reason}", "write TOML such as: bucket = 'my-bucket'"


def _read_statements(lines: Iterable[str]) -> Iterator[_Statement]:
    """Yield the headers and values of a text. A statement ends with the first line that makes it valid TOML."""
    table: TablePath = ()
    first_line = 1
    statement = ""
    for number, line in enumerate(lines, start=1):
        statement += line
        try:
            path = _path_of(tomllib.loads(statement))
        except tomllib.TOMLDecodeError:
            continue
        if statement.lstrip().startswith("["):
            table = path
            yield _Statement(table, table, (first_line, number))
        elif path:
            yield _Statement(table, (*table, *path), (first_line, number))
        first_line = number + 1
        statement = ""


def _path_of(statement: Mapping[str, Any]) -> TablePath:
    path: TablePath = ()
    found: Any = statement
    while isinstance(found, dict) and len(found) == 1:
        ((name, found),) = found.items()
        path = (*path, name)
    return path


def _common_length(one: TablePath, other: TablePath) -> int:
    return sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


def _find_or_add(values: Any, table: TablePath) -> Any:
    for name in table:
        values = values.setdefault(name, {})
    return values


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without empty tables: a table can be written by its header or only by its dotted keys."""
    inner = {
        name: _without_empty(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: value for name, value in inner.items() if value != {}}
