"""Lists of training jobs, fetched lazily and with as few calls as possible."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from cloudtrain.aws.errors import aws_errors
from cloudtrain.backends.sagemaker.job_states import (
    ACTIVE_STATES,
    FINAL_STATES,
    map_state,
    read_reason,
)
from cloudtrain.planning.warm_pool import read_pool
from cloudtrain.runs.run_filter import RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.support.run_id import is_run_id
from cloudtrain_runtime.contract.aws_codes import DENIED

if TYPE_CHECKING:
    from types_boto3_sagemaker import SageMakerClient

_PAGE = 100
"""Largest page of ListTrainingJobs and Search (botocore's model, MaxResults)."""

# From botocore's model: NameContains.
_NAME = re.compile(r"[a-zA-Z0-9\-]{1,63}")
_HINTS = dict.fromkeys(
    DENIED,
    "allow sagemaker:ListTrainingJobs, and sagemaker:Search for --tag, to these credentials",
)


def list_jobs(client: SageMakerClient, wanted: RunFilter, backend: str) -> Iterator[Status]:
    """Yield the selected jobs that cloudtrain submitted, newest first.

    With tags, it uses Search: ListTrainingJobs has no tags, reading them takes a call per job, and GetResources of the
    tagging API does not sort. Without tags it uses ListTrainingJobs, because Search needs a separate permission and
    reads an index that lags behind.
    """
    if wanted.name and not _NAME.fullmatch(wanted.name):
        return
    for job in _search(client, wanted) if wanted.tags else _list(client, wanted):
        if is_run_id(job["TrainingJobName"]):
            status = read_summary(job, backend)
            if wanted.accepts(status):
                yield status


def read_summary(job: Mapping[str, Any], backend: str) -> Status:
    """Return the status of an entry of a list. Most fields are missing in it."""
    instance_type, instances = read_cluster(job.get("ResourceConfig", {}))
    state = map_state(job["TrainingJobStatus"], job.get("SecondaryStatus", ""))
    now = datetime.now(UTC)
    has_reason = "SecondaryStatusTransitions" in job and state is not State.SUCCEEDED
    return Status(
        run=job["TrainingJobName"],
        backend=backend,
        state=state,
        reason=read_reason(job, now) if has_reason else "",
        created=job.get("CreationTime"),
        started=job.get("TrainingStartTime"),
        ended=job.get("TrainingEndTime"),
        instance_type=instance_type,
        instances=instances,
        warm_pool=read_pool(job, None, now),
    )


def uses_training_plan(resources: Mapping[str, Any]) -> bool:
    """Return whether a job runs on instances of a training plan; of a preferred type, once it is selected."""
    selected = resources.get("SelectedInstanceType")
    preferences = resources.get("InstancePreferences", ())
    chosen = [each for each in preferences if each["InstanceType"] == selected]
    return "TrainingPlanArn" in resources or any("TrainingPlanArns" in each for each in chosen)


def read_cluster(resources: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return instance type and count of a job; None for values that SageMaker has not selected yet."""
    preferences = resources.get("InstancePreferences") or ()
    counts = {each.get("InstanceCount") for each in preferences}
    common = counts.pop() if len(counts) == 1 else None
    count = resources.get("SelectedInstanceCount") or resources.get("InstanceCount") or common
    name = resources.get("SelectedInstanceType") or resources.get("InstanceType")
    return name or None, None if count is None else int(count)


def _list(client: SageMakerClient, wanted: RunFilter) -> Iterator[Mapping[str, Any]]:
    statuses = _statuses(wanted.states)
    arguments: dict[str, Any] = {
        "SortBy": "CreationTime",
        "SortOrder": "Descending",
        "NameContains": wanted.name or None,
        # The filter takes only one status. It does not save calls, because AWS filters within each page.
        "StatusEquals": statuses[0] if len(statuses) == 1 else None,
        # AWS compares whole seconds and excludes equal times.
        "CreationTimeAfter": wanted.since and wanted.since - timedelta(seconds=1),
        "CreationTimeBefore": wanted.until and wanted.until + timedelta(seconds=1),
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    for page in _pages(client, "list_training_jobs", given):
        yield from page["TrainingJobSummaries"]


def _search(client: SageMakerClient, wanted: RunFilter) -> Iterator[Mapping[str, Any]]:
    filters = [
        _filter(f"Tags.{key}", "Equals", value) for key, value in sorted(wanted.tags.items())
    ]
    statuses = _statuses(wanted.states)
    if statuses:
        filters.append(_filter("TrainingJobStatus", "In", ",".join(statuses)))
    if wanted.name:
        filters.append(_filter("TrainingJobName", "Contains", wanted.name))
    if wanted.since is not None:
        filters.append(_filter("CreationTime", "GreaterThanOrEqualTo", _iso(wanted.since)))
    if wanted.until is not None:
        filters.append(
            _filter("CreationTime", "LessThanOrEqualTo", _iso(wanted.until + timedelta(seconds=1)))
        )
    arguments = {
        "Resource": "TrainingJob",
        "SearchExpression": {"Filters": filters, "Operator": "And"},
        "SortBy": "CreationTime",
        "SortOrder": "Descending",
    }
    for page in _pages(client, "search", arguments):
        for result in page["Results"]:
            job = result["TrainingJob"]
            if wanted.accepts_tags({tag["Key"]: tag["Value"] for tag in job.get("Tags", ())}):
                yield job


def _filter(name: str, operator: str, value: str) -> dict[str, str]:
    # A filter must not have an empty value. So for a tag with an empty value it only requires that the tag exists.
    if not value:
        return {"Name": name, "Operator": "Exists"}
    return {"Name": name, "Operator": operator, "Value": value}


def _iso(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S}"


def _pages(
    client: SageMakerClient,
    operation: Literal["list_training_jobs", "search"],
    arguments: Mapping[str, Any],
) -> Iterator[Mapping[str, Any]]:
    pages = iter(
        client.get_paginator(operation).paginate(**arguments, PaginationConfig={"PageSize": _PAGE})
    )
    while True:
        with aws_errors("list training jobs", _HINTS):
            page = next(pages, None)
        if page is None:
            return
        yield page


def _statuses(states: Collection[State | str]) -> list[str]:
    """Return every TrainingJobStatus that a job in one of these states can have; empty if all states are selected."""
    found = {status for status, state in FINAL_STATES.items() if state in states}
    if not set(ACTIVE_STATES.values()).isdisjoint(states):
        found.add("InProgress")
    if State.STOPPING in states:
        found.add("Stopping")
    return sorted(found)
