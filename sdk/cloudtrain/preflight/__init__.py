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
from cloudtrain.preflight.base import ACTIONS, Check, Context, Question, Result, unknown
from cloudtrain.settings.settings import Settings

__all__ = [
    "ACTIONS",
    "DEADLINE_SECONDS",
    "Candidate",
    "Candidates",
    "Check",
    "Pending",
    "Result",
    "check_resume",
    "run_checks",
    "start_checks",
]

DEADLINE_SECONDS = 15.0
"""Longest time that all checks together take."""


_CHECKPOINTS = Question(("checkpoints",), checkpoints.check_checkpoints)


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
) -> Pending:
    """Start asking, and return at once.

    Args:
        plan: A plan for SageMaker.
        settings: The account; complete.
        session: A boto3 session with credentials.
        seconds: What has not answered by then is `unknown`.
        only_checkpoints: Ask only whether the run can save where it will, and what it continues from.
    """
    asked = (_CHECKPOINTS,) if only_checkpoints else questions(plan)
    return Pending(Context(plan, settings, session), asked, seconds)


def check_resume(plan: Plan, settings: Settings, session: Any) -> tuple[Check, ...]:
    """Ask only whether there is something that the plan can go on from."""
    return start_checks(plan, settings, session, only_checkpoints=True).wait()


def questions(plan: Plan) -> tuple[Question, ...]:
    """Return what is asked, in the order in which it is told."""
    return (
        Question(("identity",), caller.check_identity),
        Question(("caller",), role.check_caller),
        Question(("role", "trust"), role.check_role),
        Question(("permissions",), role.check_permissions),
        Question(("bucket",), storage.check_bucket),
        Question(storage.names_of_data(plan), storage.check_data),
        *([Question(("secrets",), secrets.check_secrets)] if plan.config.secrets else []),
        _CHECKPOINTS,
        Question(quota.names_of_quotas(plan), quota.check_quotas),
        Question(job_queue.names_of_queue(plan), job_queue.check_queue),
        *([Question(pools, warm_pools.check_pools)] if (pools := warm_pools.names_of_pools(plan)) else []),
        Question(("image",), image.check_image),
        Question(network.names_of_network(plan), network.check_network),
        Question(("budget",), budget.check_budget),
    )


class Pending:
    """Questions that are being asked. Threads are daemons: one that hangs does not keep the command from ending."""

    def __init__(self, context: Context, asked: tuple[Question, ...], seconds: float) -> None:
        self._asked = asked
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._answers: queue.SimpleQueue[tuple[int, tuple[Check, ...]]] = queue.SimpleQueue()
        for index, question in enumerate(asked):
            threading.Thread(target=self._ask, args=(index, question, context), daemon=True).start()

    def _ask(self, index: int, question: Question, context: Context) -> None:
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
