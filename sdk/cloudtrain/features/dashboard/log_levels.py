"""Levels of the lines of a log: which are errors and which warnings."""

from __future__ import annotations

from cloudtrain.runs.log_lines import RANK_FAILED
from cloudtrain.runs.titles import Level
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_TRACEBACK = "Traceback (most recent call last):"
_LOOKED_AT = 300
"""Characters of a line that are read. A level is at its begin."""

_ERROR = lazy_pattern(
    r"^(?:error|fatal|critical)\b:?"
    # A level as a logger writes it, behind its date or name.
    r"|(?:^|[\s\[|:-])(?:ERROR|FATAL|CRITICAL)(?:[\s\]|:]|$)"
    # glog, which torch uses: E1130 16:15:52.
    r"|^\[?E\d{4} \d\d:\d\d:"
    r"|^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt)(?::|$)",
)
_WARNING = lazy_pattern(
    r"^warn(?:ing)?\b:?"
    r"|(?:^|[\s\[|:-])WARN(?:ING)?(?:[\s\]|:]|$)"
    r"|^\[?W\d{4} \d\d:\d\d:"
    r"|\b[A-Za-z]*Warning: ",
)


class LevelReader:
    """Finds the levels of lines in their order. The lines of a traceback belong to its error."""

    def __init__(self) -> None:
        self._in_traceback: set[tuple[str, int | None]] = set()

    def level(self, host: str, rank: int | None, text: str) -> Level:
        """Return the level of a line.

        Args:
            host: Host that printed it.
            rank: Rank that printed it, or None.
            text: The line without the rank.
        """
        source = (host, rank)
        if text.startswith(_TRACEBACK):
            self._in_traceback.add(source)
            return Level.ERROR
        if source in self._in_traceback:
            if not text.startswith(" "):
                # The exception ends it.
                self._in_traceback.discard(source)
            return Level.ERROR
        return level_of_text(text)


def level_of_text(text: str) -> Level:
    """Return the level of a line by its own text."""
    start = text[:_LOOKED_AT]
    if RANK_FAILED.match(start) or _ERROR.search(start):
        return Level.ERROR
    if _WARNING.search(start):
        return Level.WARNING
    return Level.PLAIN
