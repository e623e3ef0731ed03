"""How often AWS is asked: waits that grow while nothing changes, and a budget that all processes here share.

What AWS allows, for each account and region (so for all its users together), and what is taken of it here at most:

| Operation           | AWS allows each second                                      | taken |
|---------------------|-------------------------------------------------------------|-------|
| GetLogEvents        | 10 in us-west-2, eu-west-1, eu-central-1 and others, or 25  | 8     |
| DescribeLogStreams  | 25                                                          | 10    |
| DescribeTrainingJob | not published                                               | 5     |
| ListTrainingJobs    | 2, as one of its users has read in Service Quotas           | 1.5   |

Sources: "CloudWatch Logs quotas", Amazon CloudWatch Logs User Guide, 2026; ListTrainingJobs: issue 87 of
github.com/aws-solutions/deepracer-on-aws. The first two are for people, not for programs, says AWS, and asks for
back-off and jitter (Knowledge Center, "How do I determine throttling in my CloudWatch logs?").

A followed run asks for its state every 5 to 30 s, for each log stream every 5 to 30 s and for the list of streams every
10 to 60 s; each wait is varied by a fifth. So 100 runs of which one host prints all the time would ask for logs 20
times a second: the budget makes their waits longer. On one machine the budget lies in a file, so it holds for
processes, too. Machines do not know of each other: when AWS says that it is too much, each takes half (additive
increase, multiplicative decrease).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUICK_SECONDS = 5.0
SLOW_FACTOR = 6.0
"""The longest wait, in shortest ones."""

_GROWTH = 1.5
_JITTER = 0.2
_LEAST_SHARE = 1 / 16
_MORE_SHARE = 0.005
"""What an answered call adds to the share: after it was halved, about 100 calls bring it back."""

_ONE_EVENT_SECONDS = 1.0
"""Refusals within it are one event: calls that were under way together are refused together."""

_STALE_SECONDS = 300.0
_THROTTLED_SECONDS = 2.0
_THROTTLED_TRIES = 5
_THROTTLED = frozenset(
    {
        *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException"),
        *("TooManyRequestsException", "RequestLimitExceeded", "LimitExceededException", "SlowDown"),
    }
)


@dataclass(frozen=True)
class Limit:
    """What may be taken: calls per second, and how many of them at once."""

    per_second: float
    at_once: int


LIMITS: Mapping[str, Limit] = {
    "GetLogEvents": Limit(8.0, 1),
    "DescribeLogStreams": Limit(10.0, 5),
    "DescribeTrainingJob": Limit(5.0, 3),
    "ListTrainingJobs": Limit(1.5, 1),
}


class BackoffPace:
    """Waits that begin quick, grow while nothing changes, and are quick again when something has.

    Args:
        quick_seconds: The shortest wait.
        slow_seconds: The longest.
        share: Returns the part of its rate that AWS leaves us now; waits grow by its inverse.
    """

    def __init__(
        self,
        quick_seconds: float,
        slow_seconds: float | None = None,
        *,
        share: Callable[[], float] = lambda: 1.0,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self.quick_seconds = quick_seconds
        self.slow_seconds = quick_seconds * SLOW_FACTOR if slow_seconds is None else slow_seconds
        self._share = share
        self._dice = dice
        self._wait = quick_seconds

    def next_seconds(self, *, changed: bool) -> float:
        """Return the seconds to wait after an answer."""
        self._wait = self.quick_seconds if changed else min(self.slow_seconds, self._wait * _GROWTH)
        longest = max(self._wait, self.quick_seconds / self._share())
        return longest * (1 - _JITTER + 2 * _JITTER * self._dice())


class Budget:
    """Lets calls through no faster than a limit, for every process of this user on this machine.

    Args:
        path: File that the processes share; None keeps the budget to this process.
    """

    def __init__(self, limit: Limit, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._state = _State()

    def take(self) -> float:
        """Take the next free place in the queue; return the seconds until it is ours."""
        with self._changed() as state:
            now = self._clock()
            # Monotonic time begins anew when the machine does.
            if state.next_at > now + _STALE_SECONDS:
                state.next_at = now
            gap = 1 / (self.limit.per_second * state.share)
            start = max(state.next_at, now - (self.limit.at_once - 1) * gap)
            state.next_at = start + gap
            return max(0.0, start - now)

    def answered(self, *, throttled: bool) -> None:
        """Take note of how a call ended."""
        if not throttled and self._state.share >= 1:
            return
        with self._changed() as state:
            now = self._clock()
            if not throttled:
                state.share = min(1.0, state.share + _MORE_SHARE)
            elif not 0 <= now - state.halved_at < _ONE_EVENT_SECONDS:
                state.share = max(_LEAST_SHARE, state.share / 2)
                state.halved_at = now

    def share(self) -> float:
        """Return the part of the limit that is taken now, as far as this process knows."""
        return self._state.share

    @contextlib.contextmanager
    def _changed(self) -> Iterator[_State]:
        """Give what all processes know, and keep what the block makes of it."""
        with self._lock:
            if self._path is None:
                yield self._state
                return
            import fcntl

            with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", 0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._state = _State.from_bytes(file.read(_State.BYTES))
                yield self._state
                file.seek(0)
                file.write(self._state.to_bytes())


@dataclass
class _State:
    """What the processes share: when the next call may begin, the share, when it was halved (monotonic seconds)."""

    BYTES = struct.calcsize("<3d")

    next_at: float = 0.0
    share: float = 1.0
    halved_at: float = -1.0

    @classmethod
    def from_bytes(cls, data: bytes) -> _State:
        if len(data) != cls.BYTES:
            return cls()
        state = cls(*struct.unpack("<3d", data))
        return state if _LEAST_SHARE <= state.share <= 1 else cls()

    def to_bytes(self) -> bytes:
        return struct.pack("<3d", self.next_at, self.share, self.halved_at)


def pace_client(client: Any, *, scale: float = 1.0) -> dict[str, Budget]:
    """Make every call of a botocore client wait for its place, its retries too; return the budgets by operation.

    Args:
        client: Client of `logs` or `sagemaker`.
        scale: What the limits are multiplied by, where nobody counts the calls.
    """
    service = client.meta.service_model.service_id.hyphenize()
    budgets = {}
    for operation, limit in LIMITS.items():
        if operation not in client.meta.service_model.operation_names:
            continue
        limit = Limit(limit.per_second * scale, round(limit.at_once * max(1.0, scale)))  # noqa: PLW2901 (scaled)
        budget = budgets[operation] = Budget(limit, _shared_file(client.meta.endpoint_url, operation))
        # Before it is signed: a signature is old after some minutes.
        client.meta.events.register(f"before-sign.{service}.{operation}", _wait_for(budget))
        client.meta.events.register(f"response-received.{service}.{operation}", _answer_to(budget))
        client.meta.events.register_first(f"needs-retry.{service}.{operation}", _retry_later(1 / scale))
    return budgets


def _wait_for(budget: Budget) -> Callable[..., None]:
    def wait(**_: Any) -> None:
        seconds = budget.take()
        if seconds > 0:
            time.sleep(seconds)

    return wait


def _answer_to(budget: Budget) -> Callable[..., None]:
    def take(*, parsed_response: Mapping[str, Any] | None, **_: Any) -> None:
        code = (parsed_response or {}).get("Error", {}).get("Code")
        if parsed_response is not None:
            budget.answered(throttled=code in _THROTTLED)

    return take


def _retry_later(scale: float) -> Callable[..., float | None]:
    """Return what makes botocore wait longer than its usual half second when AWS has refused: it has many clients."""

    def wait(*, response: tuple[Any, Mapping[str, Any]] | None, attempts: int, **_: Any) -> float | None:
        code = None if response is None else response[1].get("Error", {}).get("Code")
        if code not in _THROTTLED or attempts >= _THROTTLED_TRIES:
            return None  # botocore decides
        return _THROTTLED_SECONDS * 2.0 ** (attempts - 1) * (0.5 + random.random()) * scale  # noqa: S311 (no secret)

    return wait


def _shared_file(endpoint: str, operation: str) -> Path | None:
    """Return the file of a budget in a folder that is ours alone, or None where there can be none."""
    if not hasattr(os, "getuid"):
        return None
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"cloudtrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        return None
    place = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
    return folder / f"{operation}-{place}"
