"""TOML files of flat tables: where each value stands, and a new value in its place, with all else as it was written.

Nothing here knows TOML's grammar. The standard library's parser tells where a statement ends, what it names and where
its comment begins, and every change is parsed again before it counts.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cloudtrain.errors import SettingsError
from cloudtrain_runtime.contract.strict_json import dump_json

TablePath = tuple[str, ...]
"""Names from the top level down: `("profiles", "big")` for `[profiles.big]`."""

Value = str | Sequence[str]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


@dataclass(frozen=True)
class _Statement:
    """A header, a key with its value, or a line without either, as it is written.

    Attributes:
        line: 1-based line on which it begins.
        text: All of it, with the end of its last line.
        table: The table that it stands in; of a header the one that it begins.
        key: Names from the top level down of what it gives a value; None where it gives none.
        is_header: Whether it begins a table.
    """

    line: int
    text: str
    table: TablePath = ()
    key: TablePath | None = None
    is_header: bool = False

    @property
    def is_remark(self) -> bool:
        """Whether it is a comment or an empty line."""
        return self.key is None and not self.is_header


class Tables:
    """A TOML file's text.

    Args:
        text: The text.
        file: The file's name, for errors.

    Raises:
        SettingsError: it is no TOML; the message names line and column.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        try:
            self.values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(*_explain(error, text, file)) from None

    @cached_property
    def _statements(self) -> tuple[_Statement, ...]:
        return tuple(_read(self.text))

    def line_of(self, *path: str) -> int | None:
        """Return the line on which a value or a table is written, None when it is not there."""
        for statement in self._statements:
            name = statement.table if statement.is_header else statement.key
            if name is not None and name == path:
                return statement.line
        # In a table that is written in one line, or dotted.
        written = (each for each in self._statements if each.key and (each.key == path[: len(each.key)]))
        dotted = (each for each in self._statements if each.key and each.key[: len(path)] == path)
        return next((each.line for each in (*written, *dotted)), None)

    def place_of(self, *path: str) -> str:
        """Return `file:line` of a value or a table, the file alone when it is not there."""
        line = self.line_of(*path)
        return self.file if line is None else f"{self.file}:{line}"

    def changed(self, table: TablePath, changes: Mapping[str, Value | None]) -> Tables:
        """Return the file with other values in a table, which need not be there; None takes a value out.

        Raises:
            SettingsError: the table is written in a way that cannot be changed in place; nothing was changed.
        """
        text = self
        for name, value in changes.items():
            text = text._with(table, name, value)
        return text

    def without(self, table: TablePath) -> Tables:
        """Return the file without a table, and without the comments between its values.

        Raises:
            SettingsError: see `changed`.
        """
        expected = copy.deepcopy(self.values)
        del _inner(expected, table[:-1])[table[-1]]
        own = [index for index, each in enumerate(self._statements) if _is_within(each, table)]
        kept = [
            each.text
            for index, each in enumerate(self._statements)
            if index not in own and not (each.is_remark and own and own[0] < index < own[-1] and each.table == table)
        ]
        return self._proven("".join(kept), expected, table)

    def _with(self, table: TablePath, name: str, value: Value | None) -> Tables:
        expected = copy.deepcopy(self.values)
        target = _inner(expected, table)
        if value is None:
            target.pop(name, None)
        else:
            target[name] = value if isinstance(value, str) else list(value)
        if expected == self.values:
            return self
        parts = [each.text for each in self._statements]
        at = next((index for index, each in enumerate(self._statements) if each.key == (*table, name)), None)
        if at is not None:
            parts[at] = "" if value is None else _rewrite(parts[at], value)
        elif value is not None:
            self._insert(parts, table, f"{_write_key(name)} = {_write(value)}{self._line_end}")
        return self._proven("".join(parts), expected, (*table, name))

    def _insert(self, parts: list[str], table: TablePath, line: str) -> None:
        """Put a line behind the last value of its table, or behind the header; a table that is not there is begun."""
        own = [i for i, each in enumerate(self._statements) if not each.is_remark and each.table == table]
        if own:
            parts[own[-1]] = self._ended(parts[own[-1]]) + line
        elif not table:
            first = next((i for i, each in enumerate(self._statements) if each.is_header), len(parts))
            # What is said directly above a header is said of its table.
            while first > 0 and self._statements[first - 1].text.lstrip().startswith("#"):
                first -= 1
            if first == len(parts) and parts:
                parts[-1] = self._ended(parts[-1])
            parts.insert(first, line + (self._line_end if first < len(parts) else ""))
        else:
            header = f"[{'.'.join(map(_write_key, table))}]{self._line_end}"
            if parts:
                parts[-1] = self._ended(parts[-1])
            parts.append((self._line_end if self.text.strip() else "") + header + line)

    @property
    def _line_end(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def _ended(self, text: str) -> str:
        return text if text.endswith("\n") else text + self._line_end

    def _proven(self, text: str, expected: Mapping[str, Any], path: TablePath) -> Tables:
        """Return a text when it says exactly what it should."""
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            values = {}
        if _without_empty(values) != _without_empty(expected):
            table = f"[{'.'.join(map(_write_key, path[:-1]))}]"
            message = f"{self.place_of(*path)}: {'.'.join(path)} is written so that it cannot be changed in place"
            raise SettingsError(message, f"write it below a header of its own, {table}; nothing was changed")
        return Tables(text, self.file)


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without tables that hold nothing: a header alone says nothing."""
    inner = {name: _without_empty(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in inner.items() if value != {}}


def _explain(error: tomllib.TOMLDecodeError, text: str, file: str) -> tuple[str, str]:
    """Return message and hint of what tomllib says."""
    said = str(error)
    place = _PLACE.search(said)
    if place is None or place[1] is None:
        lines = text.split("\n")
        line, column = len(lines), len(lines[-1]) + 1
    else:
        line, column = int(place[1]), int(place[2])
    message = said[: place.start()] if place is not None else said
    return f"{file}:{line}:{column}: {message}", "write TOML such as: bucket = 'my-bucket'"


def _read(text: str) -> Iterator[_Statement]:
    """Yield the statements of a text that parses, in order."""
    table: TablePath = ()
    begun, parts = 1, ""
    for number, line in enumerate(_LINES.findall(text), start=1):
        parts += line
        values = _parse(parts)
        if values is None:
            continue  # a value that goes on in the next line
        is_header = parts.lstrip().startswith("[")
        path = _path_of(values)
        if is_header:
            table = path
        key = (*table, *path) if path and not is_header else None
        yield _Statement(begun, parts, table, key, is_header)
        begun, parts = number + 1, ""


def _parse(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _path_of(values: Mapping[str, Any]) -> TablePath:
    """Return the names that lead to what one statement says: it has one value, or begins one table."""
    path: TablePath = ()
    found: Any = values
    while isinstance(found, dict) and len(found) == 1:
        ((name, found),) = found.items()
        path = (*path, name)
    return path


def _is_within(statement: _Statement, table: TablePath) -> bool:
    """Whether a header or a value belongs to a table or to one below it."""
    name = statement.table if statement.is_header else statement.key
    return name is not None and name[: len(table)] == table


def _inner(values: dict[str, Any], table: TablePath) -> dict[str, Any]:
    for name in table:
        values = values.setdefault(name, {})
    return values


def _rewrite(text: str, value: Value) -> str:
    """Return a statement with another value, its key and its last line's comment as they are written."""
    name = next(text[:at] for at in _positions(text, "=") if _parse(f"{text[:at]}= 0") is not None)
    body = text.rstrip("\r\n")
    comment = next((body[at:] for at in _positions(body, "#") if _parse(body[:at])), "")
    gap = body[: len(body) - len(comment)]
    space = gap[len(gap.rstrip()) :] if comment else ""
    return f"{name.rstrip()} = {_write(value)}{space}{comment}{text[len(body) :]}"


def _positions(text: str, char: str) -> Iterator[int]:
    at = text.find(char)
    while at >= 0:
        yield at
        at = text.find(char, at + 1)


def _write(value: Value) -> str:
    return _quote(value) if isinstance(value, str) else f"[{', '.join(map(_quote, value))}]"


def _quote(text: str) -> str:
    # TOML's strings escape as JSON's do, and want one character more to be escaped.
    return dump_json(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write_key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _quote(name)
