"""What AWS bills for a training job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cloudtrain import catalog
from cloudtrain.backends.sagemaker.job_states import (
    read_instances,
    read_phases,
    seconds_on_instances,
)
from cloudtrain.backends.sagemaker.listing import read_cluster, uses_training_plan
from cloudtrain.planning.warm_pool import read_pool
from cloudtrain.runs.billing import Billing

_RESTARTS = ("Interrupted", "Restarting")


def read_billing(job: Mapping[str, Any], prices: catalog.Prices, region: str | None) -> Billing:
    """Return what AWS bills for a job so far.

    Args:
        job: Response of DescribeTrainingJob.
        prices: Instance prices.
        region: Region of the job.
    """
    instance_type, _ = read_cluster(job["ResourceConfig"])
    instances = read_instances(job)
    phases = read_phases(job)
    now = datetime.now(UTC)
    price = prices.usd_per_hour(instance_type or "", region or "")
    if uses_training_plan(job["ResourceConfig"]):
        # Paid in advance.
        price = 0.0
    on_instances = seconds_on_instances(phases, job.get("TrainingEndTime", now))
    pool = read_pool(job, None, now)
    return Billing(
        instance_type=instance_type or "",
        instances=instances,
        region=region or "",
        usd_per_hour=None if price is None else price * instances,
        billable_seconds=int(job.get("BillableTimeInSeconds", on_instances)),
        training_seconds=int(job.get("TrainingTimeInSeconds", on_instances)),
        warm_pool_seconds=0 if pool is None else pool.kept_seconds,
        is_spot=bool(job.get("EnableManagedSpotTraining")),
        restarts=sum(phase.name in _RESTARTS for phase in phases),
    )
