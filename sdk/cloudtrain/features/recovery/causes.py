"""Why an attempt has ended, as `limits.recover.on` names it."""

from __future__ import annotations

from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.failure_rules.explanation import Explanation
from cloudtrain.job.recover_causes import RecoverCause
from cloudtrain.runs.early_end import OUTSIDE_STOP
from cloudtrain.runs.status import State, Status

_CAUSES: dict[FailureClass, RecoverCause] = {
    FailureClass.CAPACITY: "capacity",
    FailureClass.QUOTA: "capacity",
    FailureClass.SPOT: "interruption",
    FailureClass.MACHINE: "interruption",
    FailureClass.TIME_LIMIT: "time_limit",
    FailureClass.KILLED: "infrastructure",
    FailureClass.NCCL: "infrastructure",
    FailureClass.SERVICE: "infrastructure",
}
"""What another attempt can help against. A hang and a failure of the job's code come again."""


def find_cause(status: Status, explained: Explanation) -> RecoverCause | None:
    """Return the cause of an end that another attempt may help against, or None.

    Args:
        status: The status of a run that has ended.
        explained: Why it has ended.
    """
    if status.state is State.SUCCEEDED:
        return None
    if status.reason.startswith(OUTSIDE_STOP):
        return "interruption"
    if explained.failure is None:
        return None
    return _CAUSES.get(explained.failure)
