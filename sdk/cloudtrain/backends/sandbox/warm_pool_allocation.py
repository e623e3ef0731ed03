"""Allocation of an account's warm pools to new jobs."""

from __future__ import annotations

import threading

from cloudtrain.backends.sandbox.training_job import TrainingJob
from cloudtrain.planning.warm_pool import AVAILABLE, differences


class WarmPools:
    """The warm pools of an account. Each can be reused by one job only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[TrainingJob] = []

    def add(self, job: TrainingJob) -> None:
        """Register a job, which may leave a warm pool."""
        with self._lock:
            self._jobs.append(job)

    def take(self, job: TrainingJob) -> bool:
        """Give a job the newest matching pool; return whether one matched."""
        with self._lock:
            jobs = list(reversed(self._jobs))
        available = (other for other in jobs if other is not job and other.pool_status == AVAILABLE)
        return any(other.give_pool_to(job) for other in available if _matches(other, job))


def _matches(other: TrainingJob, job: TrainingJob) -> bool:
    pool_request = {**other.request, "ResourceConfig": other.describe()["ResourceConfig"]}
    return not differences(pool_request, job.request)
