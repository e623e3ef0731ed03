"""`Session`: what the client and the features use: settings, homes, backends, and the inputs of plans."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.context import BackendContext
from cloudtrain.backends.registry import backend_package
from cloudtrain.bundle import Contents
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.home import all_homes, find_home
from cloudtrain.client.observer import Observer
from cloudtrain.client.planning_inputs import PlanInputs, check_job, refuse_cuda_on_cpu
from cloudtrain.errors import (
    CloudError,
    CloudtrainError,
    RunNotFoundError,
    UntrustedSettingsError,
    UserError,
)
from cloudtrain.job.spec import JobSpec, LoadedJob
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain.runs.known_runs import record_run
from cloudtrain.settings.settings import Settings
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.backend_facts import backends_without_account, refuse_site
from cloudtrain.support.run_id import is_run_id

if TYPE_CHECKING:
    # A plan needs none of these, and the modules of runs take a tenth of its time.
    from cloudtrain.backends.base import Backend
    from cloudtrain.runs.run import Run, RunLike
    from cloudtrain.runs.run_filter import RunFilter
    from cloudtrain.runs.status import Status


class Session:
    """Settings, homes, backends and plan inputs. Its arguments are those of `Client`."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        observer: Observer | None = None,
        home: str | Path | None = None,
        stamp: tuple[datetime, str] | None = None,
        code: Contents | None = None,
    ) -> None:
        check_type("settings", settings, Settings)
        check_type("observer", observer, Observer)
        self.settings = settings
        self.observer = observer or Observer()
        self.home = None if home is None else Path(home)
        self.stamp = stamp
        # A controller sees the attempts of its chain, and everybody else the chain.
        self.sees_chains = True
        self.code = code

    def load_settings(self, job: LoadedJob | None = None) -> Settings:
        """Return the account's settings; by default those that apply to a job."""
        return self.settings or find_settings(None if job is None else job.spec)

    def find_home(self) -> Path:
        """Return the folder of local runs."""
        return self.home or find_home()

    def context(
        self, job: LoadedJob | None = None, *, site: str | None = None, **options: bool
    ) -> BackendContext:
        """Return what backends are opened with; `site` and `options` are those of `BackendContext`.

        Other folders of local runs matter only to those who look for a run, without a job.
        """
        home, *others = (self.find_home(),) if self.home or job else all_homes()
        return BackendContext(
            home=home,
            load_settings=lambda: self.load_settings(job),
            load_prices=known_prices,
            other_homes=tuple(others),
            steps=self.observer,
            site=site,
            **options,
        )

    def record(self, run: Run) -> Run:
        """Record a submitted run, so that commands in other folders find it."""
        record_run(os.environ, run.reference, self.find_home())
        return run

    def open(
        self, name: str, job: LoadedJob, *, site: str | None = None, **options: bool
    ) -> Backend:
        """Return a backend that is ready for a submit of a job. Mistakes in the job are reported first.

        Raises:
            SpecError: The job is not valid.
            CloudtrainError: The backend is not ready, for example because settings are missing.
        """
        refuse_cuda_on_cpu(name, **options)
        refuse_site(name, site)
        if job.spec is None or job.problems:
            check_job(job, self.offline_inputs(job, name, site=site))
        backend = backend_package(name).open_backend(self.context(job, site=site, **options))
        try:
            backend.check_ready()
        except CloudtrainError:
            check_job(job, self.offline_inputs(job, name, site=site))
            raise
        return backend

    def find(self, reference: RunLike) -> tuple[Backend, str]:
        """Return the backend that has a run, and the run's id.

        Raises:
            RunNotFoundError: No backend at hand has this run, or several runs have this name.
        """
        from cloudtrain.client.chain_view import as_chain, find_waiting
        from cloudtrain.client.run_names import RunNames
        from cloudtrain.runs.attempt_chain import find_chain_of_attempt
        from cloudtrain.runs.known_runs import LATEST, job_name
        from cloudtrain.runs.run import reference_of

        context = self.context()
        names = RunNames(context.homes, lambda name: backend_package(name).find_backends(context))
        text = reference_of(reference)
        if not self.sees_chains:
            return names.find(text)
        try:
            backend, run = names.find(text)
        except RunNotFoundError:
            if (waiting := find_waiting(text, context)) is None:
                raise
            return waiting
        if text.rpartition(":")[2] in (LATEST, job_name(run)):
            # The newest run of a job can be an attempt, of which nobody has given the id.
            chain = find_chain_of_attempt(run, context.homes)
            run = run if chain is None else chain.id
        return as_chain(backend, run, context.homes), run

    def list_runs(
        self, names: tuple[str, ...], wanted: RunFilter, *, is_named: bool
    ) -> Iterator[tuple[Backend, Status]]:
        """Yield the runs of several backends with their backend, newest first."""
        from cloudtrain.runs.run_filter import submission_time

        sources = [
            self._list_one(each, wanted) for each in self.find_backends(names, is_named=is_named)
        ]
        yield from heapq.merge(*sources, key=lambda pair: submission_time(pair[1]), reverse=True)

    def _list_one(self, backend: Backend, wanted: RunFilter) -> Iterator[tuple[Backend, Status]]:
        """Yield the runs of one backend; report to the observer when it cannot be reached."""
        from cloudtrain.client.chain_list import list_with_chains

        homes = self.context().homes if self.sees_chains else ()
        try:
            yield from list_with_chains(backend, wanted, homes)
        except (CloudError, UntrustedSettingsError) as error:
            self.observer.on_unreachable(error)

    def find_backends(self, names: Iterable[str], *, is_named: bool = False) -> Iterator[Backend]:
        """Yield the backends of these names that are in use here; without `is_named` those with complete settings."""
        context = self.context()
        for name in names:
            try:
                found = [*backend_package(name).find_backends(context)]
                chosen = [each for each in found if is_named or each.is_configured]
            except (CloudError, UntrustedSettingsError) as error:
                self.observer.on_unreachable(error)
                continue
            yield from chosen

    def offline_inputs(
        self, job: LoadedJob, backend: str, *, site: str | None = None, **options: bool
    ) -> PlanInputs:
        """Return the inputs of a plan for a backend that is not opened."""
        refuse_cuda_on_cpu(backend, **options)
        refuse_site(backend, site)
        context = self.context(job, site=site, **options)
        return self.inputs(backend_package(backend).make_target(context), None)

    def inputs(self, target: Target, backend: Backend | None) -> PlanInputs:
        """Return the inputs of a plan for a target; `backend` is asked for runs that the job names."""
        inputs = PlanInputs(
            target,
            self.find_home(),
            lambda spec, run: self._find_saved(spec, run, target, backend),
            on_read=self.observer.on_read,
            contents=self.code,
        )
        if self.stamp is None:
            return inputs
        now, suffix = self.stamp
        return dataclasses.replace(inputs, now=now, suffix=suffix)

    def _find_saved(
        self, spec: JobSpec, reference: str, target: Target, backend: Backend | None
    ) -> ResumeSource | None:
        """Return where the run that a field of the job names has saved its checkpoints; None when it names no run.

        The run's plan is read from the backend. Without one, the default place of a run is assumed.
        """
        run = reference.rpartition(":")[2]
        if not is_run_id(run):
            return None
        from cloudtrain.client.chain_view import as_chain
        from cloudtrain.runs.previous_run import checkpoints_of

        context = self.context()
        homes = context.homes if self.sees_chains else ()
        for name in backends_without_account():
            for here in backend_package(name).find_backends(context):
                if here.may_have(run):
                    return checkpoints_of(as_chain(here, run, homes).plan_of(run), run)
        if backend is not None:
            # The plan may be deleted; the checks report missing checkpoints.
            with contextlib.suppress(UserError):
                return checkpoints_of(as_chain(backend, run, homes).plan_of(run), run)
        return target.assumed_checkpoints(spec, run)
