"""`Client`: every verb of cloudtrain, for one account."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.base import Backend, BackendContext, make_storage_environ
from cloudtrain.backends.registry import BACKENDS, backend_package
from cloudtrain.bundle import BUNDLES_FOLDER, Contents, list_contents
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.home import find_home, make_home, other_homes
from cloudtrain.client.observer import Observer
from cloudtrain.client.planning_inputs import Job, PlanInputs, check_job, plan_job, read_job
from cloudtrain.client.run_names import RunNames
from cloudtrain.client.submission import Submission, add_warnings, raise_failed
from cloudtrain.errors import (
    EXIT_RUN_FAILED,
    CloudError,
    CloudtrainError,
    RunNotFoundError,
    SpecError,
    UntrustedSettingsError,
    UserError,
)
from cloudtrain.job.spec import JobSpec, LoadedJob
from cloudtrain.planning.plan import LOCAL, SAGEMAKER, Plan
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.continuation import add_continuation
from cloudtrain.runs.known_runs import record_run
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.previous_run import PreviousRun, checkpoints_of
from cloudtrain.runs.run import Run, RunLike, reference_of
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, submission_time
from cloudtrain.runs.status import Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.run_id import is_run_id

if TYPE_CHECKING:
    from cloudtrain.bundle.archive import Bundle
    from cloudtrain.failure_rules import Explanation
    from cloudtrain.preflight import Check


class Client:
    """Every verb of cloudtrain, for one account.

    A backend is given by its name: `local` is this machine, `sandbox` the local AWS, `sagemaker` the account. A job is
    a `JobSpec`, or the path of a job file.

    Args:
        settings: The account; by default from environment and files, anew for each job.
        observer: Receives what the client reports while it works.
        home: Folder of local runs; by default CLOUDTRAIN_HOME, or the nearest `.cloudtrain`.
    """

    def __init__(
        self, settings: Settings | None = None, *, observer: Observer | None = None, home: Path | None = None
    ) -> None:
        self._settings = settings
        self._observer = observer or Observer()
        self._home = home

    def validate(self, job: Job, *, backend: str = SAGEMAKER) -> JobSpec:
        """Check a job file offline, and return the job.

        Of the code folder only the files that the job names are read; `plan` reads all of it.

        Raises:
            SpecError: The job is not valid; `problems` holds every mistake with line and column.
            UserError: The file cannot be read.
        """
        loaded = read_job(job)
        return check_job(loaded, self._offline_inputs(loaded, backend))

    def plan(
        self, job: Job, *, backend: str = SAGEMAKER, now: datetime | None = None, suffix: str | None = None
    ) -> Plan:
        """Return the plan of a job: everything that a submit would send. Offline.

        Args:
            job: The job.
            backend: Where it is to run.
            now: Time of the plan in UTC; by default the current time.
            suffix: Six hexadecimal digits of the run id; by default from the plan's content, or random for local runs.

        Raises:
            SpecError: The job cannot work.
            BundleError: The code folder cannot be packed.
        """
        loaded = read_job(job)
        inputs = self._offline_inputs(loaded, backend)
        return plan_job(loaded, dataclasses.replace(inputs, now=now or inputs.now, suffix=suffix))[0]

    def check(self, job: Job, *, backend: str = SAGEMAKER) -> tuple[Check, ...]:
        """Check, in parallel, that the account has everything that a submit needs. Nothing is changed.

        Raises:
            SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong.
            CloudError: There are no credentials.
        """
        loaded = read_job(job)
        opened = self._open(backend, loaded)
        plan, _ = plan_job(loaded, self._inputs(opened.target(), opened))
        return opened.start_checks(plan).wait()

    def files(self, job: Job) -> Contents:
        """Return the files of the bundle, the excluded files with the reason, and files that look like secrets.

        Raises:
            SpecError: The job is not valid.
            BundleError: The code folder cannot be packed.
        """
        loaded = read_job(job)
        if loaded.spec is None or loaded.problems:
            raise SpecError(loaded.problems)
        spec = loaded.spec
        return list_contents(
            spec.code_directory, spec.includes, home=self._find_home(), progress=self._observer.on_read
        )

    def submit(
        self,
        job: Job,
        *,
        backend: str = SAGEMAKER,
        skip_check: bool = False,
        new: bool = False,
        wait_for_capacity: float | None = None,
        install: bool = False,
    ) -> Run:
        """Start a run and return it at once; the run continues without this process.

        If a run of the same request and code is live, that one is returned and nothing is started (`run.attached`),
        from whichever machine it was submitted. Local runs cost nothing: each submit starts one.

        Args:
            job: The job.
            backend: Where it runs. A sandbox is started in the background when none runs; only the checkpoint is
                checked first there, because a sandbox has no quotas and no resources of the real account.
            skip_check: Do not check the account first.
            new: Start another run beside one of the same request and code.
            wait_for_capacity: Seconds during which a run without capacity or quota is submitted again, with growing
                pauses; `submit` then returns when the run has its instances. Other errors are not retried.
            install: Install `code.requirements` for a local run, in an environment that later runs use again.

        Returns:
            The run; `run.warnings` are those of its plan.

        Raises:
            SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong; nothing was started.
            CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
        """
        loaded = read_job(job)
        if install and backend != LOCAL:
            hint = "leave it out: containers install code.requirements themselves"
            raise UserError(f"--install is for local runs, not for {backend}", hint)
        opened = self._open(backend, loaded, installs=install)
        plan, contents = plan_job(loaded, self._inputs(opened.target(), opened))
        self._observer.on_plan(plan)

        def pack() -> Bundle:
            from cloudtrain.bundle.archive import write_bundle

            folder = (self._home or make_home()) / BUNDLES_FOLDER
            return write_bundle(contents, folder, progress=self._observer.on_read)

        submission = Submission(opened, pack, self._observer, skip_check=skip_check, is_new=new)
        if wait_for_capacity is None:
            return self._record(submission.send(plan), self._find_home())
        return self._record(submission.send_until_capacity(plan, wait_for_capacity), self._find_home())

    def resume(
        self,
        reference: RunLike,
        overrides: Iterable[str] = (),
        *,
        instances: int | None = None,
        from_step: int | None = None,
        skip_check: bool = False,
        new: bool = False,
    ) -> Run:
        """Start a new run from a complete checkpoint of one that has ended, by default the last.

        The new run has the same job, code, data and account. Neither job file nor code is needed on this machine.

        Args:
            reference: The run that has ended.
            overrides: Changes of the job, `path=value` as the `--set` option takes them, such as `cluster.spot=true`.
            instances: Replaces `cluster.instances`.
            from_step: Step of the checkpoint to resume from.
            skip_check: Do not check the account first. The checkpoint is checked in any case.
            new: Start another run beside one of the same request.

        Raises:
            RunNotFoundError: There is no such run.
            UserError: The run has not ended, or has left no complete checkpoint; nothing was started.
            SpecError: The changed job is not valid.
            CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
        """
        found, run = self._find(reference)
        state = found.status(run).state
        if not state.is_final:
            hint = f"to stop it: cloudtrain stop {run}"
            raise UserError(f"{run} is {state}, and only a run that has ended can be resumed", hint)
        previous = PreviousRun(found.plan_of(run))
        spec = previous.job(overrides, instances=instances)
        backend = found.for_previous(previous)
        backend.check_ready()
        plan = self._plan_resumed(spec, previous, backend, from_step)
        self._observer.on_plan(plan)
        try:
            checks = backend.check_resume(plan)
            raise_failed(checks, f"see what {run} has left: cloudtrain checkpoints {found.name}:{run}")
        except CloudError as error:
            raise UserError(error.message, error.hint) from None  # a missing checkpoint has exit code 2 everywhere
        if skip_check and checks:
            self._observer.on_checks(checks)
            plan = add_warnings(plan, checks)
        submission = Submission(backend, lambda: None, self._observer, skip_check=skip_check, is_new=new)
        return self._record(submission.send(plan), self._find_home())

    def _plan_resumed(self, spec: JobSpec, previous: PreviousRun, backend: Backend, from_step: int | None) -> Plan:
        """Return the plan of a run that continues a previous one with its code."""
        resumed = previous.saved if spec.checkpoint.resume == previous.run else None
        if from_step is not None:
            if resumed is None:
                raise UserError("--from and checkpoint.resume name two checkpoints", "use only one of them")
            saved = CheckpointFolder(resumed.checkpoints, previous.run, backend.storage_environ())
            resumed = dataclasses.replace(resumed, checkpoints=saved.find(from_step).uri)
        inputs = self._inputs(backend.target(), backend)
        if resumed is not None:
            inputs = dataclasses.replace(inputs, find_resumed=lambda _: resumed)
        return add_continuation(inputs.make_plan(spec, previous.code))

    def get_run(self, reference: RunLike) -> Run:
        """Return a run; a `Run` is returned as it is.

        Args:
            reference: A `Run`, a `Status`, or text: a run id, the beginning or end of one that no other run has,
                a job's name for its newest run, or `latest` for the newest local run; `<backend>:` may precede it.

        Raises:
            RunNotFoundError: No backend at hand has this run, or several runs have this name.
        """
        if isinstance(reference, Run):
            return reference
        backend, run = self._find(reference)
        return Run(run, backend)

    def status(self, reference: RunLike) -> Status:
        """Return the current status of a run.

        Raises:
            RunNotFoundError: There is no such run.
        """
        return self.get_run(reference).status()

    def logs(
        self,
        reference: RunLike,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of a run's hosts that match a filter; with `follow` until the run has ended.

        Raises:
            RunNotFoundError: There is no such run.
        """
        return self.get_run(reference).logs(follow=follow, only=only, on_trouble=on_trouble)

    def explain(self, run: RunLike) -> Explanation:
        """Explain why a run has failed: the first primary error of all ranks, its class, and what to do.

        Args:
            run: The run, or its reference.

        Raises:
            RunNotFoundError: There is no such run.
            CloudError: AWS refused or cannot be reached.
        """
        from cloudtrain.failure_rules import explain_run

        handle = self.get_run(run)
        found = handle.status()
        # The log of a run that has succeeded or was stopped is not needed.
        lines = handle.logs() if found.exit_code in (None, EXIT_RUN_FAILED) else ()
        return explain_run(found, lines, handle.facts())

    def stop(self, reference: RunLike) -> Run:
        """Ask a run to end and return it; `run.wait()` waits for the end.

        Raises:
            RunNotFoundError: There is no such run.
        """
        run = self.get_run(reference)
        run.stop()
        return run

    def list_runs(self, wanted: RunFilter = ALL_RUNS, *, backends: Iterable[str] | None = None) -> Iterator[Status]:
        """Yield runs, newest first. Pages are fetched lazily.

        Args:
            wanted: Which runs; by default all.
            backends: Names of backends; by default all that are in use here and whose settings are complete.

        Raises:
            CloudError: AWS refused or cannot be reached, and the observer does not handle `on_unreachable`.
        """
        names = tuple(BACKENDS if backends is None else backends)
        sources = [self._list_one(name, wanted, is_named=backends is not None) for name in names]
        yield from heapq.merge(*sources, key=submission_time, reverse=True)

    def checkpoint_folder(self, reference: RunLike) -> CheckpointFolder:
        """Return the folder of a run's checkpoints, or the folder at a uri or path.

        Args:
            reference: A run, `s3://bucket/prefix`, `file:///...` or a path that contains a slash.

        Raises:
            RunNotFoundError: There is no such run.
            CloudError: AWS refused or cannot be reached.
        """
        reference = reference_of(reference)
        try:
            backend, run = self._find(reference) if "/" not in reference else (None, "")
        except RunNotFoundError:
            if not Path(reference).is_dir():
                raise
            backend, run = None, ""
        if backend is None:
            settings = self._load_settings()
            return CheckpointFolder(reference, environ=make_storage_environ(os.environ, settings, settings.region))
        return CheckpointFolder(checkpoints_of(backend.plan_of(run), run).checkpoints, run, backend.storage_environ())

    def _load_settings(self, job: LoadedJob | None = None) -> Settings:
        return self._settings or find_settings(None if job is None else job.spec)

    def _find_home(self) -> Path:
        return self._home or find_home()

    def _context(self, job: LoadedJob | None = None, *, installs: bool = False) -> BackendContext:
        others = () if self._home else other_homes()
        return BackendContext(self._find_home(), lambda: self._load_settings(job), known_prices, others, installs)

    def _record(self, run: Run, home: Path) -> Run:
        """Record a submitted run, so that commands in other folders find it."""
        record_run(os.environ, run.reference, home)
        return run

    def _open(self, name: str, job: LoadedJob, *, installs: bool = False) -> Backend:
        """Return a backend that is ready for a submit of a job. Mistakes in the job are reported first.

        Raises:
            SpecError: The job is not valid.
            CloudtrainError: The backend is not ready, for example because settings are missing.
        """
        if job.spec is None or job.problems:
            check_job(job, self._offline_inputs(job, name))
        backend = backend_package(name).open_backend(self._context(job, installs=installs))
        try:
            backend.check_ready()
        except CloudtrainError:
            check_job(job, self._offline_inputs(job, name))
            raise
        return backend

    def _find(self, reference: RunLike) -> tuple[Backend, str]:
        """Return the backend that has a run, and the run's id.

        Raises:
            RunNotFoundError: No backend at hand has this run, or several runs have this name.
        """
        context = self._context()
        names = RunNames(context.homes, lambda name: backend_package(name).find_backends(context))
        return names.find(reference_of(reference))

    def _list_one(self, name: str, wanted: RunFilter, *, is_named: bool) -> Iterator[Status]:
        """Yield the runs of one backend; report to the observer when it cannot be reached."""
        try:
            backends = [*backend_package(name).find_backends(self._context())]
            found = [each.list(wanted) for each in backends if is_named or each.is_configured]
            yield from heapq.merge(*found, key=submission_time, reverse=True)
        except (CloudError, UntrustedSettingsError) as error:
            self._observer.on_unreachable(error)

    def _offline_inputs(self, job: LoadedJob, backend: str) -> PlanInputs:
        return self._inputs(backend_package(backend).make_target(self._context(job)), None)

    def _inputs(self, target: Target, backend: Backend | None) -> PlanInputs:
        return PlanInputs(
            target,
            self._find_home(),
            lambda spec: self._find_saved(spec, spec.checkpoint.resume, target, backend),
            lambda spec, run: self._find_saved(spec, run, target, backend),
            on_read=self._observer.on_read,
        )

    def _find_saved(
        self, spec: JobSpec, reference: str, target: Target, backend: Backend | None
    ) -> ResumeSource | None:
        """Return where the run that a field of the job names has saved its checkpoints; None when it names no run.

        The run's plan is read from the backend. Without one, the default place of a run is assumed.
        """
        run = reference.rpartition(":")[2]
        if not is_run_id(run):
            return None
        for here in backend_package(LOCAL).find_backends(self._context()):
            if here.may_have(run):
                return checkpoints_of(here.plan_of(run), run)
        if backend is not None:
            with contextlib.suppress(UserError):  # the plan may be deleted; the checks report missing checkpoints
                return checkpoints_of(backend.plan_of(run), run)
        return target.assumed_checkpoints(spec, run)
