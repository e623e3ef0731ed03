"""Sweeps as users start and find them: plan, run or continue, status, stop, and the job of a trial."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.client.client import Client
from cloudtrain.client.home import HOME_VARIABLE, find_home, make_home, other_homes
from cloudtrain.errors import CloudtrainError, SpecError, UserError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import LOCAL, SAGEMAKER
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain.sweeps.controller import Controller, Surroundings, status_of
from cloudtrain.sweeps.loader import LoadedSweep
from cloudtrain.sweeps.planning import SweepPlan, length_field, plan_sweep
from cloudtrain.sweeps.results import SweepState, SweepStatus
from cloudtrain.sweeps.shared_copy import SharedSweeps
from cloudtrain.sweeps.spec import SAGEMAKER_ENGINE
from cloudtrain.sweeps.stored_sweep import SWEEPS_FOLDER, StoredSweep, find_stored, identity_of, stored_ids
from cloudtrain.sweeps.study import Study, check_optuna, create_study_file
from cloudtrain.sweeps.trial import Trial
from cloudtrain.sweeps.tuning_engine import TuningEngine, check_tuning_budget

_START_SECONDS = 60.0
_POLL_SECONDS = 0.05


def plan(sweep: LoadedSweep, *, backend: str = SAGEMAKER, settings: Settings | None = None) -> SweepPlan:
    """Return the plan of a sweep. Offline.

    Raises:
        SpecError: A value of the space, or the job itself, cannot work.
        BundleError: The code folder cannot be packed.
    """
    is_tuning = sweep.spec.engine == SAGEMAKER_ENGINE
    if is_tuning and backend == LOCAL:
        message = "a tuning job runs on SageMaker or in the sandbox, not on this machine"
        raise SpecError([sweep.problem(("engine",), message, "use engine: optuna, or --sandbox")])
    planner = Client(settings).planner(sweep.job, backend=backend)
    planned = plan_sweep(sweep, planner, is_free=backend == LOCAL)
    if is_tuning and (problems := check_tuning_budget(sweep, planned)):
        raise SpecError(problems)
    return planned


def find(name: str) -> StoredSweep:
    """Return the sweep of a name: an id, the beginning or end of one, a sweep's name, or `latest`.

    Raises:
        RunNotFoundError: There is none, or several have this name.
    """
    return find_stored((find_home(), *other_homes()), name)


def find_unfinished(sweep: LoadedSweep, backend: str) -> StoredSweep | None:
    """Return the newest sweep of the same file, job and backend that has not ended; None if there is none."""
    home, identity = find_home(), identity_of(sweep, backend)
    for name in stored_ids(home):
        if name.endswith(identity[:6]):
            stored = StoredSweep.read(home / SWEEPS_FOLDER / name)
            if stored.identity == identity and not read_status(stored).state.is_final:
                return stored
    return None


def open_sweep(
    sweep: LoadedSweep, *, backend: str, settings: Settings | None = None, new: bool = False
) -> tuple[StoredSweep, SweepPlan | None]:
    """Return the unfinished sweep of the same content, or plan a new one and create its folder.

    Returns:
        The sweep, and the plan of a new one.

    Raises:
        SpecError, BundleError, MissingExtraError: The input is wrong; nothing was created.
    """
    is_tuning = sweep.spec.engine == SAGEMAKER_ENGINE
    if not is_tuning:
        check_optuna()
    known = None if new else find_unfinished(sweep, backend)
    if known is not None:
        return known, None
    shared = None if is_tuning else _shared_sweeps(sweep.job, backend, settings)
    adopted = None if new or shared is None else _adopt_unfinished(shared, sweep, backend)
    if adopted is not None:
        return adopted, None
    planned = plan(sweep, backend=backend, settings=settings)
    if is_tuning:  # its name finds the tuning job of another machine
        Client(settings).backend(backend, sweep.job)
    lowest = 0.0 if planned.trial_usd is None else planned.trial_usd[0]
    made = (planned.digest, lowest, planned.trials)
    stored = StoredSweep.create(make_home(), sweep, backend, made)
    if not is_tuning:
        create_study_file(stored.folder, stored.id, sweep.spec)
    return stored, planned


def _shared_sweeps(job: JobSpec, backend: str, settings: Settings | None) -> SharedSweeps | None:
    """Return where the account's sweeps are copied to; None for local sweeps.

    Raises:
        CloudtrainError: The backend is not ready, for example because settings are missing.
    """
    opened = Client(settings).backend(backend, job)
    if backend == LOCAL:
        return None
    from cloudtrain.aws.s3_download import make_s3_client_of

    account = opened.target().settings
    return SharedSweeps(make_s3_client_of(opened.storage_environ()), f"s3://{account.bucket}/{account.prefix}")


def _adopt_unfinished(shared: SharedSweeps, sweep: LoadedSweep, backend: str) -> StoredSweep | None:
    """Return the newest unfinished sweep of the same content that another machine has started; None without."""
    identity, home = identity_of(sweep, backend), make_home()
    for name in shared.ids():
        if not name.endswith(identity[:6]) or (home / SWEEPS_FOLDER / name).exists():
            continue
        copy = shared.copy_of(name)
        content = copy.read_file()
        if content is not None and content.get("identity") == identity:
            stored = StoredSweep.adopt(home, content, sweep.job.base)
            copy.fetch_database(stored.folder)
            if not read_status(stored).state.is_final:
                return stored
    return None


def start(
    stored: StoredSweep,
    environ: Mapping[str, str] | None = None,
    *,
    settings: Settings | None = None,
    new: bool = False,
) -> bool:
    """Start a sweep: its tuning job, or its controller in the background; return False if it runs already.

    Args:
        stored: The sweep.
        environ: Additional environment variables of a controller, such as settings of the account.
        settings: The account of a tuning job.
        new: Create a tuning job beside an unfinished one of an equal sweep.

    Raises:
        CloudtrainError: It cannot start.
    """
    if stored.sweep.spec.engine == SAGEMAKER_ENGINE:
        return TuningEngine(stored, settings).start(new=new)
    return start_controller(stored, environ)


def is_running(stored: StoredSweep) -> bool:
    """Return whether a controller of a sweep runs on this machine, or its tuning job has not ended."""
    if stored.sweep.spec.engine == SAGEMAKER_ENGINE:
        return read_status(stored).state is SweepState.RUNNING
    return stored.is_controlled


def start_controller(stored: StoredSweep, environ: Mapping[str, str] | None = None) -> bool:
    """Start the controller of a sweep in the background; return False if it runs already.

    Args:
        stored: The sweep.
        environ: Additional environment variables, such as settings of the account.

    Raises:
        CloudtrainError: The controller ended at once.
    """
    if stored.is_controlled:
        return False
    stored.clear_stop()
    with stored.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cloudtrain.sweeps", str(stored.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environ or {}), HOME_VARIABLE: str(_home_of(stored))},
        )
    deadline = time.monotonic() + _START_SECONDS
    while not stored.is_controlled:
        # A sweep that has nothing left to do ends before its lock is seen.
        if process.poll() is not None:
            if process.returncode != 0:
                raise _failed_start(stored)
            break
        if time.monotonic() > deadline:
            raise _failed_start(stored)
        time.sleep(_POLL_SECONDS)
    process.returncode = 0  # it outlives this process
    return True


def _failed_start(stored: StoredSweep) -> CloudtrainError:
    tail = stored.log.read_text(encoding="utf-8", errors="replace").strip()[-2000:]
    return UserError(f"the controller of {stored.id} did not start:\n{tail}", f"see {stored.log}")


def control(
    stored: StoredSweep,
    *,
    report: Callable[[str], None] = lambda _: None,
    score: Callable[[Run], float] | None = None,
    settings: Settings | None = None,
) -> None:
    """Control a sweep in this process until it has ended. If another process does so, do nothing.

    Raises:
        CloudtrainError: The sweep cannot continue; its runs do.
    """
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(stored.lock()):
            return
        shared = _shared_sweeps(stored.sweep.job, stored.backend, settings)
        copy = None if shared is None else shared.copy_of(stored.id)
        lock = None if copy is None else stack.enter_context(copy.lock())
        if copy is not None:
            copy.fetch_database(stored.folder)
        create_study_file(stored.folder, stored.id, stored.sweep.spec)
        study = Study(stored.folder, stored.id, stored.sweep.spec)
        stack.callback(study.close)

        def publish(changed: Study) -> None:
            if copy is not None and lock is not None:
                lock.check()
                copy.publish_database(stored.folder, changed.file)

        if study.end is None:
            if copy is not None:
                copy.publish(stored.folder, study.file)
            Controller(stored, study, Surroundings(_home_of(stored), settings, report, score, publish)).run()


def read_status(stored: StoredSweep) -> SweepStatus:
    """Return the status of a sweep."""
    if stored.sweep.spec.engine == SAGEMAKER_ENGINE:
        return TuningEngine(stored).status()
    create_study_file(stored.folder, stored.id, stored.sweep.spec)  # whose creator was killed
    study = Study(stored.folder, stored.id, stored.sweep.spec)
    try:
        return status_of(stored, study)
    finally:
        study.close()


def stop(stored: StoredSweep) -> None:
    """Ask a sweep to stop, and its active runs. Without a controller, this process stops them and waits."""
    if stored.sweep.spec.engine == SAGEMAKER_ENGINE:
        TuningEngine(stored).stop()
        return
    stored.request_stop()
    if not stored.is_controlled:
        control(stored)


def job_of(stored: StoredSweep, trial: Trial) -> JobSpec:
    """Return the job of a trial, without the tags of the sweep."""
    values: dict[str, Any] = dict(trial.values)
    if trial.length is not None:
        values[length_field(stored.sweep.job)] = trial.length
    return stored.sweep.job.with_values(values)


def _home_of(stored: StoredSweep) -> Path:
    return stored.folder.parent.parent
