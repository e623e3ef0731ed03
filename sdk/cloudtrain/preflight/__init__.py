"""Checks of the AWS account before a submit: `run_checks`.

They find problems that SageMaker would report only after provisioning. All checks run at the same time. A check without
an answer from AWS is `unknown`, not a failure: only problems that are certain to fail the job stop a submit.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from cloudtrain.planning.plan import Plan
from cloudtrain.preflight import (
    budget,
    caller,
    checkpoints,
    image,
    job_queue,
    network,
    quota,
    role,
    secrets,
    storage,
    warm_pools,
)
from cloudtrain.preflight.account import Candidate, Candidates
from cloudtrain.preflight.base import (
    ACTIONS,
    Check,
    CheckContext,
    CheckGroup,
    Result,
    unknown,
)
from cloudtrain.settings.settings import Settings

__all__ = [
    "ACTIONS",
    "DEADLINE_SECONDS",
    "Candidate",
    "Candidates",
    "Check",
    "PendingChecks",
    "Result",
    "run_checks",
    "start_checks",
]

DEADLINE_SECONDS = 15.0
"""Time limit of all checks together."""


_CHECKPOINTS = CheckGroup(("checkpoints",), checkpoints.check_checkpoints)


def run_checks(plan: Plan, settings: Settings, session: Any, *, seconds: float = DEADLINE_SECONDS) -> tuple[Check, ...]:
    """Run every check that a plan needs.

    Args:
        plan: A plan for SageMaker.
        settings: Complete settings of the account.
        session: A boto3 session with credentials.
        seconds: Time limit; checks without an answer by then are `unknown`.
    """
    return start_checks(plan, settings, session, seconds=seconds).wait()


def start_checks(
    plan: Plan, settings: Settings, session: Any, *, seconds: float = DEADLINE_SECONDS, only_checkpoints: bool = False
) -> PendingChecks:
    """Start the checks and return at once.

    Args:
        plan: A plan for SageMaker.
        settings: Complete settings of the account.
        session: A boto3 session with credentials.
        seconds: Time limit; checks without an answer by then are `unknown`.
        only_checkpoints: Check only the checkpoints: whether the run can save them, and what it resumes from.
    """
    groups = (_CHECKPOINTS,) if only_checkpoints else check_groups(plan)
    return PendingChecks(CheckContext(plan, settings, session), groups, seconds)


def check_groups(plan: Plan) -> tuple[CheckGroup, ...]:
    """Return the checks of a plan, in the order in which they are reported."""
    return (
        CheckGroup(("identity",), caller.check_identity),
        CheckGroup(("caller",), role.check_caller),
        CheckGroup(("role", "trust"), role.check_role),
        CheckGroup(("permissions",), role.check_permissions),
        CheckGroup(("bucket",), storage.check_bucket),
        CheckGroup(storage.data_check_names(plan), storage.check_data),
        *([CheckGroup(("secrets",), secrets.check_secrets)] if plan.config.secrets else []),
        _CHECKPOINTS,
        CheckGroup(quota.quota_check_names(plan), quota.check_quotas),
        CheckGroup(job_queue.queue_check_names(plan), job_queue.check_queue),
        *([CheckGroup(pools, warm_pools.check_pools)] if (pools := warm_pools.warm_pool_check_names(plan)) else []),
        CheckGroup(("image",), image.check_image),
        CheckGroup(network.network_check_names(plan), network.check_network),
        CheckGroup(("budget",), budget.check_budget),
    )


class PendingChecks:
    """Checks that are running. Their threads are daemons, so that a hanging call does not block the command's exit."""

    def __init__(self, context: CheckContext, groups: tuple[CheckGroup, ...], seconds: float) -> None:
        self._groups = groups
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._results: queue.SimpleQueue[tuple[int, tuple[Check, ...]]] = queue.SimpleQueue()
        for index, group in enumerate(groups):
            threading.Thread(target=self._run, args=(index, group, context), daemon=True).start()

    def _run(self, index: int, group: CheckGroup, context: CheckContext) -> None:
        self._results.put((index, group.run(context)))

    def wait(self) -> tuple[Check, ...]:
        """Return every check; checks without an answer at the deadline are `unknown`."""
        results: dict[int, tuple[Check, ...]] = {}
        while len(results) < len(self._groups):
            try:
                index, checks = self._results.get(timeout=max(0.0, self._deadline - time.monotonic()))
            except queue.Empty:
                break
            results[index] = checks
        timeout = f"did not answer in {self._seconds:g} s"
        return tuple(
            check
            for index, group in enumerate(self._groups)
            for check in results.get(index, tuple(unknown(name, timeout, "try again") for name in group.names))
        )
