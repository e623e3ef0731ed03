"""Check of the training plans whose reserved instances a job uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudtrain.job.sections.cluster import Choice
from cloudtrain.planning.plan import Plan
from cloudtrain.preflight.base import Check, CheckContext, command, failed, find, map_concurrently, passed, worst

_NAME = "training plan"
_USABLE = ("Active", "Scheduled")
_TARGET = "training-job"
_MISSING_CODES = ("ResourceNotFound", "ValidationException")


def has_training_plan(plan: Plan) -> bool:
    """Return whether a plan's job may use instances of a training plan."""
    resources = plan.request["ResourceConfig"]
    places = (resources, *resources.get("InstancePreferences", ()))
    return any("TrainingPlanArn" in each or "TrainingPlanArns" in each for each in places)


def check_training_plan(context: CheckContext) -> Iterator[Check]:
    """Check status, time, instance type and number of instances of each training plan; yield the worst result."""
    wanted = [choice for choice in context.choices if choice.training_plan is not None]
    yield worst(map_concurrently(lambda choice: _check(context, choice), wanted))


def _check(context: CheckContext, choice: Choice) -> Check:
    arn = str(choice.training_plan)
    name, see = arn.rpartition("/")[2], command("aws", "sagemaker", "list-training-plans", "--region", context.region)
    plan = find(_MISSING_CODES, context.client("sagemaker").describe_training_plan, TrainingPlanName=arn)
    if plan is None:
        return failed(_NAME, f"there is no training plan {name} in {context.region}", f"list them: {see}")
    if plan["Status"] not in _USABLE:
        return failed(_NAME, f"{name} is {plan['Status']}", f"use an active or scheduled one: {see}")
    if _TARGET not in plan.get("TargetResources", [_TARGET]):
        targets = ", ".join(plan["TargetResources"])
        return failed(_NAME, f"{name} is for {targets}, not for training jobs", f"use one for {_TARGET}: {see}")
    reserved: dict[str, int] = {}
    for each in plan.get("ReservedCapacitySummaries", ()):
        # The blocks of one type follow each other in time, so that their counts do not add up.
        kind = str(each["InstanceType"])
        reserved[kind] = max(reserved.get(kind, 0), int(each["TotalInstanceCount"]))
    if reserved.get(choice.instance_type, 0) < choice.instances:
        has = ", ".join(f"{count} x {kind}" for kind, count in sorted(reserved.items())) or "no instances"
        detail = f"{name} has {has}, the job needs {choice.instances} x {choice.instance_type}"
        return failed(_NAME, detail, "use a type and a number that the plan has, or another plan")
    return _check_time(context, name, plan, choice)


def _check_time(context: CheckContext, name: str, plan: Mapping[str, Any], choice: Choice) -> Check:
    """Check that the job can start and reach its time limit within the plan's time."""
    now, runtime = datetime.now(UTC), timedelta(seconds=context.plan.max_runtime_seconds)
    start, end = plan.get("StartTime"), plan.get("EndTime")
    begin = max(now, start) if start is not None else now
    if end is not None and end <= now:
        return failed(_NAME, f"{name} ended at {_time(end)}", "use another training plan")
    detail = f"{name} has {choice.instances} x {choice.instance_type}"
    detail += f" until {_time(end)}" if end is not None else ""
    if end is not None and begin + runtime > end:
        hours = max(0.0, (end - begin).total_seconds() / 3600)
        warning = f"{name} ends at {_time(end)}, {hours:.1f} hours after the earliest start and before limits.runtime"
        return passed(_NAME, detail, warning=f"{warning}: the run is stopped then, and can be resumed elsewhere")
    if start is not None and start > now:
        return passed(_NAME, f"{detail}; the job waits until {_time(start)}, when it starts", is_shown=True)
    free = plan.get("AvailableInstanceCount")
    if free is not None and int(free) < choice.instances:
        return passed(_NAME, detail, warning=f"{name} has {free} free instances now: the job waits for the others")
    return passed(_NAME, detail)


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
