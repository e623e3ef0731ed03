"""`OfflineClient`: the verbs that need neither an account nor a run: validate, plan, files."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path

from cloudtrain.bundle import Contents, list_contents
from cloudtrain.client.observer import Observer
from cloudtrain.client.planning_inputs import (
    Job,
    Planner,
    check_job,
    make_planner,
    plan_job,
    read_job,
)
from cloudtrain.client.receipts import add_receipt
from cloudtrain.client.session import Session
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import DEFAULT_BACKEND
from cloudtrain.support.renamed import renamed_arguments


class OfflineClient:
    """The offline verbs of `Client`, whose arguments it takes. It starts faster: it imports nothing of runs."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        observer: Observer | None = None,
        home: str | Path | None = None,
        stamp: tuple[datetime, str] | None = None,
        code: Contents | None = None,
    ) -> None:
        self.session = Session(settings, observer=observer, home=home, stamp=stamp, code=code)

    @renamed_arguments(path="job")
    def validate(
        self, job: Job, *, backend: str = DEFAULT_BACKEND, site: str | None = None
    ) -> JobSpec:
        """Check a job file offline, and return the job.

        Of the code folder only the files that the job names are read; `plan` reads all of it.

        Raises:
            SpecError: The job is not valid; `problems` holds every mistake with line and column.
            UserError: The file cannot be read.
        """
        loaded = read_job(job)
        return check_job(loaded, self.session.offline_inputs(loaded, backend, site=site))

    @renamed_arguments(spec="job")
    def plan(
        self,
        job: Job,
        *,
        backend: str = DEFAULT_BACKEND,
        site: str | None = None,
        now: datetime | None = None,
        suffix: str | None = None,
        cuda_on_cpu: bool = False,
    ) -> Plan:
        """Return the plan of a job: everything that a submit would send. Offline.

        Args:
            job: The job.
            backend: Where it is to run.
            site: Name of the Slurm site; by default the only one of the settings.
            now: Time of the plan in UTC; by default the current time.
            suffix: Six hexadecimal digits of the run id; by default from the plan's content, or random for local runs.
            cuda_on_cpu: Plan a local run with a stand-in for CUDA.

        Raises:
            SpecError: The job cannot work.
            BundleError: The code folder cannot be packed.
        """
        loaded = read_job(job, self.session.code)
        inputs = self.session.offline_inputs(loaded, backend, site=site, cuda_on_cpu=cuda_on_cpu)
        inputs = dataclasses.replace(inputs, now=now or inputs.now, suffix=suffix or inputs.suffix)
        return add_receipt(plan_job(loaded, inputs)[0], loaded, self.session.find_home())

    def planner(
        self, job: Job, *, backend: str = DEFAULT_BACKEND, site: str | None = None
    ) -> Planner:
        """Read a job's code once, and return a function that plans variants of the job with it. Offline."""
        loaded = read_job(job, self.session.code)
        return make_planner(loaded, self.session.offline_inputs(loaded, backend, site=site))

    @renamed_arguments(spec="job")
    def files(self, job: Job) -> Contents:
        """Return the files of the bundle, the excluded files with the reason, and files that look like secrets.

        Raises:
            SpecError: The job is not valid.
            BundleError: The code folder cannot be packed.
        """
        spec = read_job(job).valid_spec()
        return list_contents(
            spec.code_directory,
            spec.includes,
            home=self.session.find_home(),
            progress=self.session.observer.on_read,
        )
