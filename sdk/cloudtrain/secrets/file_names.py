"""Tables of file name patterns, each with what it means."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping


class NameTable:
    """Meanings of file names.

    Args:
        patterns: Shell patterns by meaning. The first meaning that fits counts.
    """

    def __init__(self, patterns: Mapping[str, Iterable[str]]) -> None:
        self._meanings = tuple(patterns)
        # One expression: ten thousand names times fifty patterns would take longer than to read the files.
        groups = ("|".join(map(fnmatch.translate, several)) for several in patterns.values())
        self._pattern = re.compile("|".join(f"({group})" for group in groups))

    def find(self, base: str) -> str | None:
        """Return what a name without its folder means, or None."""
        match = self._pattern.match(base)
        return None if match is None or match.lastindex is None else self._meanings[match.lastindex - 1]
