"""The warm pools of an account, and the job that each goes to."""

from __future__ import annotations

import threading

from cloudtrain.backends.sandbox.training_job import TrainingJob
from cloudtrain.planning.warm_pool import AVAILABLE, differences


class WarmPools:
    """The pools of an account: each is taken by one job only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[TrainingJob] = []

    def add(self, job: TrainingJob) -> None:
        """Keep in mind a job that may leave a pool behind."""
        with self._lock:
            self._jobs.append(job)

    def take(self, job: TrainingJob) -> bool:
        """Move the newest pool that matches to a job; return whether there was one."""
        with self._lock:
            jobs = list(reversed(self._jobs))
        waiting = (other for other in jobs if other is not job and other.pool_status == AVAILABLE)
        return any(other.give_pool_to(job) for other in waiting if not _unequal(other, job))


def _unequal(other: TrainingJob, job: TrainingJob) -> bool:
    left_behind = {**other.request, "ResourceConfig": other.describe()["ResourceConfig"]}
    return bool(differences(left_behind, job.request))
