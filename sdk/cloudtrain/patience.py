"""How often to ask, and how long to go on asking what does not answer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

from cloudtrain.errors import UnreachableError
from cloudtrain.units import format_duration

OUTAGE_SECONDS = 3600.0
"""How long what is followed may go without an answer before that is an error."""

_FIRST_SECONDS = 5.0
_LONGEST_SECONDS = 60.0


class Pace(Protocol):
    """How long to wait before a thing is asked for again."""

    def next_seconds(self, *, changed: bool) -> float:
        """Return the seconds to wait after an answer. `changed`: it told something new."""
        ...


class SteadyPace:
    """The same wait each time: for what costs nothing to ask."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def next_seconds(self, *, changed: bool) -> float:  # noqa: ARG002 (the protocol's signature)
        """Return the wait."""
        return self._seconds


class Patience:
    """Goes on through an outage of minutes, and tells people twice: when it begins, and when it is over.

    Waits are 5 s at first and grow to 60 s. What has never answered is no outage: wrong settings look the same, so the
    first error is raised as it is.

    Args:
        on_trouble: Given one sentence for people each time.
        scale: What the waits are multiplied by.
    """

    def __init__(
        self,
        on_trouble: Callable[[str], None] | None = None,
        *,
        scale: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._on_trouble = on_trouble
        self._scale = scale
        self._clock = clock
        self._dice = dice
        self._worked: set[str] = set()
        self._began = 0.0
        self._failures: dict[str, int] = {}

    def failed(self, error: UnreachableError, what: str = "") -> float:
        """Return the seconds to wait before the next try.

        Args:
            error: Why it failed.
            what: Which of several things that are asked for.

        Raises:
            UnreachableError: this one, when this has not worked before, or something not for an hour.
        """
        if what not in self._worked:
            raise error
        if not self._failures:
            self._began = self._clock()
            self._tell(f"{error.message}; trying again, the run goes on meanwhile")
        elif self._clock() - self._began > OUTAGE_SECONDS:
            raise error
        failures = self._failures.get(what, 0)
        self._failures[what] = failures + 1
        wait = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2.0 ** min(failures, 10)) * self._scale
        return wait * (0.5 + 0.5 * self._dice())

    def worked(self, what: str = "") -> bool:
        """Take note of an answer; return whether this had failed before, so that others may work again, too."""
        self._worked.add(what)
        had_failed = self._failures.pop(what, 0) > 0
        if had_failed and not self._failures:
            self._tell(f"there are answers again, after {format_duration(self._clock() - self._began)}")
        return had_failed

    def _tell(self, text: str) -> None:
        if self._on_trouble is not None:
            self._on_trouble(text)
