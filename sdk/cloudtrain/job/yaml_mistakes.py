"""What a text that is not valid YAML was meant to be: the place of the mistake, and how to write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

_FIELD = r"(?P<start>\s*(?:- +)?)(?P<key>[A-Za-z_][\w-]*)"
_NO_SPACE = re.compile(_FIELD + r":(?P<value>[^\s:/][^:]*)")
_EQUALS = re.compile(_FIELD + r"\s*=\s*(?P<value>\S.*)")
_WITH_VALUE = re.compile(_FIELD + r"\s*:\s+(?P<value>[^\s'\"\[{|>&*!#].*?)\s*(?: #.*)?")
_HIDING_COMMENT = re.compile(r"[{\[][^}\]]*\s(?P<hash>#)[^{\[]*[}\]]")
_SLASHES = re.compile(r"(?:^|[\s,])(?P<slashes>//)")
_NO_BREAK_SPACE = "\u00a0"
_DEFAULT_HINT = "look at indentation, colons and quotes here"
_QUOTES = "put the value in quotes"


class SyntaxMistake(NamedTuple):
    """A mistake of syntax; line and column count from 1."""

    line: int
    column: int
    message: str
    hint: str


class _Place(NamedTuple):
    """Where the parser stopped."""

    lines: list[str]
    row: int
    column: int
    problem: str
    begin: int
    """Index of the line where the value begins that the parser was reading."""

    @property
    def line(self) -> str:
        return self.lines[self.row] if self.row < len(self.lines) else ""

    def mistake(
        self, hint: str, *, index: int | None = None, column: int | None = None
    ) -> SyntaxMistake:
        """Return the mistake with a hint, at this place or another one; columns count from 0."""
        row = self.row if index is None else index
        own_column = self.column if column is None else column
        return SyntaxMistake(row + 1, own_column + 1, f"not valid YAML: {self.problem}", hint)


def explain(text: str, error: yaml.MarkedYAMLError) -> SyntaxMistake:
    """Return where a text is not valid YAML, and what to write instead."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    start = error.context_mark
    begin = start.line if start is not None else line
    place = _Place(text.splitlines(), line, column, str(error.problem or error.context), begin)
    if "quoted scalar" in str(error.context) and start is not None:
        return _explain_quotes(place, start.line, start.column)
    for check in (
        _tab,
        _no_break_space,
        _second_document,
        _comment,
        _undefined_alias,
        _list_entry,
        _field,
        _reserved,
        _braces,
        _two_colons,
        _indentation,
    ):
        if (found := check(place)) is not None:
            return found
    return place.mistake(_DEFAULT_HINT)


def _explain_quotes(place: _Place, line: int, column: int) -> SyntaxMistake:
    if "escape" in place.problem:
        hint = (
            "within double quotes a backslash has a meaning: write / instead, or use single quotes"
        )
        return place.mistake(hint)
    return place.mistake("close the quote that begins here", index=line, column=column)


def _tab(place: _Place) -> SyntaxMistake | None:
    if "\\t" not in place.problem:
        return None
    return place.mistake("indent with spaces")


def _no_break_space(place: _Place) -> SyntaxMistake | None:
    for index in _near(place):
        column = place.lines[index].partition("#")[0].find(_NO_BREAK_SPACE)
        if column >= 0:
            hint = (
                "this is a no-break space (U+00A0), as web pages and documents have: type a space"
            )
            return place.mistake(hint, index=index, column=column)
    return None


def _second_document(place: _Place) -> SyntaxMistake | None:
    if "another document" not in place.problem:
        return None
    return place.mistake("one file describes one job: give what follows --- a file of its own")


def _comment(place: _Place) -> SyntaxMistake | None:
    """Find a comment that hides the end of a value in braces, and one that begins with // as in JavaScript."""
    if "expected ',' or" not in place.problem:
        return None
    for index in range(place.begin, min(place.row + 1, len(place.lines))):
        line = place.lines[index]
        if (found := _HIDING_COMMENT.search(line)) is not None:
            hint = f"what follows # is a comment, also the closing bracket: {_QUOTES}"
            return place.mistake(hint, index=index, column=found.start("hash"))
        if (found := _SLASHES.search(line)) is not None:
            return place.mistake(
                "a comment begins with #, not //", index=index, column=found.start("slashes")
            )
    return None


def _undefined_alias(place: _Place) -> SyntaxMistake | None:
    if "undefined alias" not in place.problem:
        return None
    name = re.split(r"[\s,}\]]", place.line[place.column :])[0]
    hint = f"put it in quotes: '{name}', or name a value above it: &{name.removeprefix('*')}"
    return place.mistake(hint)


def _list_entry(place: _Place) -> SyntaxMistake | None:
    """Find a field below an entry of a list that begins with a field, such as `- name: tiny`, in the same column."""
    if "expected <block end>" not in place.problem or place.line[place.column :][:1] in ("", "-"):
        return None
    above = [index for index in range(place.row) if place.lines[index].strip()]
    dashes = [index for index in above if place.lines[index].startswith(" " * place.column + "- ")]
    if not dashes:
        return None
    index = dashes[-1]
    return place.mistake("remove the - here, or indent the fields below it", index=index)


def field_of_line(lines: Sequence[str]) -> str:
    """Return the first line that gives a field in another form, such as `name = x`, as YAML; else an empty string."""
    for line in lines:
        found = _NO_SPACE.fullmatch(line.rstrip()) or _EQUALS.fullmatch(line.rstrip())
        if found is not None:
            return f"{found['key']}: {found['value']}"
    return ""


def _field(place: _Place) -> SyntaxMistake | None:
    """Find a field without a space after its colon, or with = in its place."""
    if "expected ':'" not in place.problem and "mapping values" not in place.problem:
        return None
    for index in _near(place):
        line = place.lines[index].partition(" #")[0].rstrip()
        found = _NO_SPACE.fullmatch(line) or _EQUALS.fullmatch(line)
        if found is not None:
            hint = f"write {found['key']}: {found['value']}"
            if "=" not in line[: found.start("value")]:
                hint += " (with a space after the colon)"
            return place.mistake(hint, index=index, column=found.start("key"))
    return None


def _reserved(place: _Place) -> SyntaxMistake | None:
    """Find a value that begins with a character that YAML reserves, such as @ or *."""
    is_reserved = "cannot start any token" in place.problem
    is_anchor = "alphabetic or numeric" in place.problem
    if not is_reserved and not is_anchor:
        return None
    column = place.column if is_reserved else place.column - 1
    value = re.split(r"[,}\]]|\s#", place.line[column:])[0].strip()
    return place.mistake(f"{_QUOTES}: '{value}'", column=column)


def _braces(place: _Place) -> SyntaxMistake | None:
    if "expected ',' or" not in place.problem:
        return None
    if "${" in place.line or "{{" in place.line:
        return place.mistake(f"{_QUOTES}: within braces, ${{...}} begins another mapping")
    return place.mistake(f"close the brace or bracket, or {_QUOTES}")


def _two_colons(place: _Place) -> SyntaxMistake | None:
    """Find a value that contains a colon and a space, which begins another field."""
    found = _WITH_VALUE.fullmatch(place.line)
    if "mapping values" not in place.problem or found is None:
        return None
    value = found["value"]
    if ": " not in value and not value.endswith(":"):
        return None
    quoted = value.replace("'", "''")
    return place.mistake(f"{_QUOTES}: {found['key']}: '{quoted}'", column=found.start("value"))


def _indentation(place: _Place) -> SyntaxMistake | None:
    """Find a field that is indented deeper than the one above it, which has a value."""
    above = next(
        (index for index in reversed(range(place.row)) if place.lines[index].strip()), None
    )
    if "mapping values" not in place.problem or above is None:
        return None
    own, other = (_indent(place.lines[each]) for each in (place.row, above))
    if own <= other or not _WITH_VALUE.fullmatch(place.lines[above]):
        return None
    hint = f"begin it in column {other + 1}, as line {above + 1} above it"
    return place.mistake(hint, column=own)


def _near(place: _Place) -> list[int]:
    """Return the line at which the parser stopped and the one above it, which often has the mistake."""
    above = [
        index for index in range(min(place.row, len(place.lines))) if place.lines[index].strip()
    ]
    return [*above[-1:], *([place.row] if place.row < len(place.lines) else [])]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
