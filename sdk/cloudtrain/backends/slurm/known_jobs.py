"""What Slurm has said about jobs a moment ago, so that any number of watched runs ask its controller seldom."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.slurm_output import SlurmJob
from cloudtrain.errors import CloudtrainError

ASK_SECONDS = 10.0
"""How old an answer may be. A run that has started or ended says so in its own files, without a question."""

_PATIENCE_SECONDS = 15.0
"""Longest time for an answer. Slurm's commands try again for longer, while somebody waits for a status."""


@dataclass(frozen=True)
class _Answer:
    time: float
    job: SlurmJob | None


@dataclass
class KnownJobs:
    """The jobs of one cluster: all together are listed once in `ASK_SECONDS`, and one that has changed is read.

    Attributes:
        slurm: The cluster.
    """

    slurm: Slurm
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answers: dict[str, _Answer] = field(default_factory=dict)
    _histories: dict[str, SlurmJob | None] = field(default_factory=dict)
    _listed: Mapping[str, SlurmJob] = field(default_factory=dict)
    _listed_at: float = float("-inf")
    _error: CloudtrainError | None = None
    _failed_at: float = float("-inf")

    def find(self, job: str) -> SlurmJob | None:
        """Return a job as it was at most `ASK_SECONDS` ago, or None if Slurm has forgotten it.

        Raises:
            CloudtrainError: Slurm gives no answer, now or a moment ago.
        """
        with self._lock:
            if self._error is not None and time.monotonic() - self._failed_at < ASK_SECONDS:
                raise self._error
            try:
                answer = self._ask(job)
            except CloudtrainError as error:
                # Each further run would wait as long.
                self._error = error
                self._failed_at = time.monotonic()
                raise
            self._error = None
            self._answers[job] = answer
            return answer.job

    def history(self, job: str) -> SlurmJob | None:
        """Return an ended job as accounting has recorded it; None without accounting, or if it does not know the end."""
        with self._lock:
            if job in self._histories:
                return self._histories[job]
            found = self.slurm.history(job)
            if found is not None and found.ended is None:
                # The database may know the end later than the controller.
                return None
            self._histories[job] = found
            return found

    def _ask(self, job: str) -> _Answer:
        known = self._answers.get(job)
        now = time.monotonic()
        if known is not None and (known.job is None or now - known.time < ASK_SECONDS):
            # What Slurm has forgotten does not come back.
            return known
        if known is not None and known.job is not None:
            if now - self._listed_at >= ASK_SECONDS:
                self._listed = {each.id: each for each in self.slurm.jobs()}
                self._listed_at = time.monotonic()
            listed = self._listed.get(job)
            if listed is not None and _content(listed) == _content(known.job):
                return _Answer(self._listed_at, known.job)
        return _Answer(time.monotonic(), self.slurm.job(job))


def _content(job: SlurmJob) -> tuple[str, str, datetime | None]:
    """Return what changes when anything about a job does. squeue and scontrol write reasons in two ways."""
    return job.state, job.reason.replace("_", " "), job.start


_CLUSTERS: dict[str, KnownJobs] = {}


def known_jobs() -> KnownJobs:
    """Return what this process knows about the cluster that it uses."""
    return _CLUSTERS.setdefault(
        os.environ.get("SLURM_CONF", ""),
        KnownJobs(Slurm(timeout_seconds=_PATIENCE_SECONDS, attempts=1)),
    )
