"""The AWS Batch job queue that the job would wait in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.planning.plan import Plan
from cloudtrain.planning.service_job import SERVICE_JOB_TYPE
from cloudtrain.preflight.base import (
    Check,
    CheckContext,
    UnansweredError,
    command,
    failed,
    passed,
)

_GONE = ("INVALID", "DELETING", "DELETED")
_UNIT = "NUM_INSTANCES"


def queue_check_names(plan: Plan) -> tuple[str, ...]:
    """Return the checks of a plan's queue: none without one."""
    return () if plan.queue is None else ("queue", "queue capacity")


def check_queue(context: CheckContext) -> Iterator[Check]:
    """Check that the queue takes this job, and that the job can ever leave it."""
    asked = context.plan.queue
    if asked is None:
        return
    name = str(asked["jobQueue"])
    found = context.client("batch").describe_job_queues(jobQueues=[name])["jobQueues"]
    if not found:
        see = command("aws", "batch", "describe-job-queues", "--region", context.region)
        yield failed("queue", f"there is no job queue {name} in {context.region}", f"see: {see}")
        raise UnansweredError("needs a queue")
    yield _judge(asked, name, found[0])
    yield _check_capacity(context, name, found[0])


def _judge(asked: Mapping[str, Any], name: str, queue: Mapping[str, Any]) -> Check:
    kind, policy = queue.get("jobQueueType"), queue.get("schedulingPolicyArn")
    if kind != SERVICE_JOB_TYPE:
        fix = f"use one that was made with --job-queue-type {SERVICE_JOB_TYPE}"
        return failed("queue", f"{name} is of type {kind or 'unknown'} and takes no training jobs", fix)
    if queue["state"] != "ENABLED" or queue.get("status") in _GONE:
        told = f"{queue['state']}, {queue.get('status', '')} {queue.get('statusReason', '')}".rstrip(" ,")
        update = command("aws", "batch", "update-job-queue", "--job-queue", name, "--state", "ENABLED")
        return failed("queue", f"{name} takes no jobs: {told}", update)
    short = name.rpartition("/")[2]
    if policy and "shareIdentifier" not in asked:
        see = command("aws", "batch", "describe-scheduling-policies", "--arns", policy)
        fix = f"--set 'cluster.queue={{name: {name}, share: ...}}'; which shares there are: {see}"
        return failed("queue", f"{short} has a scheduling policy and takes no job without a share", fix)
    if not policy and "shareIdentifier" in asked:
        fix = f"--set cluster.queue={name}"
        return failed("queue", f"{short} has no scheduling policy and takes no job with a share", fix)
    if policy:
        return passed("queue", f"{short} takes jobs, by shares and priority")
    useless = "; the priority does not count" if "schedulingPriority" in asked else ""
    return passed("queue", f"{short} takes jobs, first in, first out{useless}")


def _check_capacity(context: CheckContext, name: str, queue: Mapping[str, Any]) -> Check:
    """Check that the job is not too large for the queue: it would wait at its head for ever, and hold up the others."""
    wanted = context.plan.cluster.instances
    environments = [each["serviceEnvironment"] for each in queue.get("serviceEnvironmentOrder", ())]
    if not environments:
        raise UnansweredError("the queue has no service environment that could be asked")
    answer = context.client("batch").describe_service_environments(serviceEnvironments=environments)
    limits = [limit for each in answer["serviceEnvironments"] for limit in each.get("capacityLimits", ())]
    if not limits or any(limit.get("capacityUnit") != _UNIT for limit in limits):
        raise UnansweredError("the queue counts its capacity by quota shares")
    most = max(int(limit["maxCapacity"]) for limit in limits)
    short = name.rpartition("/")[2]
    if wanted > most:
        fix = f"--instances {most}, or raise maxCapacity: aws batch update-service-environment"
        return failed("queue capacity", f"{short} runs {most} instances at once, the job takes {wanted}", fix)
    return passed("queue capacity", f"{short} runs {most} instances at once, the job takes {wanted}")
