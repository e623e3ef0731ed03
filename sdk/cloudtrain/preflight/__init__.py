"""Checks of the AWS account before a submit.

They find problems that SageMaker would report only after provisioning. All checks run at the same time. A check without
an answer from AWS is `unknown`, not a failure: only problems that are certain to fail the job stop a submit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cloudtrain.planning.plan import Plan
from cloudtrain.planning.tracking import MLFLOW_URI_VARIABLE, WANDB_MODE_VARIABLE
from cloudtrain.preflight import (
    account,
    checkpoints,
    endpoint,
    file_systems,
    image,
    job_queue,
    network,
    quota,
    rights,
    role,
    secrets,
    services,
    storage,
)
from cloudtrain.preflight.account import Candidate, Candidates
from cloudtrain.preflight.base import Account, CheckContext, CheckGroup, start_thread
from cloudtrain.settings.settings import Settings
from cloudtrain.support.checks import Check, Result, unknown

if TYPE_CHECKING:
    from boto3.session import Session

__all__ = [
    "DEADLINE_SECONDS",
    "Candidate",
    "Candidates",
    "Check",
    "PendingChecks",
    "Result",
    "start_checks",
    "start_endpoint_checks",
]

DEADLINE_SECONDS = 15.0
"""Time limit of all checks together."""

_CHECKPOINTS = ("checkpoints", "initial weights")


def start_checks(
    plan: Plan, settings: Settings, session: Session, *, only_checkpoints: bool = False
) -> PendingChecks:
    """Start the checks and return at once.

    Args:
        plan: A plan for SageMaker.
        settings: Complete settings of the account.
        session: A boto3 session with credentials.
        only_checkpoints: Check only the checkpoints: whether the run can save them, and what it starts from.
    """
    groups = [
        group
        for group in _check_groups(plan)
        if not only_checkpoints or group.names[0] in _CHECKPOINTS
    ]
    return PendingChecks(CheckContext(plan, settings, session), groups)


def start_endpoint_checks(
    requests: Mapping[str, Mapping[str, Any]], settings: Settings, session: Session
) -> PendingChecks:
    """Start the checks of an endpoint and return at once.

    Args:
        requests: The requests that create it, by operation.
        settings: Complete settings of the account.
        session: A boto3 session with credentials.
    """
    context = endpoint.EndpointContext(requests, settings, session)
    return PendingChecks(context, endpoint.endpoint_check_groups(context))


def _check_groups(plan: Plan) -> Iterator[CheckGroup]:
    """Yield the checks of a plan, in the order in which they are reported."""
    is_kept_warm = bool(plan.request["ResourceConfig"].get("KeepAlivePeriodInSeconds"))
    yield CheckGroup(("identity",), account.check_identity)
    yield CheckGroup(("clock",), account.check_clock)
    yield from _access_groups(plan)
    yield CheckGroup(("bucket",), storage.check_bucket)
    yield CheckGroup(storage.data_check_names(plan), storage.check_data)
    for channel in file_systems.mounted_channels(plan):
        yield CheckGroup(
            (f"data.{channel['ChannelName']}",), partial(file_systems.check_file_system, channel)
        )
    if plan.config.secrets:
        yield CheckGroup(("secrets",), secrets.check_secrets)
    yield CheckGroup(("checkpoints",), checkpoints.check_checkpoints)
    if plan.config.train is not None and plan.config.train.init_from is not None:
        yield CheckGroup(("initial weights",), checkpoints.check_initial_weights)
    warm_pool = ("warm pool",) if is_kept_warm else ()
    yield CheckGroup(("quota", "job quotas", *warm_pool), quota.check_quotas)
    if quota.has_training_plan(plan):
        yield CheckGroup(("training plan",), quota.check_training_plan)
    if plan.queue is not None:
        yield CheckGroup(("queue", "queue capacity"), job_queue.check_queue)
    if is_kept_warm:
        yield CheckGroup(("warm start",), quota.check_pools)
    yield CheckGroup(("image",), image.check_image)
    has_vpc = "VpcConfig" in plan.request
    names = ("subnets", "security groups", "way to s3") if has_vpc else ("network",)
    to_pypi = ("way to pypi",) if network.needs_way_to_pypi(plan) else ()
    yield CheckGroup((*names, *to_pypi), network.check_network)
    if MLFLOW_URI_VARIABLE in plan.request.get("Environment", {}):
        yield CheckGroup(("tracking",), services.check_tracking)
    if plan.request.get("Environment", {}).get(WANDB_MODE_VARIABLE) == "online":
        yield CheckGroup(("wandb",), services.check_wandb)
    yield CheckGroup(("budget",), services.check_budget)
    if services.topic_of(plan) is not None:
        yield CheckGroup(("notify",), services.check_notify)


def _access_groups(plan: Plan) -> Iterator[CheckGroup]:
    """Yield the checks of what the caller and the role are allowed to do."""
    yield CheckGroup(("caller",), role.check_caller)
    yield CheckGroup(("role", "trust"), role.check_role)
    yield CheckGroup(("permissions",), role.check_permissions)
    if "MlflowConfig" in plan.request:
        yield CheckGroup(("mlflow",), role.check_mlflow)
    if rights.allows_shell(plan):
        yield CheckGroup(("remote debugging",), role.check_shell)


class PendingChecks:
    """Checks that are running."""

    def __init__(self, context: Account, groups: Iterable[CheckGroup]) -> None:
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._results = [(group, start_thread(partial(group.run, context))) for group in groups]

    def wait(self) -> tuple[Check, ...]:
        """Return every check; checks without an answer at the deadline are `unknown`."""
        checks: list[Check] = []
        for group, result in self._results:
            try:
                checks += result.result(timeout=max(0.0, self._deadline - time.monotonic()))
            except TimeoutError:
                timeout = f"did not answer in {DEADLINE_SECONDS:g} s"
                checks += [unknown(name, timeout, "try again") for name in group.names]
        return tuple(checks)
