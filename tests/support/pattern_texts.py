"""What a regular expression looks for, as texts that a person can read and search."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

ANY = "…"
"""Stands for what differs from one match to the next."""

_CLASSES = frozenset("dDwWsSbBAZ")
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")


def texts(pattern: str) -> Iterator[str]:
    """Yield the texts that a pattern matches, one of each alternative, with `…` for what is not fixed.

    Optional parts are left out, and so are lookarounds and anchors.
    """
    for text in _Reader(pattern).alternatives():
        short = re.sub(rf"{ANY}(?:\s*{ANY})+", ANY, text).strip(" :")
        if len(short.replace(ANY, "").strip()) > 1:
            yield short


class _Reader:
    """A reader of a pattern, from left to right. It knows what the failure rules use."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0

    def alternatives(self) -> list[str]:
        """Read up to the end of the group or of the pattern."""
        found: list[str] = []
        parts: list[Sequence[str]] = []
        while self.position < len(self.pattern) and self.pattern[self.position] != ")":
            if self.pattern[self.position] == "|":
                self.position += 1
                found += _join(parts)
                parts = []
            else:
                parts.append(self._part())
        return found + _join(parts)

    def _part(self) -> Sequence[str]:
        read = self._atom()
        quantifier = _QUANTIFIER.match(self.pattern, self.position)
        if quantifier is None:
            return read
        self.position = quantifier.end()
        if quantifier[0].startswith(("?", "*")):
            # `.*` hides something; a part that may be missing is left out.
            return [ANY] if list(read) == [ANY] else [""]
        return read

    def _atom(self) -> Sequence[str]:
        character = self.pattern[self.position]
        self.position += 1
        if character == "(":
            return self._group()
        if character == "[":
            return self._set()
        if character == "\\":
            return self._escape()
        if character == ".":
            return [ANY]
        return [""] if character in "^$" else [character]

    def _escape(self) -> Sequence[str]:
        character = self.pattern[self.position]
        self.position += 1
        if character in "bBAZ":
            return [""]
        if character == "s":
            return [" "]
        return [ANY] if character in _CLASSES else [character]

    def _set(self) -> Sequence[str]:
        end = self.pattern.index("]", self.position + 1)
        while self.pattern[end - 1] == "\\":
            end = self.pattern.index("]", end + 1)
        content = self.pattern[self.position : end]
        self.position = end + 1
        is_pair = len(content) == 2 and content.lower() == content[0].lower() * 2
        return [content[0]] if is_pair else [ANY]

    def _group(self) -> Sequence[str]:
        head = re.compile(r"\?(?:P<\w+>|[:=!]|<[=!]|[a-z]+\))?").match(self.pattern, self.position)
        kind = "" if head is None else head[0]
        self.position += len(kind)
        if kind.endswith(")"):
            # flags
            return [""]
        read = self.alternatives()
        self.position += 1
        if kind in ("?=", "?!", "?<=", "?<!"):
            return [""]
        return read


def _join(parts: Sequence[Sequence[str]]) -> list[str]:
    return ["".join(each) for each in itertools.islice(itertools.product(*parts), 60)]
