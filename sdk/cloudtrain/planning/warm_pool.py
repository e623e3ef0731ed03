"""Warm pools: which job may take the cluster that another one leaves behind, and how long that is kept.

Pure, from the documents of CreateTrainingJob and DescribeTrainingJob. Source of what must be equal, of the lifecycle
and of the billing: AWS's guide, "SageMaker AI Managed Warm Pools" (train-warm-pools), read 2026-11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

AVAILABLE = "Available"
MAX_KEEP_ALIVE_SECONDS = 3600
"""Longest keep-alive by the guide. The model of the API takes 21600, so more than this is a warning, not an error."""

SEARCH_WINDOW_SECONDS = 21600 + 600
"""A pool that is available belongs to a job that has ended, and so was changed, within this time."""

_Types = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class WarmPool:
    """The cluster that a run leaves behind, kept and paid for until the next job takes it.

    Attributes:
        status: `InUse`, `Available`, `Reused` or `Terminated`, as SageMaker names it.
        keep_alive_seconds: How long it is kept after the run; 0 where that is not told.
        until: When an available pool ends; None where that is not told, and in every other status.
        kept_seconds: How long it has been kept, and is charged, so far.
        usd: What that costs, or None when the price is unknown.
        reused_by: Name of the job that has taken it, or an empty string.
    """

    status: str
    keep_alive_seconds: int
    until: datetime | None = None
    kept_seconds: int = 0
    usd: float | None = None
    reused_by: str = ""

    @property
    def is_available(self) -> bool:
        """Whether it waits for a job."""
        return self.status == "Available"

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `status --json`."""
        return {**dataclasses.asdict(self), "until": self.until.isoformat() if self.until else None}


@dataclass(frozen=True)
class Difference:
    """A value by which a job does not match a warm pool.

    Attributes:
        field: Its field in job.yaml, or the setting.
        pool: The pool's value.
        job: The job's.
    """

    field: str
    pool: str
    job: str

    def __str__(self) -> str:
        return f"{self.field} ({self.pool}, the job has {self.job})"


def differences(left_behind: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return in what a job does not match the cluster that another one leaves behind; nothing when it may take it.

    Args:
        left_behind: The answer to DescribeTrainingJob, or the request, of the job that leaves it.
        request: The CreateTrainingJob document of the job that comes. With InstancePreferences each of them may match;
            the guide does not say it.
    """
    return tuple(_differences(left_behind, request))


def _differences(left_behind: Mapping[str, Any], request: Mapping[str, Any]) -> Iterator[Difference]:
    for field, path, default in _EQUAL:
        pool, job = _at(left_behind, path, default), _at(request, path, default)
        if pool != job:
            yield Difference(field, _shown(pool), _shown(job))
    pool_types, job_types = _types(left_behind), _types(request)
    if not set(pool_types) & set(job_types):
        if {name for name, _ in pool_types} & {name for name, _ in job_types}:
            yield Difference("cluster.instances", _counts(pool_types), _counts(job_types))
        else:
            yield Difference("cluster.instance_type", _names(pool_types), _names(job_types))
    if request.get("EnableManagedSpotTraining"):
        yield Difference("cluster.spot", "on demand", "spot")


_EQUAL: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("role", ("RoleArn",), ""),
    ("cluster.volume", ("ResourceConfig", "VolumeSizeInGB"), 0),
    ("kms_key", ("ResourceConfig", "VolumeKmsKeyId"), ""),
    ("cluster.network.subnets", ("VpcConfig", "Subnets"), []),
    ("cluster.network.security_groups", ("VpcConfig", "SecurityGroupIds"), []),
    ("cluster.network.encrypt_traffic", ("EnableInterContainerTrafficEncryption",), False),
    ("cluster.network.isolation", ("EnableNetworkIsolation",), False),
    # cloudtrain sends none, and DescribeTrainingJob tells none.
    ("session tags", ("SessionChainingConfig", "EnableSessionTagChaining"), False),
)
"""Field of the job, place in the documents, and what an absent value means."""


def _at(document: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    value: Any = document
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    if value in (None, ""):
        return default
    return sorted(value) if isinstance(value, list | tuple) else value


def _types(document: Mapping[str, Any]) -> _Types:
    """Return the instance types, with their counts, that a job has, or may have."""
    resources = document["ResourceConfig"]
    count = int(resources.get("InstanceCount") or 0)
    if resources.get("SelectedInstanceType"):
        return ((str(resources["SelectedInstanceType"]), int(resources.get("SelectedInstanceCount") or count)),)
    if resources.get("InstanceType"):
        return ((str(resources["InstanceType"]), count),)
    preferences = resources.get("InstancePreferences") or ()
    return tuple((str(each["InstanceType"]), int(each.get("InstanceCount") or count)) for each in preferences)


def _names(types: _Types) -> str:
    return " or ".join(name for name, _ in types) or "no type"


def _counts(types: _Types) -> str:
    return " or ".join(str(count) for _, count in types)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value) or "none"


# ---------------------------------------------------------------- what is told of a pool


def read_pool(job: Mapping[str, Any], usd_per_hour: float | None, now: datetime) -> WarmPool | None:
    """Return what is told of the warm pool of a job, or None when it keeps none.

    Args:
        job: The answer to DescribeTrainingJob, or an entry of a list, which does not say how long a pool is kept.
        usd_per_hour: Price of the whole cluster; a kept one costs what a busy one does.
        now: The present time, with a time zone.
    """
    told = job.get("WarmPoolStatus")
    if not told:
        return None
    ended = job.get("TrainingEndTime")
    keep_alive = int(job.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds") or 0)
    kept_since: datetime | None = ended if told["Status"] == AVAILABLE else None
    # AWS tells the billed time only when the pool is gone.
    kept = told.get("ResourceRetainedBillableTimeInSeconds")
    if kept is None:
        elapsed = round((now - kept_since).total_seconds()) if kept_since is not None else 0
        kept = max(0, elapsed if keep_alive == 0 else min(elapsed, keep_alive))
    return WarmPool(
        status=str(told["Status"]),
        keep_alive_seconds=keep_alive,
        until=kept_since + timedelta(seconds=keep_alive) if kept_since is not None and keep_alive else None,
        kept_seconds=int(kept),
        usd=None if usd_per_hour is None else round(usd_per_hour * int(kept) / 3600, 2),
        reused_by=str(told.get("ReusedByJob") or ""),
    )


def clock_time(moment: datetime) -> str:
    """Return the time of a day as people read it: `12:30 UTC`."""
    return f"{moment.astimezone(UTC):%H:%M} UTC"


def describe_start(jobs: Sequence[Mapping[str, Any]], request: Mapping[str, Any], now: datetime) -> str:
    """Return in one line whether a job starts in the warm pool of another one, and if not, why.

    Args:
        jobs: Answers to DescribeTrainingJob of the jobs whose pools are available.
        request: The CreateTrainingJob document.
        now: The present time, with a time zone.
    """
    found = [(pool, job) for job in jobs if (pool := read_pool(job, None, now)) is not None and pool.is_available]
    if not found:
        return "no warm pool is available: the cluster starts cold"
    pool, job = min(found, key=lambda each: len(differences(each[1], request)))
    name = job["TrainingJobName"]
    unequal = differences(job, request)
    if unequal:
        others = f" (the nearest of {len(found)})" if len(found) > 1 else ""
        return f"the cluster starts cold: the warm pool of {name}{others} differs in {', '.join(map(str, unequal))}"
    until = f", kept until {clock_time(pool.until)}" if pool.until is not None else ""
    return f"reuses the warm pool of {name}{until}"
