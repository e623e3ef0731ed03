"""SageMaker warm pools: whether a job can reuse the cluster of an earlier job, and what keeping it costs.

Source of the matching rules, the lifecycle and the billing: AWS's guide, "SageMaker AI Managed Warm Pools"
(train-warm-pools), read 2026-11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

AVAILABLE: Final = "Available"
MAX_KEEP_ALIVE_SECONDS = 3600
"""Longest keep-alive by AWS's guide. The API accepts up to 21600, so a longer one is a warning, not an error."""

SEARCH_WINDOW_SECONDS = 21600 + 600
"""A job with an available pool has ended, and so was modified, within this time."""

_Types = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class WarmPool:
    """The warm pool of a run: its cluster, kept and billed until another job uses it.

    Attributes:
        status: SageMaker's status: `InUse`, `Available`, `Reused` or `Terminated`.
        keep_alive_seconds: How long the pool is kept after the run; 0 when unknown.
        until: End of an available pool; None when unknown, and in every other status.
        kept_seconds: How long the pool has been kept, and is billed, so far.
        usd: Cost of that time, or None when the price is unknown.
        reused_by: Name of the job that uses the cluster now, or an empty string.
    """

    status: str
    keep_alive_seconds: int
    until: datetime | None = None
    kept_seconds: int = 0
    usd: float | None = None
    reused_by: str = ""

    @property
    def is_available(self) -> bool:
        """Whether another job can use the cluster."""
        return self.status == "Available"

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {**dataclasses.asdict(self), "until": self.until.isoformat() if self.until else None}


@dataclass(frozen=True)
class Difference:
    """A value that prevents reuse of a warm pool: its field in job.yaml or the setting, and both values."""

    field: str
    pool: str
    job: str

    def __str__(self) -> str:
        return f"{self.field} ({self.pool}, the job has {self.job})"


def differences(pool_job: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the values that prevent a job from reusing a warm pool; an empty tuple when it can reuse the pool.

    Args:
        pool_job: DescribeTrainingJob response, or request, of the job that the pool belongs to.
        request: The CreateTrainingJob document of the new job. Each of its InstancePreferences may match, which AWS's
            guide does not document.
    """
    values = [
        (field, _at(pool_job, path, default), _at(request, path, default))
        for field, path, default in _EQUAL
    ]
    found = [
        Difference(field, _shown(pool), _shown(job)) for field, pool, job in values if pool != job
    ]
    pools = _types(pool_job)
    jobs = _types(request)
    if not set(pools) & set(jobs):
        found.append(_cluster_difference(pools, jobs))
    if request.get("EnableManagedSpotTraining"):
        found.append(Difference("cluster.spot", "on demand", "spot"))
    return tuple(found)


def _cluster_difference(pools: _Types, jobs: _Types) -> Difference:
    if {name for name, _ in pools} & {name for name, _ in jobs}:
        counts = [" or ".join(str(count) for _, count in types) for types in (pools, jobs)]
        return Difference("cluster.instances", *counts)
    names = [" or ".join(name for name, _ in types) or "no type" for types in (pools, jobs)]
    return Difference("cluster.instance_type", *names)


_EQUAL: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("role", ("RoleArn",), ""),
    ("cluster.volume", ("ResourceConfig", "VolumeSizeInGB"), 0),
    ("kms_key", ("ResourceConfig", "VolumeKmsKeyId"), ""),
    ("cluster.network.subnets", ("VpcConfig", "Subnets"), []),
    ("cluster.network.security_groups", ("VpcConfig", "SecurityGroupIds"), []),
    ("cluster.network.encrypt_traffic", ("EnableInterContainerTrafficEncryption",), False),
    ("cluster.network.isolation", ("EnableNetworkIsolation",), False),
    # cloudtrain sends none, and the DescribeTrainingJob response has none.
    ("session tags", ("SessionChainingConfig", "EnableSessionTagChaining"), False),
)
"""Field of the job, path in the documents, and the meaning of an absent value."""


def _at(document: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    value: Any = document
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if value in (None, ""):
        return default
    if isinstance(value, list | tuple):
        # The order of subnets and security groups has no meaning.
        return sorted(value)
    return value


def _types(document: Mapping[str, Any]) -> _Types:
    resources = document["ResourceConfig"]
    count = int(resources.get("InstanceCount") or 0)
    if resources.get("SelectedInstanceType"):
        # The choice among the preferences that SageMaker has made.
        selected = int(resources.get("SelectedInstanceCount") or count)
        return ((str(resources["SelectedInstanceType"]), selected),)
    if resources.get("InstanceType"):
        return ((str(resources["InstanceType"]), count),)
    preferences = resources.get("InstancePreferences") or ()
    return tuple(
        (str(each["InstanceType"]), int(each.get("InstanceCount") or count)) for each in preferences
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "none"


def read_pool(job: Mapping[str, Any], usd_per_hour: float | None, now: datetime) -> WarmPool | None:
    """Return the warm pool of a job, or None when it has none.

    Args:
        job: DescribeTrainingJob response, or an entry of a list, which lacks the keep-alive period.
        usd_per_hour: Price of the cluster, which is the same while it is kept.
        now: The current time, with a time zone.
    """
    status = job.get("WarmPoolStatus")
    if not status:
        return None
    ended = job.get("TrainingEndTime")
    keep_alive = int(job.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds") or 0)
    kept_since: datetime | None = ended if status["Status"] == AVAILABLE else None
    until = None
    if kept_since is not None and keep_alive:
        until = kept_since + timedelta(seconds=keep_alive)
    # AWS reports the billed time only after the pool has ended.
    kept = status.get("ResourceRetainedBillableTimeInSeconds")
    if kept is None:
        kept = _kept_so_far(kept_since, keep_alive, now)
    usd = None
    if usd_per_hour is not None:
        usd = round(usd_per_hour * int(kept) / 3600, 2)
    return WarmPool(
        status=str(status["Status"]),
        keep_alive_seconds=keep_alive,
        until=until,
        kept_seconds=int(kept),
        usd=usd,
        reused_by=str(status.get("ReusedByJob") or ""),
    )


def _kept_so_far(kept_since: datetime | None, keep_alive: int, now: datetime) -> int:
    """Return the seconds since the end of the run, at most the keep-alive period where that is known."""
    if kept_since is None:
        return 0
    elapsed = max(0, round((now - kept_since).total_seconds()))
    if keep_alive == 0:
        return elapsed
    return min(elapsed, keep_alive)


def clock_time(moment: datetime) -> str:
    """Return the time of day, such as `12:30 UTC`."""
    return f"{moment.astimezone(UTC):%H:%M} UTC"


def describe_start(
    jobs: Sequence[Mapping[str, Any]], request: Mapping[str, Any], now: datetime
) -> str:
    """Return one line that says whether a job will reuse one of these available pools, and if not, why."""
    found = [
        (pool, job)
        for job in jobs
        if (pool := read_pool(job, None, now)) is not None and pool.is_available
    ]
    if not found:
        return "no warm pool is available: the cluster starts cold"
    pool, job = min(found, key=lambda each: len(differences(each[1], request)))
    name = job["TrainingJobName"]
    mismatches = differences(job, request)
    if mismatches:
        others = f" (the nearest of {len(found)})" if len(found) > 1 else ""
        fields = ", ".join(map(str, mismatches))
        return f"the cluster starts cold: the warm pool of {name}{others} differs in {fields}"
    if pool.until is None:
        return f"reuses the warm pool of {name}"
    return f"reuses the warm pool of {name}, kept until {clock_time(pool.until)}"
