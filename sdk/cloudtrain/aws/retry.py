"""Retry policy for AWS calls and polling.

botocore repeats a single call (`client_retries`). A loop over a status is a `for` over `poll`, which waits by a `Backoff`,
and through an outage by an `OutageTolerance`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from cloudtrain.errors import CloudError, UnreachableError
from cloudtrain.support.units import format_duration

ATTEMPTS = 6
POLL_SECONDS = 5.0
LOOPBACK_POLL_SECONDS = 0.5
"""An endpoint on this machine has no request limits."""
OUTAGE_SECONDS = 3600.0
_GROWTH = 2.0
_JITTER = 0.2
_LONGEST_FACTOR = 6.0
T = TypeVar("T")


def client_retries(attempts: int = ATTEMPTS) -> Any:
    """Return the `retries` of a botocore `Config`: standard mode, which backs off with jitter.

    AWS_MAX_ATTEMPTS overrides `attempts`, the maximum number of times that a request is sent. It returns Any, because
    botocore has no public name for the type of this dictionary.
    """
    override = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return {
        "mode": "standard",
        "total_max_attempts": int(override) if override.isdecimal() else attempts,
    }


class Backoff:
    """Waits that double up to a longest one; each is shortened at random by up to a fifth, so that clients spread out.

    Args:
        first_seconds: The first wait, and the first one after a change.
        longest_seconds: By default six times the first.
    """

    def __init__(self, first_seconds: float, longest_seconds: float | None = None) -> None:
        self.first_seconds = first_seconds
        if longest_seconds is None:
            longest_seconds = first_seconds * _LONGEST_FACTOR
        self.longest_seconds = longest_seconds
        self._next_seconds = first_seconds

    def next_seconds(self, *, changed: bool = False) -> float:
        """Return the next wait; the first one again when the last poll has brought something new (`changed`)."""
        seconds = self.first_seconds
        if not changed:
            seconds = max(self._next_seconds, seconds)
        self._next_seconds = min(seconds * _GROWTH, max(self.longest_seconds, self.first_seconds))
        return seconds * random.uniform(1 - _JITTER, 1)  # noqa: S311 (no secret)


@dataclass(frozen=True)
class OutagePolicy:
    """How an outage is waited through.

    Attributes:
        first_seconds: The first wait before a failed call is repeated.
        longest_seconds: The longest such wait.
        limit_seconds: How long a call may fail before its error is raised.
        unanswered_limit_seconds: The same for a call that has not succeeded before: wrong settings look like an outage.
        errors: The errors that count as an outage.
    """

    first_seconds: float = 5.0
    longest_seconds: float = 60.0
    limit_seconds: float = OUTAGE_SECONDS
    unanswered_limit_seconds: float = 0.0
    errors: type[CloudError] = UnreachableError


class OutageTolerance:
    """Waits through outages of several calls, and reports when an outage begins and when it ends. Thread-safe.

    Args:
        on_message: Called with a sentence when the first call fails, and when all calls succeed again.
        policy: Waits and limits.
        note: What the sentence about the first failure adds in parentheses.
        clock: Returns monotonic seconds; by default `time.monotonic`.

    Attributes:
        errors: The errors that count as an outage.
    """

    def __init__(
        self,
        on_message: Callable[[str], None] | None = None,
        policy: OutagePolicy = OutagePolicy(),
        *,
        note: str = "retrying; the run continues",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.errors = policy.errors
        self._on_message = on_message or (lambda _: None)
        self._policy = policy
        self._note = note
        # Looked up here, because simulations replace the clock after the import.
        self._clock = clock or time.monotonic
        self._lock = threading.Lock()
        self._answered: set[str] = set()
        self._failing: dict[str, tuple[float, Backoff, str]] = {}
        self._began = 0.0

    def failed(self, error: CloudError, call: str = "") -> float:
        """Return the seconds to wait before a failed call is repeated.

        Raises:
            CloudError: `error`, when the call has failed for too long.
        """
        policy = self._policy
        now = self._clock()
        with self._lock:
            since, backoff, _ = self._failing.get(call) or (
                now,
                Backoff(policy.first_seconds, policy.longest_seconds),
                "",
            )
            limit = policy.unanswered_limit_seconds
            if call in self._answered:
                limit = policy.limit_seconds
            if (left := limit - (now - since)) <= 0:
                raise error
            if not self._failing:
                self._began = now
                self._on_message(f"{error.message} ({self._note})")
            self._failing[call] = since, backoff, error.message
            return min(left, backoff.next_seconds())

    def succeeded(self, call: str = "") -> bool:
        """Record that a call has succeeded; return whether it had failed before."""
        with self._lock:
            self._answered.add(call)
            had_failed = self._failing.pop(call, None) is not None
            if had_failed and not self._failing:
                self._on_message(f"recovered after {format_duration(self._clock() - self._began)}")
            return had_failed

    def last_error(self, call: str = "") -> str:
        """Return the message of a call's last error; empty when it has succeeded since."""
        with self._lock:
            return self._failing[call][2] if call in self._failing else ""


def poll(
    ask: Callable[[], T],
    backoff: Backoff,
    outages: OutageTolerance | None = None,
    *,
    call: str = "",
    changing: Callable[[T], object] = lambda answer: answer,
    timeout_seconds: float | None = None,
    least_seconds: float = 0.0,
    pause: Callable[[float], object] | None = None,
) -> Iterator[T]:
    """Yield what `ask` returns, again and again; the caller leaves the loop when it has seen what it waits for.

    Args:
        ask: Asks once.
        backoff: The waits; they begin again after a change.
        outages: Tolerates errors of `ask`; by default in silence, and none before its first success.
        call: The name of `ask` among the calls of `outages`.
        changing: Returns the part of an answer whose changes count.
        timeout_seconds: Ends the loop; None asks without limit. It asks at least once.
        least_seconds: The shortest wait after an answer.
        pause: Waits, and returns whether to end the loop; by default `time.sleep`.

    Raises:
        CloudError: An outage has lasted too long.
    """
    deadline = None
    if timeout_seconds is not None:
        deadline = time.monotonic() + timeout_seconds
    tolerance = outages or OutageTolerance()
    known: object = None
    while True:
        try:
            answer = ask()
        except tolerance.errors as error:
            seconds = tolerance.failed(error, call)
        else:
            tolerance.succeeded(call)
            yield answer
            before = known
            known = changing(answer)
            seconds = max(backoff.next_seconds(changed=known != before), least_seconds)
        if deadline is not None:
            rest = deadline - time.monotonic()
            if rest <= 0.0:
                return
            seconds = min(seconds, rest)
        if (pause or time.sleep)(seconds):
            return
