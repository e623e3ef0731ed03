"""Waiting for capacity: what is worth trying again, and when."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cloudtrain.run import State, Status

FIRST_PAUSE_SECONDS = 60.0
_LONGEST_SECONDS = 900.0
_LACK = re.compile(r"CapacityError|InsufficientCapacity|insufficient capacity|ResourceLimitExceeded", re.IGNORECASE)


def lacks_capacity(status: Status) -> bool:
    """Whether a run has failed because there were no instances for it; nothing of it has run, and nothing was paid.

    FailureReason is the service's: `CapacityError: Unable to provision requested ML compute capacity.` (API reference
    of DescribeTrainingJob; a failure of the user's code says AlgorithmError or ClientError).
    """
    return status.state is State.FAILED and status.started is None and _LACK.search(status.reason) is not None


def pauses(seconds: float, *, first: float = FIRST_PAUSE_SECONDS) -> Iterator[float]:
    """Yield how long to wait before each further try, in seconds: doubling to a quarter of an hour.

    Args:
        seconds: How long to wait in all; the last pause is cut to it.
        first: The first pause.
    """
    pause = first
    while seconds > 0:
        yield min(pause, seconds)
        seconds -= pause
        pause = min(2 * pause, _LONGEST_SECONDS)
