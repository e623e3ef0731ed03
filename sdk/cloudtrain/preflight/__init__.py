"""What SageMaker would report after provisioning, asked before: `run_checks`.

Every check is a question to the account; all are asked at the same time. A check that AWS does not answer is `unknown`,
never a failure: only what is certain to fail stops a submit.
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
    "check_resume",
    "run_checks",
    "start_checks",
]

DEADLINE_SECONDS = 15.0
"""Longest time that all checks together take."""


_CHECKPOINTS = CheckGroup(("checkpoints",), checkpoints.check_checkpoints)


def run_checks(plan: Plan, settings: Settings, session: Any, *, seconds: float = DEADLINE_SECONDS) -> tuple[Check, ...]:
    """Ask the account everything that a plan needs of it.

    Args:
        plan: A plan for SageMaker.
        settings: The account; complete.
        session: A boto3 session with credentials.
        seconds: What has not answered by then is `unknown`.
    """
    return start_checks(plan, settings, session, seconds=seconds).wait()


def start_checks(
    plan: Plan, settings: Settings, session: Any, *, seconds: float = DEADLINE_SECONDS, only_checkpoints: bool = False
) -> PendingChecks:
    """Start asking, and return at once.

    Args:
        plan: A plan for SageMaker.
        settings: The account; complete.
        session: A boto3 session with credentials.
        seconds: What has not answered by then is `unknown`.
        only_checkpoints: Ask only whether the run can save where it will, and what it continues from.
    """
    asked = (_CHECKPOINTS,) if only_checkpoints else check_groups(plan)
    return PendingChecks(CheckContext(plan, settings, session), asked, seconds)


def check_resume(plan: Plan, settings: Settings, session: Any) -> tuple[Check, ...]:
    """Ask only whether there is something that the plan can go on from."""
    return start_checks(plan, settings, session, only_checkpoints=True).wait()


def check_groups(plan: Plan) -> tuple[CheckGroup, ...]:
    """Return what is asked, in the order in which it is told."""
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
    """Questions that are being asked. Threads are daemons: one that hangs does not keep the command from ending."""

    def __init__(self, context: CheckContext, asked: tuple[CheckGroup, ...], seconds: float) -> None:
        self._asked = asked
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._answers: queue.SimpleQueue[tuple[int, tuple[Check, ...]]] = queue.SimpleQueue()
        for index, question in enumerate(asked):
            threading.Thread(target=self._ask, args=(index, question, context), daemon=True).start()

    def _ask(self, index: int, question: CheckGroup, context: CheckContext) -> None:
        self._answers.put((index, question.answer(context)))

    def wait(self) -> tuple[Check, ...]:
        """Return every check; what has not answered when the time is over is `unknown`."""
        answers: dict[int, tuple[Check, ...]] = {}
        while len(answers) < len(self._asked):
            try:
                index, checks = self._answers.get(timeout=max(0.0, self._ends - time.monotonic()))
            except queue.Empty:
                break
            answers[index] = checks
        late = f"did not answer in {self._seconds:g} s"
        return tuple(
            check
            for index, question in enumerate(self._asked)
            for check in answers.get(index, tuple(unknown(name, late, "ask again") for name in question.names))
        )
