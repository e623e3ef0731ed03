"""The form of a rule: a pattern, its failure class and the action to advise."""

from __future__ import annotations

import enum
import re

from cloudtrain.failure_rules.classes import FailureClass


class Source(enum.Flag):
    """Where a text comes from."""

    REASON = enum.auto()
    """SageMaker's FailureReason. A match decides without reading the log."""
    MESSAGE = enum.auto()
    """The message of a secondary status, while the job waits."""
    EXCEPTION = enum.auto()
    """`Type: message` at the end of a traceback."""
    LINE = enum.auto()
    """A log line outside of a traceback."""


class Causality(enum.IntEnum):
    """How close a text is to the cause. The smallest value wins, whatever was printed first."""

    CAUSE = 0
    SYMPTOM = 1
    """Sometimes the only trace of the cause, sometimes the effect of a cause that another rank reports."""
    CONSEQUENCE = 2
    """What a healthy rank prints after another one has failed."""


class Rule:
    """A pattern for one failure.

    Args:
        failure_class: The class of the failure.
        pattern: Regular expression of what the text contains.
        action: What to do, with placeholders.
        causality: How close the text is to the cause.
        sources: Where the text can come from, besides log lines, which every rule with needles matches.
        needles: Substrings, at least one of which every matching line contains. They are searched first, which is a
            hundred times faster than the pattern.
    """

    def __init__(
        self,
        failure_class: FailureClass,
        pattern: str,
        action: str,
        causality: Causality = Causality.CAUSE,
        *,
        sources: Source = Source.EXCEPTION,
        needles: tuple[str, ...] = (),
    ) -> None:
        self.failure_class = failure_class
        self.pattern = re.compile(pattern)
        self.action = action
        self.causality = causality
        self.sources = sources | Source.LINE if needles else sources
        self.needles = needles
        self.is_general = not pattern

    def match(self, text: str) -> dict[str, str] | None:
        """Return the named groups that a text has; None if it does not match."""
        match = self.pattern.search(text)
        if match is None:
            return None
        return {name: value for name, value in match.groupdict().items() if value is not None}
