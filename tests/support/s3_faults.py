"""Fault plan of the S3 test server, and the injector that applies it to requests."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class FaultPlan:
    """Probabilities of faults from 0 to 1, for each request.

    Attributes:
        seed: Seed of the random generator.
        operations: Pattern of the operations that can fail, such as `UploadPart|PutObject`; empty for all.
        max_faults: Number of faults to inject at most, or None for no limit.
        skip: Number of matching requests that succeed before the first fault.
        throttled: 503 SlowDown.
        broken: 500 InternalError.
        conflict: 409 ConditionalRequestConflict, for conditional writes.
        reset: The server resets the connection and does not execute the request.
        lost: The server executes the request and resets the connection before the response.
        torn: The server resets the connection in the middle of the response's body.
        slow: The server sends the response's body in pieces, with a pause of `slow_seconds` between them.
        slow_seconds: Pause between two pieces.
        truncated: The server stores the first half of an upload and responds with 200.
        silent: The server does not execute the request, sends nothing until a plan without silent requests replaces
            this one, and then resets the connection.
        expired: 403 ExpiredToken.
        denied: 403 AccessDenied.
        expired_keys: Access keys whose requests always fail with 403 ExpiredToken.
    """

    seed: int = 0
    operations: str = ""
    max_faults: int | None = None
    skip: int = 0
    throttled: float = 0.0
    broken: float = 0.0
    conflict: float = 0.0
    reset: float = 0.0
    lost: float = 0.0
    torn: float = 0.0
    slow: float = 0.0
    slow_seconds: float = 0.05
    truncated: float = 0.0
    silent: float = 0.0
    expired: float = 0.0
    denied: float = 0.0
    expired_keys: tuple[str, ...] = ()


_KINDS = (
    *("throttled", "broken", "conflict", "reset", "lost", "torn", "slow", "truncated", "silent"),
    *("expired", "denied"),
)
ERROR_RESPONSES = {
    "throttled": (503, "SlowDown", "Please reduce your request rate."),
    "broken": (500, "InternalError", "We encountered an internal error. Please try again."),
    "conflict": (409, "ConditionalRequestConflict", "A conflicting operation is in progress."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
"""Status, code and message by kind of fault."""


class FaultInjector:
    """Decides which requests fail, and counts requests and faults. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, None] = {}
        self.set_plan(FaultPlan())

    def set_plan(self, plan: FaultPlan) -> None:
        """Replace the plan and restart its random generator and limits; keep the counts."""
        with self.lock:
            self.plan = plan
            self._generator = random.Random(plan.seed)  # noqa: S311
            self._remaining_skips, self._remaining_faults = plan.skip, plan.max_faults
            self.lock.notify_all()

    def wait_while_silent(self) -> None:
        """Return as soon as the plan has no silent requests."""
        with self.lock:
            self.lock.wait_for(lambda: not self.plan.silent)

    def next_fault(self, operation: str, key: str, *, is_conditional: bool) -> str:
        """Return the fault of a request, one of _KINDS, or an empty string.

        Args:
            operation: The request's operation, such as `PutObject`.
            key: The access key that signed the request.
            is_conditional: Whether the request has an If-Match or If-None-Match header.
        """
        with self.lock:
            self.counts[operation] += 1
            self.keys[key] = None
            if key in self.plan.expired_keys:
                return "expired"
            if self._remaining_faults == 0 or not re.fullmatch(
                self.plan.operations or ".*", operation
            ):
                return ""
            if self._remaining_skips > 0:
                self._remaining_skips -= 1
                return ""
            for kind in _KINDS:
                if (kind != "conflict" or is_conditional) and self._should_fail(kind):
                    self._remaining_faults = (
                        None if self._remaining_faults is None else self._remaining_faults - 1
                    )
                    self.counts[kind] += 1
                    return kind
        return ""

    def _should_fail(self, kind: str) -> bool:
        probability: float = getattr(self.plan, kind)
        return probability > 0 and self._generator.random() < probability
