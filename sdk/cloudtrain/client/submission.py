"""Verbs that start a run: submit and resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cloudtrain.bundle import BUNDLES_FOLDER
from cloudtrain.client.account import find_settings
from cloudtrain.client.backend_lookup import find_backend, local_backend, sagemaker_backend, sandbox_backend
from cloudtrain.client.callbacks import NO_CALLBACKS, Callbacks
from cloudtrain.client.capacity import FIRST_PAUSE_SECONDS
from cloudtrain.client.check_results import add_warnings, raise_failed
from cloudtrain.client.home import find_home, make_home
from cloudtrain.client.jobs import validate
from cloudtrain.client.plan_builder import find_resume_source, plan_code, plan_with_contents, stamp_data
from cloudtrain.client.resume_checks import (
    add_continuation,
    reject_missing_checkpoint,
    reject_other_training,
    storage_environ,
)
from cloudtrain.client.sagemaker_submission import SageMakerSubmission
from cloudtrain.client.sandbox import SANDBOX, find_sandbox, start_sandbox
from cloudtrain.errors import CloudError, UserError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import LOCAL
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.runs.checkpoints import CheckpointFolder
from cloudtrain.runs.previous_run import PreviousRun
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import BUNDLE_FILE

if TYPE_CHECKING:
    from cloudtrain.backends.sagemaker import SageMakerBackend
    from cloudtrain.bundle.archive import Bundle


def submit(
    spec: JobSpec | str | Path,
    *,
    local: bool = False,
    sandbox: bool = False,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    wait_for_capacity: float | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Run:
    """Start a run and return it at once; the run continues without this process.

    If a run of the same request and code is live, that one is returned and nothing is started (`run.attached`), from
    whichever machine it was submitted. Local runs cost nothing: each submit starts one.

    Args:
        spec: The job, or the path of its file.
        local: Run on this machine instead of SageMaker.
        sandbox: Send to the local AWS; one is started in the background when none runs. Only the checkpoint is checked
            first, because a sandbox has no quotas and no resources of the real account.
        settings: The account; by default from environment and files.
        skip_check: Do not check the account first.
        new: Start another run beside one of the same request and code.
        wait_for_capacity: Seconds during which a run without capacity or quota is submitted again, with growing
            pauses; `submit` then returns when the run has its instances. Other errors are not retried.
        callbacks: What to call during the submit, such as `Callbacks(on_plan=...)`.

    Returns:
        The run; `run.warnings` are those of its plan.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong; nothing was started.
        CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
    """
    if sandbox:
        found = start_sandbox()
        settings = found.settings(settings or find_settings(spec))
    spec = spec if isinstance(spec, JobSpec) else validate(spec, local=local, settings=settings)
    settings = settings or find_settings(spec)
    cloud = None if local else sandbox_backend(found, settings) if sandbox else sagemaker_backend(settings)
    if cloud is not None:
        cloud.check_ready()
    decided, contents = plan_with_contents(
        spec, local=local, settings=settings, progress=callbacks.progress, cloud=cloud
    )
    if local:
        reject_missing_checkpoint(decided, settings)
        if decided.config.task is not None:  # a script need not load the checkpoints there
            reject_other_training(decided)
    callbacks.on_plan(decided)
    from cloudtrain.bundle.archive import write_bundle

    def pack() -> Bundle:
        return write_bundle(contents, make_home() / BUNDLES_FOLDER, progress=callbacks.progress)

    if cloud is None:
        return local_backend().submit(decided, pack()).with_warnings(decided.warnings)
    submission = SageMakerSubmission(cloud, pack, skip_check=skip_check, new=new, callbacks=callbacks)
    if wait_for_capacity is None:
        return submission.submit(decided)
    first_pause = cloud.poll_seconds if sandbox else FIRST_PAUSE_SECONDS
    return submission.submit_until_capacity(decided, wait_for_capacity, first_pause=first_pause)


def resume(
    reference: str,
    overrides: Iterable[str] = (),
    *,
    instances: int | None = None,
    from_step: int | None = None,
    settings: Settings | None = None,
    skip_check: bool = False,
    new: bool = False,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Run:
    """Start a new run from a complete checkpoint of one that has ended, by default the last.

    The new run has the same job, code, data and account. Neither job file nor code is needed on this machine.

    Args:
        reference: The run that has ended.
        overrides: Changes of the job, `path=value` as the `--set` option takes them, such as `cluster.spot=true`.
        instances: Replaces `cluster.instances`.
        from_step: Step of the checkpoint to resume from.
        settings: Region and transport; by default from environment and files.
        skip_check: Do not check the account first. The checkpoint is checked in any case.
        new: Start another run beside one of the same request.
        callbacks: What to call during the resume, such as `Callbacks(on_plan=...)`.

    Raises:
        RunNotFoundError: There is no such run.
        UserError: The run has not ended, or has left no complete checkpoint; nothing was started.
        SpecError: The changed job is not valid.
        CloudError: A check failed, AWS refused or cannot be reached; nothing was started.
    """
    backend, run = find_backend(reference, settings)
    state = backend.status(run).state
    if not state.is_final:
        raise UserError(
            f"{run} is {state}, and only a run that has ended can be resumed", f"to stop it: cloudtrain stop {run}"
        )
    previous = PreviousRun(backend.plan_of(run))
    spec = previous.job(overrides, instances=instances)
    resumed = previous.saved if spec.checkpoint.resume == run else None
    if from_step is not None:
        if resumed is None:
            raise UserError("--from and checkpoint.resume name two checkpoints", "use only one of them")
        saved = CheckpointFolder(resumed.checkpoints, run, storage_environ(backend.name, settings))
        resumed = dataclasses.replace(resumed, checkpoints=saved.find(from_step).uri)
    current = settings or find_settings()
    if backend.name == LOCAL:
        return _resume_local(previous, spec, resumed, current, callbacks)
    if backend.name == SANDBOX and (found := find_sandbox()) is not None:
        current = found.settings(current)
    account = previous.settings(current)
    cloud = cast("SageMakerBackend", backend).with_settings(account)
    cloud.check_ready()
    data_stamp = stamp_data(spec)
    resumed = resumed or find_resume_source(spec, account, local=False, cloud=cloud)
    decided = plan_code(spec, previous.code, local=False, settings=account, data_stamp=data_stamp, resumed=resumed)
    callbacks.on_plan(decided)
    hint = f"see what {run} has left: cloudtrain checkpoints {backend.name}:{run}"
    try:
        raise_failed(checks := cloud.check_resume(decided), hint)
    except CloudError as error:
        raise UserError(error.message, error.hint) from None  # the exit code of a missing checkpoint is 2 everywhere
    if skip_check:
        callbacks.on_checks(checks)
        decided = add_warnings(decided, checks)
    return SageMakerSubmission(cloud, None, skip_check=skip_check, new=new, callbacks=callbacks).submit(decided)


def _resume_local(
    previous: PreviousRun, spec: JobSpec, resumed: ResumeSource | None, settings: Settings, callbacks: Callbacks
) -> Run:
    """Start a local run from the checkpoints and the packed code of another one.

    Args:
        previous: The run that has ended.
        spec: The job, with its changes.
        resumed: Where the checkpoints are.
        settings: The account; it names the owners of buckets.
        callbacks: What to call.

    Raises:
        UserError: The checkpoint or the code does not exist.
    """
    from cloudtrain.bundle.archive import Bundle

    again = f"cloudtrain submit --local JOB --set checkpoint.resume={previous.run}"
    decided = add_continuation(plan_code(spec, previous.code, local=True, settings=settings, resumed=resumed))
    reject_missing_checkpoint(decided, settings)
    archive = find_home() / BUNDLES_FOLDER / previous.code.digest / BUNDLE_FILE
    if not archive.is_file():
        raise UserError(f"the code of {previous.run} was deleted: {archive}", f"to use the current code: {again}")
    callbacks.on_plan(decided)
    return local_backend().submit(decided, Bundle(archive, previous.code)).with_warnings(decided.warnings)
