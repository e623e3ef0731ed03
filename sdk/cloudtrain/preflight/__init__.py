"""Checks of the AWS account before a submit.

They find problems that SageMaker would report only after provisioning. All checks run at the same time. A check without
an answer from AWS is `unknown`, not a failure: only problems that are certain to fail the job stop a submit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from cloudtrain.planning.plan import Plan
from cloudtrain.preflight import account, budget, checkpoints, image, job_queue, network, quota, role, secrets, storage
from cloudtrain.preflight.account import Candidate, Candidates
from cloudtrain.preflight.base import ACTIONS, Check, CheckContext, CheckGroup, Result, start_thread, unknown
from cloudtrain.settings.settings import Settings

__all__ = [
    "ACTIONS",
    "DEADLINE_SECONDS",
    "Candidate",
    "Candidates",
    "Check",
    "PendingChecks",
    "Result",
    "start_checks",
]

DEADLINE_SECONDS = 15.0
"""Time limit of all checks together."""


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
    groups = [group for group in _check_groups(plan) if not only_checkpoints or group.names == ("checkpoints",)]
    return PendingChecks(CheckContext(plan, settings, session), groups, seconds)


def _check_groups(plan: Plan) -> Iterator[CheckGroup]:
    """Yield the checks of a plan, in the order in which they are reported."""
    is_kept_warm = bool(plan.request["ResourceConfig"].get("KeepAlivePeriodInSeconds"))
    yield CheckGroup(("identity",), account.check_identity)
    yield CheckGroup(("caller",), role.check_caller)
    yield CheckGroup(("role", "trust"), role.check_role)
    yield CheckGroup(("permissions",), role.check_permissions)
    yield CheckGroup(("bucket",), storage.check_bucket)
    yield CheckGroup(storage.data_check_names(plan), storage.check_data)
    if plan.config.secrets:
        yield CheckGroup(("secrets",), secrets.check_secrets)
    yield CheckGroup(("checkpoints",), checkpoints.check_checkpoints)
    yield CheckGroup(("quota", "warm pool") if is_kept_warm else ("quota",), quota.check_quotas)
    if plan.queue is not None:
        yield CheckGroup(("queue", "queue capacity"), job_queue.check_queue)
    if is_kept_warm:
        yield CheckGroup(("warm start",), quota.check_pools)
    yield CheckGroup(("image",), image.check_image)
    has_network = "VpcConfig" in plan.request
    yield CheckGroup(
        ("subnets", "security groups", "way to s3") if has_network else ("network",), network.check_network
    )
    yield CheckGroup(("budget",), budget.check_budget)


class PendingChecks:
    """Checks that are running."""

    def __init__(self, context: CheckContext, groups: Iterable[CheckGroup], seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._results = [(group, start_thread(partial(group.run, context))) for group in groups]

    def wait(self) -> tuple[Check, ...]:
        """Return every check; checks without an answer at the deadline are `unknown`."""
        checks: list[Check] = []
        for group, result in self._results:
            try:
                checks += result.result(timeout=max(0.0, self._deadline - time.monotonic()))
            except TimeoutError:
                timeout = f"did not answer in {self._seconds:g} s"
                checks += [unknown(name, timeout, "try again") for name in group.names]
        return tuple(checks)
