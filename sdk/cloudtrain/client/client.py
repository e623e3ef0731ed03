"""`Client`: the verbs of the core, for one account: plan, check, submit, resume, status, stop and others."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.base import Backend, make_storage_environ
from cloudtrain.bundle import BUNDLES_FOLDER
from cloudtrain.client.home import make_home
from cloudtrain.client.next_step import begin_again, explain_with_advice
from cloudtrain.client.observer import Observer
from cloudtrain.client.offline import OfflineClient
from cloudtrain.client.planning_inputs import Job, plan_job, read_job
from cloudtrain.client.receipts import add_receipt
from cloudtrain.client.submission import Submission, add_warnings, raise_failed
from cloudtrain.errors import (
    CloudError,
    CredentialsError,
    NoCapacityError,
    NoCheckpointError,
    RunNotFoundError,
    UnreachableError,
    UserError,
)
from cloudtrain.job.sections.recover import Recover
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.continuation import NOTHING_LEFT
from cloudtrain.planning.plan import Plan
from cloudtrain.runs.attempt_chain import find_live_chain
from cloudtrain.runs.continuation import add_continuation
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run import Run, RunLike, reference_of
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter, check_filter
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.backend_facts import (
    BACKENDS,
    DEFAULT_BACKEND,
    choose_backends,
    facts_of,
)
from cloudtrain.support.both_iterator import BothIterator
from cloudtrain.support.features import offer
from cloudtrain.support.renamed import renamed_arguments

if TYPE_CHECKING:
    from cloudtrain.bundle import ProgressCallback
    from cloudtrain.bundle.archive import Bundle
    from cloudtrain.failure_rules import Explanation
    from cloudtrain.job.recover_causes import RecoverCause
    from cloudtrain.runs.checkpoints import CheckpointFolder
    from cloudtrain.runs.comparison import Comparison
    from cloudtrain.runs.downloads import Download
    from cloudtrain.support.checks import Check


class Client(OfflineClient):
    """The verbs of the core, for one account. Those of features are functions that take a client.

    A backend is given by its name: `local` is this machine, `sandbox` the local AWS, `sagemaker` the account, `slurm` a
    Slurm cluster, of which `site` names one of the settings. A job is a `JobSpec`, or the path of a job file.

    Args:
        settings: The account; by default from environment and files, anew for each job.
        observer: Receives what the client reports while it works.
        home: Folder of local runs; by default CLOUDTRAIN_HOME, or the nearest `.cloudtrain`.
        stamp: Time in UTC and suffix of the ids of its runs, for a caller that must know an id before the submit; by
            default the current time, and the backend's choice.
        code: Code that was read before, for all its plans; by default each reads the folders of its job.
    """

    def backend(self, name: str, job: Job, *, site: str | None = None) -> Backend:
        """Return a backend that is ready for a submit of a job, or raise what it lacks."""
        return self.session.open(name, read_job(job, self.session.code), site=site)

    @renamed_arguments(spec="job")
    def check(
        self, job: Job, *, backend: str = DEFAULT_BACKEND, site: str | None = None
    ) -> tuple[Check, ...]:
        """Check, in parallel, that the account has everything that a submit needs. Nothing is changed.

        Raises:
            SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong.
            CloudError: There are no credentials.
        """
        loaded = read_job(job)
        opened = self.session.open(backend, loaded, site=site)
        plan, _ = plan_job(loaded, self.session.inputs(opened.target(), opened))
        return opened.start_checks(plan)()

    def rehearse(self, job: Job, options: Any = None, **given: Any) -> Any:
        """Forward to the feature, for programs of the previews: use `cloudtrain.rehearse(job, client=client)`."""
        _warn_of_forward("cloudtrain.rehearse(job, client=client)")
        return offer("rehearse")(self, job, options, **given)

    @renamed_arguments(spec="job")
    def submit(
        self,
        job: Job,
        *,
        backend: str = DEFAULT_BACKEND,
        site: str | None = None,
        skip_check: bool = False,
        new: bool = False,
        wait_for_capacity: float | None = None,
        install: bool = False,
        cuda_on_cpu: bool = False,
        recover: bool | None = None,
    ) -> Run:
        """Start a run and return it at once; the run continues without this process.

        If a run of the same request and code is live, that one is returned and nothing is started (`run.attached`),
        from whichever machine it was submitted. Local runs cost nothing: each submit starts one.

        Args:
            job: The job.
            backend: Where it runs. A sandbox is started in the background when none runs; only the checkpoint is
                checked first there, because a sandbox has no quotas and no resources of the real account.
            site: Name of the Slurm site; by default the only one of the settings.
            skip_check: Do not check the account first.
            new: Start another run beside one of the same request and code.
            wait_for_capacity: Seconds during which a run without capacity or quota is submitted again, with growing
                pauses; `submit` then returns when the run has its instances. Other errors are not retried.
            install: Install `code.requirements` for a local run or one on Slurm, in an environment that later runs use
                again.
            cuda_on_cpu: Give a local run on a machine without GPUs a stand-in for CUDA.
            recover: Continue the run by itself after outside causes, within `limits.recover` or its defaults; by default
                if the job has `limits.recover`.

        Returns:
            The run; `run.warnings` are those of its plan.

        Raises:
            SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong; nothing was started.
            CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
        """
        if not isinstance(recover, bool | None):
            raise UserError(
                f"recover: expected True, False or None, got {recover!r}",
                "its limits are limits.recover of the job",
            )
        loaded = read_job(job, self.session.code)
        if install:
            _refuse_install(backend)
        opened = self.session.open(
            backend, loaded, site=site, installs=install, cuda_on_cpu=cuda_on_cpu
        )
        inputs = dataclasses.replace(self.session.inputs(opened.target(), opened), is_start=True)
        plan, contents = plan_job(loaded, inputs)
        if facts_of(opened.name).is_billed:
            plan = add_receipt(plan, loaded, self.session.find_home(), is_submit=True)
        self.session.observer.on_plan(plan)
        if not new and (live := self._find_live_chain(opened, plan)) is not None:
            return live

        def pack() -> Bundle:
            from cloudtrain.bundle.archive import write_bundle

            folder = (self.session.home or make_home()) / BUNDLES_FOLDER
            return write_bundle(contents, folder, progress=self.session.observer.on_read)

        submission = Submission(
            opened, pack, self.session.observer, skip_check=skip_check, is_new=new
        )
        spec = loaded.valid_spec()
        if recover is None:
            # A controller continues its own runs.
            recover = spec.limits.recover is not None and self.session.sees_chains
        # A queue of Slurm continues its runs by itself.
        recover = recover and not facts_of(opened.name).has_sites
        try:
            run = submission.start(plan, wait_for_capacity)
        except NoCapacityError as error:
            if not recover:
                raise
            return self._as_chain(offer("recover_later")(self, spec, plan, error), plan, waits=True)
        self.session.record(run)
        if recover:
            return self._recover(run, plan, spec.limits.recover or Recover())
        return run

    def _recover(self, run: Run, plan: Plan, limits: Recover) -> Run:
        """Return a run that continues by itself from now on; a run on Slurm, whose queue does so, as it is."""
        if facts_of(run.backend).has_sites:
            return run
        offer("recover")(self, run)
        if not run.attached:
            self.session.observer.on_recover(limits)
        return self._as_chain(run.reference, plan, attached=run.attached)

    def _find_live_chain(self, backend: Backend, plan: Plan) -> Run | None:
        """Return the chain that continues the same request and code in the account; None without one."""
        if not (self.session.sees_chains and facts_of(backend.name).uses_account):
            return None
        folder = find_live_chain(plan.identity, backend.name, self.session.context().homes)
        if folder is None:
            return None
        run = self._as_chain(f"{backend.name}:{folder.name}", plan, attached=True)
        offer("recover")(self, run)
        return run

    def _as_chain(
        self, reference: str, plan: Plan, *, attached: bool = False, waits: bool = False
    ) -> Run:
        """Return a chain as a run."""
        backend, name = self.session.find(reference)
        return Run(name, backend, attached=attached, warnings=plan.warnings, waits=waits)

    @renamed_arguments(reference="run")
    def resume(
        self,
        run: RunLike,
        overrides: str | Iterable[str] = (),
        *,
        instances: int | None = None,
        from_step: int | None = None,
        skip_check: bool = False,
        new: bool = False,
    ) -> Run:
        """Start a new run from a complete checkpoint of one that has ended, by default the last.

        The new run has the same job, code, data and account. Neither job file nor code is needed on this machine.

        Args:
            run: The run that has ended.
            overrides: Changes of the job, `path=value` as the `--set` option takes them, such as `cluster.spot=true`.
            instances: Replaces `cluster.instances`.
            from_step: Step of the checkpoint to resume from.
            skip_check: Do not check the account first. The checkpoint is checked in any case.
            new: Start another run beside one of the same request.

        Raises:
            RunNotFoundError: There is no such run.
            NoCheckpointError: The run has left no complete checkpoint; nothing was started.
            UserError: The run has not ended, or has succeeded and nothing is left to train; nothing was started.
            SpecError: The changed job is not valid.
            CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
        """
        found, name = self.session.find(run)
        state = found.status(name).state
        if not state.is_final:
            hint = f"to stop it: cloudtrain stop {name}"
            raise UserError(
                f"{name} is {state}, and only a run that has ended can be resumed", hint
            )
        previous = PreviousRun(found.plan_of(name))
        spec = previous.job(overrides, instances=instances)
        backend = found.for_previous(previous)
        backend.check_ready()
        plan = self._plan_resumed(spec, previous, backend, from_step)
        if state is State.SUCCEEDED:
            _refuse_trained(name, plan.warnings)
        self.session.observer.on_plan(plan)
        try:
            checks = backend.check_resume(plan)
            raise_failed(
                checks, f"see what {name} has left: cloudtrain checkpoints {found.name}:{name}"
            )
        except (UnreachableError, CredentialsError):
            raise
        except (CloudError, UserError) as error:
            # A missing checkpoint has exit code 2 everywhere.
            raise NoCheckpointError(
                error.message, _hint_to_begin_again(previous, spec) or error.hint
            ) from None
        if state is State.SUCCEEDED:
            _refuse_trained(name, [check.warning for check in checks])
        if skip_check and checks:
            self.session.observer.on_checks(checks)
            plan = add_warnings(plan, checks)
        submission = Submission(
            backend, lambda: None, self.session.observer, skip_check=skip_check, is_new=new
        )
        run = self.session.record(submission.send(plan))
        # A controller continues its own runs.
        if spec.limits.recover is None or not self.session.sees_chains:
            return run
        return self._recover(run, plan, spec.limits.recover)

    def recover(
        self,
        run: RunLike,
        *,
        attempts: int | None = None,
        cost: float | str | None = None,
        time: float | str | None = None,
        on: Iterable[RecoverCause] | None = None,
    ) -> Run:
        """Continue a run by itself: after an outside cause, the next attempt begins at its newest checkpoint.

        A process in the background watches it, on whichever machine this was called last. What is not given is as
        `limits.recover` of the job says.

        Args:
            run: The run, its reference or its id. One whose process was killed is watched again.
            attempts: How many attempts may train, the first one included.
            cost: Most that all attempts together may cost, in US dollars or as in the job: `"500 USD"`.
            time: Time after which no other attempt begins, in seconds or as in the job: `"14d"`.
            on: The causes after which another attempt begins.

        Returns:
            The run with all of its attempts. The given object keeps showing the first one alone.

        Raises:
            RunNotFoundError: There is no such run.
            UserError: Its queue does so already, it has ended in a way that comes again, or other limits hold already.
            SpecError: A limit is not valid.
        """
        given = {
            "attempts": attempts,
            "cost": f"{cost} USD" if isinstance(cost, int | float) else cost,
            "time": f"{time:g}s" if isinstance(time, int | float) else time,
            "on": [on] if isinstance(on, str) else on and list(on),
        }
        found = self.get_run(run)
        limits = offer("recover")(
            self, found, **{key: each for key, each in given.items() if each is not None}
        )
        self.session.observer.on_recover(limits)
        return self.get_run(found.reference)

    def evaluate(self, *arguments: Any, **given: Any) -> Any:
        """Forward to the feature, for programs of the previews: use `cloudtrain.evaluate(run, client=client)`."""
        _warn_of_forward("cloudtrain.evaluate(run, client=client)")
        return offer("evaluate")(*arguments, client=self, **given)

    def _plan_resumed(
        self, spec: JobSpec, previous: PreviousRun, backend: Backend, from_step: int | None
    ) -> Plan:
        """Return the plan of a run that continues a previous one with its code."""
        resumed = previous.saved if spec.checkpoint.resume == previous.run else None
        if from_step is not None:
            if resumed is None:
                raise UserError(
                    "--from and checkpoint.resume name two checkpoints", "use only one of them"
                )
            from cloudtrain.runs.checkpoints import CheckpointFolder
            from cloudtrain.runs.result_parts import CHECKPOINTS

            backend.storage_of(previous.run).require_stored(previous.run, CHECKPOINTS)
            saved = CheckpointFolder(resumed.checkpoints, previous.run, backend.storage_environ())
            resumed = dataclasses.replace(resumed, checkpoints=saved.find(from_step).uri)
        inputs = self.session.inputs(backend.target(), backend)
        if resumed is not None:
            inputs = dataclasses.replace(inputs, resumed=resumed)
        return add_continuation(inputs.make_plan(spec, previous.code))

    @renamed_arguments(reference="run")
    def get_run(self, run: RunLike) -> Run:
        """Return a run; a `Run` is returned as it is.

        Args:
            run: A `Run`, a `Status`, or text: a run id, the beginning or end of one that no other run has,
                a job's name for its newest run, or `latest` for the newest local run; `<backend>:` may precede it.

        Raises:
            RunNotFoundError: No backend at hand has this run, or several runs have this name.
        """
        if isinstance(run, Run):
            return run
        backend, name = self.session.find(run)
        return Run(name, backend)

    @renamed_arguments(reference="run")
    def status(self, run: RunLike) -> Status:
        """Return the current status of a run.

        Raises:
            RunNotFoundError: There is no such run.
        """
        return self.get_run(run).status()

    @renamed_arguments(reference="run")
    def logs(
        self,
        run: RunLike,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> BothIterator[LogLine]:
        """Yield the log lines of a run's hosts that match a filter; with `follow` until the run has ended.

        Raises:
            RunNotFoundError: There is no such run.
        """
        return self.get_run(run).logs(follow=follow, only=only, on_trouble=on_trouble)

    def explain(self, run: RunLike) -> Explanation:
        """Explain why a run has failed: the first primary error of all ranks, its class, and what to do.

        Args:
            run: The run, or its reference.

        Raises:
            RunNotFoundError: There is no such run.
            CloudError: AWS refused or cannot be reached.
        """
        handle = self.get_run(run)
        return explain_with_advice(handle, handle.status())

    @renamed_arguments(reference="run")
    def download(
        self,
        run: RunLike,
        to: str | Path | None = None,
        *,
        what: str | Iterable[str] = (),
        step: int | str | None = None,
        unpack: bool = False,
        force: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Download:
        """Copy the model, outputs and checkpoints of a run into a folder: see `Run.download`.

        Raises:
            RunNotFoundError: There is no such run.
        """
        found = self.get_run(run)
        return found.download(
            to, what=what, step=step, unpack=unpack, force=force, progress=progress
        )

    @renamed_arguments(reference="run")
    def stop(self, run: RunLike) -> Run:
        """Ask a run to end and return it; `run.wait()` waits for the end.

        Raises:
            RunNotFoundError: There is no such run.
        """
        found = self.get_run(run)
        found.stop()
        return found

    @renamed_arguments(backends="backend")
    def list_runs(
        self, wanted: RunFilter = ALL_RUNS, *, backend: str | Iterable[str] | None = None
    ) -> Iterator[Status]:
        """Yield runs, newest first. Pages are fetched lazily.

        Args:
            wanted: Which runs; by default all.
            backend: One or several; by default all that are in use here and whose settings are complete.

        Raises:
            UserError: There is no such backend, or `wanted` is no filter.
            CloudError: AWS refused or cannot be reached, and the observer does not handle `on_unreachable`.
        """
        check_filter(wanted)
        named = choose_backends(backend)
        names = tuple(BACKENDS) if named is None else named
        found = self.session.list_runs(names, wanted, is_named=named is not None)
        return (status for _, status in found)

    def costs(self, **given: Any) -> Any:
        """Forward to the feature, for programs of the previews: use `cloudtrain.costs(client=client)`."""
        _warn_of_forward("cloudtrain.costs(client=client)")
        return offer("costs")(client=self, **given)

    @renamed_arguments(references="runs")
    def compare(self, runs: Iterable[RunLike]) -> Comparison:
        """Compare runs: the settings in which they differ, and the values of their metrics.

        Raises:
            RunNotFoundError: There is no such run.
            UserError: There are fewer than two runs.
            CloudError: AWS refused or cannot be reached.
        """
        from cloudtrain.runs.comparison import compare_runs

        if isinstance(runs, str | Run | Status):
            raise UserError("a comparison needs several runs", "give a list: compare([one, other])")
        return compare_runs(self.get_run(each) for each in runs)

    @renamed_arguments(reference="run")
    def checkpoint_folder(self, run: RunLike) -> CheckpointFolder:
        """Return the folder of a run's checkpoints, or the folder at a uri or path.

        Args:
            run: A run, `s3://bucket/prefix`, `file:///...` or a path that contains a slash.

        Raises:
            RunNotFoundError: There is no such run.
            CloudError: AWS refused or cannot be reached.
        """
        from cloudtrain.runs.checkpoints import CheckpointFolder

        reference = reference_of(run)
        if "/" in reference:
            return self._folder_at(reference)
        try:
            backend, name = self.session.find(reference)
        except RunNotFoundError:
            if not Path(reference).is_dir():
                raise
            return self._folder_at(reference)
        # The status names what still cannot be stored.
        backend.storage_of(name).finish_storing()
        return CheckpointFolder.of_plan(backend.plan_of(name), name, backend.storage_environ())

    def _folder_at(self, place: str) -> CheckpointFolder:
        """Return the folder of checkpoints at a uri or path."""
        from cloudtrain.runs.checkpoints import CheckpointFolder

        settings = self.session.load_settings()
        return CheckpointFolder(
            place, environ=make_storage_environ(os.environ, settings, settings.region)
        )


def _warn_of_forward(call: str) -> None:
    """Warn of a method that only forwards to a feature; the warning names the caller's line."""
    warnings.warn(
        f"this method goes with version 0.2: use {call}", DeprecationWarning, stacklevel=3
    )


def client_of(
    client: Client | None, settings: Settings | None = None, observer: Observer | None = None
) -> Client:
    """Return the client of a feature's call: the one that it is given, else a new one."""
    check_type("client", client, Client)
    return client or Client(settings, observer=observer)


def _refuse_trained(run: str, warnings: Iterable[str]) -> None:
    """Refuse to resume a run that has succeeded, where a warning says that its checkpoint is the end of the training.

    A run that has failed after its last step is resumed: it has not exported its model.

    Raises:
        UserError: Nothing would be trained.
    """
    for warning in warnings:
        if warning.startswith(NOTHING_LEFT):
            detail = warning.partition(";")[0]
            hint = (
                f"to train longer: cloudtrain resume {run} --set train.epochs=N, or train.steps=N"
            )
            raise UserError(f"{run} has succeeded, and {detail}", hint)


def _refuse_install(backend: str) -> None:
    """Refuse to install requirements for a run in containers, which install them themselves.

    Raises:
        UserError: The run is in containers.
    """
    if facts_of(backend).uses_account:
        hint = "leave it out: containers install code.requirements themselves"
        raise UserError(f"--install is for runs without containers, not for {backend}", hint)


def _hint_to_begin_again(previous: PreviousRun, spec: JobSpec) -> str:
    """Return how to begin where a run has begun that was resumed and has saved nothing; empty for any other run."""
    earlier = previous.resumed_run
    if not earlier or spec.checkpoint.resume != previous.run:
        return ""
    return f"it began from {earlier}; to begin there again: {begin_again(previous.run, earlier)}"
