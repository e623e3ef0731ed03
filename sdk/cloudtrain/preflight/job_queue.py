"""Check of the AWS Batch job queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.planning.service_job import SERVICE_JOB_TYPE
from cloudtrain.preflight.base import CheckContext, UnansweredError, command
from cloudtrain.support.checks import Check, failed, passed

_UNUSABLE_STATUSES = ("INVALID", "DELETING", "DELETED")
_CAPACITY_UNIT = "NUM_INSTANCES"


def check_queue(context: CheckContext) -> Iterator[Check]:
    """Check that the queue accepts this job and is large enough for it."""
    request = context.plan.queue
    if request is None:
        return
    name = str(request["jobQueue"])
    found = context.client("batch").describe_job_queues(jobQueues=[name])["jobQueues"]
    if not found:
        see = command("aws", "batch", "describe-job-queues", "--region", context.region)
        yield failed("queue", f"there is no job queue {name} in {context.region}", f"see: {see}")
        raise UnansweredError("needs a queue")
    yield _check_state(request, name, found[0])
    yield _check_capacity(context, name, found[0])


def _check_state(request: Mapping[str, Any], name: str, queue: Mapping[str, Any]) -> Check:
    kind = queue.get("jobQueueType")
    policy = queue.get("schedulingPolicyArn")
    if kind != SERVICE_JOB_TYPE:
        fix = f"use a queue that was created with --job-queue-type {SERVICE_JOB_TYPE}"
        return failed(
            "queue", f"{name} is of type {kind or 'unknown'} and accepts no training jobs", fix
        )
    if queue["state"] != "ENABLED" or queue.get("status") in _UNUSABLE_STATUSES:
        state = (
            f"{queue['state']}, {queue.get('status', '')} {queue.get('statusReason', '')}".rstrip(
                " ,"
            )
        )
        update = command(
            "aws", "batch", "update-job-queue", "--job-queue", name, "--state", "ENABLED"
        )
        return failed("queue", f"{name} accepts no jobs: {state}", update)
    short = name.rpartition("/")[2]
    has_share = "shareIdentifier" in request or "quotaShareName" in request
    if policy and not has_share:
        see = command("aws", "batch", "describe-scheduling-policies", "--arns", policy)
        fix = f"--set 'cluster.queue={{name: {name}, share: ...}}', or quota_share: ...; list the shares: {see}"
        return failed(
            "queue", f"{short} has a scheduling policy and accepts no job without a share", fix
        )
    if not policy and has_share:
        fix = f"--set cluster.queue={name}"
        return failed(
            "queue", f"{short} has no scheduling policy and accepts no job with a share", fix
        )
    if policy:
        return passed("queue", f"{short} accepts jobs, ordered by shares and priority")
    note = "; it ignores the priority" if "schedulingPriority" in request else ""
    return passed("queue", f"{short} accepts jobs, first in, first out{note}")


def _check_capacity(context: CheckContext, name: str, queue: Mapping[str, Any]) -> Check:
    """Check that the job is not too large for the queue: it would wait forever and block the jobs behind it."""
    wanted = context.plan.cluster.instances
    environments = [each["serviceEnvironment"] for each in queue.get("serviceEnvironmentOrder", ())]
    if not environments:
        raise UnansweredError("the queue has no service environment")
    answer = context.client("batch").describe_service_environments(serviceEnvironments=environments)
    limits = [
        limit for each in answer["serviceEnvironments"] for limit in each.get("capacityLimits", ())
    ]
    if not limits or any(limit.get("capacityUnit") != _CAPACITY_UNIT for limit in limits):
        raise UnansweredError("the queue counts its capacity by quota shares")
    capacity = max(int(limit["maxCapacity"]) for limit in limits)
    short = name.rpartition("/")[2]
    if wanted > capacity:
        fix = f"--instances {capacity}, or raise maxCapacity: aws batch update-service-environment"
        return failed(
            "queue capacity",
            f"{short} has capacity for {capacity} instances, the job needs {wanted}",
            fix,
        )
    return passed(
        "queue capacity", f"{short} has capacity for {capacity} instances, the job needs {wanted}"
    )
