"""Waiting for capacity: which failures are retried, and when."""

from __future__ import annotations

import re

from cloudtrain.runs.status import State, Status

FIRST_PAUSE_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 900.0
_NO_CAPACITY = re.compile(
    r"CapacityError|InsufficientCapacity|insufficient capacity|ResourceLimitExceeded", re.IGNORECASE
)


def lacks_capacity(status: Status) -> bool:
    """Return whether a run has failed because AWS had no instances for it. Such a run costs nothing.

    FailureReason is the service's: `CapacityError: Unable to provision requested ML compute capacity.` (API reference
    of DescribeTrainingJob; a failure of the user's code begins with AlgorithmError or ClientError).
    """
    return status.state is State.FAILED and status.started is None and _NO_CAPACITY.search(status.reason) is not None
