"""Check for a warm pool that the job can reuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cloudtrain.planning.plan import Plan
from cloudtrain.planning.warm_pool import AVAILABLE, SEARCH_WINDOW_SECONDS, describe_start
from cloudtrain.preflight.base import (
    Check,
    CheckContext,
    passed,
    run_concurrently,
)

_MAX_POOLS = 20


def warm_pool_check_names(plan: Plan) -> tuple[str, ...]:
    """Return the name of the check if the plan keeps its cluster warm."""
    return ("warm start",) if plan.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") else ()


def check_pools(context: CheckContext) -> Iterator[Check]:
    """Report whether the job would start in a warm pool. A cold start is no failure."""
    now = datetime.now(UTC)
    jobs = find_available_pools(context.client("sagemaker"), now)
    yield passed("warm start", describe_start(jobs, context.plan.request, now), is_shown=True)


def find_available_pools(client: Any, now: datetime) -> list[Mapping[str, Any]]:
    """Return descriptions of the jobs with available warm pools, newest first.

    Args:
        client: boto3 client of SageMaker.
        now: Current time, with a time zone.
    """
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
    return run_concurrently([lambda name=name: client.describe_training_job(TrainingJobName=name) for name in names])  # type: ignore[misc]
