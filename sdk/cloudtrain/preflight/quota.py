"""Checks of the instances that a job can get: quotas and their use, training plans, and warm pools to reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from cloudtrain.job.sections.cluster import Choice
from cloudtrain.planning.plan import Plan
from cloudtrain.planning.warm_pool import (
    AVAILABLE,
    SEARCH_WINDOW_SECONDS,
    describe_start,
    differences,
)
from cloudtrain.preflight.base import Account, CheckContext, command, map_concurrently
from cloudtrain.support.checks import Check, failed, passed, unknown, worst

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

_ON_DEMAND = "training job usage"
_SPOT = "spot training job usage"
_WARM_POOL = "training warm pool usage"
# Quota names are `<type> for <kind>`, as in CreateTrainingJob's ResourceLimitExceeded errors.

_LONGEST_RUN = "Longest run time for a training job"
_INSTANCES_PER_JOB = "Maximum number of instances per training job"
_INSTANCES_PER_SPOT_JOB = "Maximum number of instances per spot training job"
_ALL_INSTANCES = "Number of instances across all training jobs"
# As Service Quotas listed them in 2025-11 (codes L-33A961FD, L-622CFD70 and L-00C91CB5); found by name, not by code.

_PLAN_NAME = "training plan"
_PLAN_STATUSES = ("Active", "Scheduled")
_PLAN_TARGET = "training-job"

_MAX_JOBS = 50
"""Most jobs whose instances are counted; with more jobs the count is a lower bound."""

_MAX_POOLS = 20


_Counted = TypeVar("_Counted")
_Use = dict[tuple[str, bool], list[tuple[str, int]]]
"""Jobs and their numbers of instances in use, by (type, is spot)."""


@dataclass(frozen=True)
class Quota:
    """One quota of the account. `code` is its code in Service Quotas."""

    name: str
    code: str
    value: int


def check_quotas(context: CheckContext) -> Iterator[Check]:
    """Check the quota of each type, and of warm pools if the cluster is kept warm."""
    plan = context.plan
    is_spot = bool(plan.request.get("EnableManagedSpotTraining"))
    kind = _SPOT if is_spot else _ON_DEMAND
    is_kept_warm = bool(plan.request["ResourceConfig"].get("KeepAlivePeriodInSeconds"))
    kinds = (kind, _WARM_POOL) if is_kept_warm else (kind,)
    # The instances of a training plan are reserved, and have quotas of their own.
    choices = [choice for choice in context.choices if choice.training_plan is None]
    wanted = {_quota_name(choice.instance_type, each) for choice in choices for each in kinds}
    if is_spot:
        wanted |= {_LONGEST_RUN, _INSTANCES_PER_SPOT_JOB}
    else:
        wanted |= {_LONGEST_RUN, _INSTANCES_PER_JOB, _ALL_INSTANCES}
    quotas, use = look_up(context, wanted, lambda: _count_use(context))
    checks = [
        _check_type(context, choice, kind, quotas, use, is_spot=is_spot) for choice in choices
    ]
    # With preferences, AWS rejects the job unless the quota of every type covers it.
    # Source: AWS's guide, "Instance preference lists for training jobs", Service quotas.
    reserved = passed("quota", "the training plan has reserved the instances")
    yield worst(checks or [reserved])
    yield _check_job_quotas(context, quotas, use, is_spot=is_spot)
    if not is_kept_warm:
        return
    if choices:
        yield _check_warm_pool(context, quotas)
    else:
        yield passed("warm pool", reserved.detail)


def _quota_name(instance_type: str, kind: str) -> str:
    return f"{instance_type} for {kind}"


def look_up(
    context: Account, wanted: set[str], count_use: Callable[[], _Counted]
) -> tuple[Mapping[str, Quota], _Counted | None]:
    """Return the quotas with these names, and what counts their use; None if AWS does not answer that."""
    calls: list[Callable[[], Any]] = [
        lambda: _find(context, "list_service_quotas", wanted),
        # Some accounts list a quota only after it was changed; the default covers the others.
        lambda: _optional(lambda: _find(context, "list_aws_default_service_quotas", wanted)),
        lambda: _optional(count_use),
    ]
    quotas, defaults, use = map_concurrently(lambda call: call(), calls)
    return {**(defaults or {}), **quotas}, use


def _find(context: Account, operation: str, wanted: set[str]) -> dict[str, Quota]:
    """Return the quotas with these names. SageMaker has thousands, so reading stops when all are found."""
    found: dict[str, Quota] = {}
    pages = context.client("service-quotas").get_paginator(operation)
    for page in pages.paginate(ServiceCode="sagemaker", PaginationConfig={"PageSize": 100}):
        for quota in page["Quotas"]:
            if quota["QuotaName"] in wanted:
                found[quota["QuotaName"]] = Quota(
                    quota["QuotaName"], quota["QuotaCode"], int(quota["Value"])
                )
        if len(found) == len(wanted):
            break
    return found


def _optional(call: Callable[[], Any]) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except (ClientError, BotoCoreError):
        return None


def _count_use(context: CheckContext) -> _Use:
    """Count the instances of running and stopping jobs and of warm pools, which count towards the same quota.

    A pool that the job will reuse does not count, because the job then needs no other instances.
    """
    sagemaker = context.client("sagemaker")
    # StatusEquals filters only the jobs of one page, and by default the oldest jobs come first.
    newest: Any = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 100}
    calls: list[Callable[[], Any]] = [
        lambda: sagemaker.list_training_jobs(StatusEquals="InProgress", **newest)[
            "TrainingJobSummaries"
        ],
        lambda: sagemaker.list_training_jobs(StatusEquals="Stopping", **newest)[
            "TrainingJobSummaries"
        ],
        lambda: _find_available_pools(sagemaker, datetime.now(UTC)),
    ]
    running, stopping, available = map_concurrently(lambda call: call(), calls)
    names = sorted({job["TrainingJobName"] for job in (*running, *stopping)})[:_MAX_JOBS]
    pools = sorted(available, key=lambda pool: bool(differences(pool, context.plan.request)))
    is_reused = bool(pools) and not differences(pools[0], context.plan.request)
    use: _Use = {}
    for job in (*_describe_jobs(sagemaker, names), *pools[is_reused:]):
        for instance_type, count in _instances_of(job["ResourceConfig"]):
            key = (instance_type, bool(job.get("EnableManagedSpotTraining")))
            use.setdefault(key, []).append((job["TrainingJobName"], count))
    return use


def _instances_of(resources: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for group in resources.get("InstanceGroups") or [resources]:
        name = group.get("SelectedInstanceType") or group.get("InstanceType")
        # A job with preferences has no instances before one type is selected.
        if name:
            yield (
                str(name),
                int(group.get("SelectedInstanceCount") or group.get("InstanceCount") or 0),
            )


def _check_type(
    context: CheckContext,
    choice: Choice,
    kind: str,
    quotas: Mapping[str, Quota],
    use: _Use | None,
    *,
    is_spot: bool,
) -> Check:
    name = _quota_name(choice.instance_type, kind)
    wanted = choice.instances
    quota = quotas.get(name)
    if quota is None:
        return unlisted(context, name)
    if quota.value < wanted:
        detail = f"{name}: {quota.value} in {context.region}, the job needs {wanted}"
        return failed("quota", detail, increase(context, quota, wanted))
    if use is None:
        return passed(
            "quota",
            f"{name}: {quota.value}, the job needs {wanted}; the instances in use could not be counted",
        )
    jobs = use.get((choice.instance_type, is_spot), [])
    used = sum(count for _, count in jobs)
    detail = f"{name}: {used} of {quota.value} in use, the job needs {wanted}"
    if used + wanted <= quota.value:
        return passed("quota", detail)
    # SageMaker does not queue such a job, but rejects it with ResourceLimitExceeded.
    first = jobs[0][0]
    stop = command(
        "aws",
        "sagemaker",
        "stop-training-job",
        "--training-job-name",
        first,
        "--region",
        context.region,
    )
    others = f" (or another of {len(jobs)})" if len(jobs) > 1 else ""
    more = increase(context, quota, used + wanted)
    return failed(
        "quota", detail, f"wait for {first}{others} or stop it: {stop}; or request more: {more}"
    )


def _check_job_quotas(
    context: CheckContext, quotas: Mapping[str, Quota], use: _Use | None, *, is_spot: bool
) -> Check:
    """Check the quotas that hold for a job of any type, such as its run time, which is 5 days by default."""
    name = "job quotas"
    wanted = context.plan.cluster.instances
    per_job = _INSTANCES_PER_SPOT_JOB if is_spot else _INSTANCES_PER_JOB
    runtime = int(context.plan.request["StoppingCondition"]["MaxRuntimeInSeconds"])
    needs = {_LONGEST_RUN: (runtime, "s"), per_job: (wanted, "instances")}
    if not is_spot:
        used = sum(
            count for (_, spot), jobs in (use or {}).items() if not spot for _, count in jobs
        )
        needs[_ALL_INSTANCES] = (used + wanted, "instances with those in use")
    known = [(quotas[each], *need) for each, need in needs.items() if each in quotas]
    lines = [f"{quota.name}: {quota.value}, needed {need} {unit}" for quota, need, unit in known]
    for (quota, need, _), line in zip(known, lines, strict=True):
        if need > quota.value:
            fix = increase(context, quota, need)
            if quota.name == _LONGEST_RUN:
                fix += f"; or --set limits.runtime={quota.value}s"
            return failed(name, line, fix)
    missing = [each for each in needs if each not in quotas]
    if missing:
        console = f"Service Quotas console, {context.region}, Amazon SageMaker AI"
        return unknown(
            name, f"Service Quotas has no quota {', '.join(map(repr, missing))}", console
        )
    return passed(name, "; ".join(lines))


def unlisted(context: Account, name: str) -> Check:
    """Return the check of a quota that Service Quotas does not list."""
    console = f"Service Quotas console, {context.region}, Amazon SageMaker AI: search for {name!r}"
    return unknown("quota", f"Service Quotas has no quota {name!r} in {context.region}", console)


def increase(context: Account, quota: Quota, value: int) -> str:
    """Return the command that asks AWS for a higher quota."""
    return command(
        *("aws", "service-quotas", "request-service-quota-increase", "--service-code", "sagemaker"),
        *("--quota-code", quota.code, "--desired-value", value, "--region", context.region),
    )


def _check_warm_pool(context: CheckContext, quotas: Mapping[str, Quota]) -> Check:
    """Check the quota of warm pools. Without it the job runs, but its cluster is not kept warm."""
    wanted = context.most_instances
    found = [
        quotas[name]
        for each in context.instance_types
        if (name := _quota_name(each, _WARM_POOL)) in quotas
    ]
    if not found:
        return unknown(
            "warm pool",
            f"Service Quotas has no warm pool quota of {', '.join(context.instance_types)}",
        )
    best = max(found, key=lambda quota: quota.value)
    detail = f"{best.name}: {best.value}, the job needs {wanted}"
    if best.value >= wanted:
        return passed("warm pool", detail)
    fix = f"{increase(context, best, wanted)}; or --set cluster.keep_alive=null"
    return failed("warm pool", f"{detail}: the cluster would not be kept warm", fix)


def check_pools(context: CheckContext) -> Iterator[Check]:
    """Report whether the job would start in a warm pool. A cold start is no failure."""
    now = datetime.now(UTC)
    jobs = _find_available_pools(context.client("sagemaker"), now)
    yield passed("warm start", describe_start(jobs, context.plan.request, now), is_shown=True)


def _find_available_pools(client: SageMakerClient, now: datetime) -> list[Mapping[str, Any]]:
    pages = client.get_paginator("list_training_jobs").paginate(
        WarmPoolStatusEquals=AVAILABLE,
        LastModifiedTimeAfter=now - timedelta(seconds=SEARCH_WINDOW_SECONDS),
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"PageSize": 100, "MaxItems": _MAX_POOLS},
    )
    # Filter by status here, too, because servers without this filter list every job.
    names = [
        str(job["TrainingJobName"])
        for page in pages
        for job in page["TrainingJobSummaries"]
        if job.get("WarmPoolStatus", {}).get("Status") == AVAILABLE
    ]
    return _describe_jobs(client, names)


def _describe_jobs(client: SageMakerClient, names: Iterable[str]) -> list[Mapping[str, Any]]:
    return map_concurrently(lambda name: client.describe_training_job(TrainingJobName=name), names)


def has_training_plan(plan: Plan) -> bool:
    """Return whether a plan's job may use instances of a training plan."""
    resources = plan.request["ResourceConfig"]
    places = (resources, *resources.get("InstancePreferences", ()))
    return any("TrainingPlanArn" in each or "TrainingPlanArns" in each for each in places)


def check_training_plan(context: CheckContext) -> Iterator[Check]:
    """Check status, time, instance type and number of instances of each training plan; yield the worst result."""
    wanted = [choice for choice in context.choices if choice.training_plan is not None]
    yield worst(map_concurrently(lambda choice: _check_plan(context, choice), wanted))


def _check_plan(context: CheckContext, choice: Choice) -> Check:
    arn = str(choice.training_plan)
    name = arn.rpartition("/")[2]
    see = command("aws", "sagemaker", "list-training-plans", "--region", context.region)
    plan = context.training_plan(arn)
    if plan is None:
        return failed(
            _PLAN_NAME, f"there is no training plan {name} in {context.region}", f"list them: {see}"
        )
    if plan["Status"] not in _PLAN_STATUSES:
        return failed(
            _PLAN_NAME, f"{name} is {plan['Status']}", f"use an active or scheduled one: {see}"
        )
    if _PLAN_TARGET not in plan.get("TargetResources", [_PLAN_TARGET]):
        targets = ", ".join(plan["TargetResources"])
        return failed(
            _PLAN_NAME,
            f"{name} is for {targets}, not for training jobs",
            f"use one for {_PLAN_TARGET}: {see}",
        )
    reserved: dict[str, int] = {}
    for each in plan.get("ReservedCapacitySummaries", ()):
        # The blocks of one type follow each other in time, so that their counts do not add up.
        kind = str(each["InstanceType"])
        reserved[kind] = max(reserved.get(kind, 0), int(each["TotalInstanceCount"]))
    if reserved.get(choice.instance_type, 0) < choice.instances:
        has = (
            ", ".join(f"{count} x {kind}" for kind, count in sorted(reserved.items()))
            or "no instances"
        )
        detail = f"{name} has {has}, the job needs {choice.instances} x {choice.instance_type}"
        return failed(
            _PLAN_NAME, detail, "use a type and a number that the plan has, or another plan"
        )
    return _check_plan_time(context, name, plan, choice)


def _check_plan_time(
    context: CheckContext, name: str, plan: Mapping[str, Any], choice: Choice
) -> Check:
    """Check that the job can start and reach its time limit within the plan's time."""
    now = datetime.now(UTC)
    runtime = timedelta(seconds=context.plan.max_runtime_seconds)
    start = plan.get("StartTime")
    end = plan.get("EndTime")
    begin = max(now, start) if start is not None else now
    if end is not None and end <= now:
        return failed(_PLAN_NAME, f"{name} ended at {_time(end)}", "use another training plan")
    detail = f"{name} has {choice.instances} x {choice.instance_type}"
    detail += f" until {_time(end)}" if end is not None else ""
    if end is not None and begin + runtime > end:
        hours = max(0.0, (end - begin).total_seconds() / 3600)
        warning = f"{name} ends at {_time(end)}, {hours:.1f} hours after the earliest start and before limits.runtime"
        return passed(
            _PLAN_NAME,
            detail,
            warning=f"{warning}: the run is stopped then, and can be resumed elsewhere",
        )
    if start is not None and start > now:
        return passed(
            _PLAN_NAME,
            f"{detail}; the job waits until {_time(start)}, when it starts",
            is_shown=True,
        )
    free = plan.get("AvailableInstanceCount")
    if free is not None and int(free) < choice.instances:
        return passed(
            _PLAN_NAME,
            detail,
            warning=f"{name} has {free} free instances now: the job waits for the others",
        )
    return passed(_PLAN_NAME, detail)


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
