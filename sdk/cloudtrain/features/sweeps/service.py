"""Sweeps as users start and find them: plan, run or continue, status and stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from cloudtrain.bundle import Contents
from cloudtrain.client.client import Client
from cloudtrain.client.home import find_home, make_home
from cloudtrain.client.removal import BestTrial
from cloudtrain.controllers.kept_code import read_code
from cloudtrain.controllers.process import start_controller
from cloudtrain.errors import CloudtrainError, SpecError
from cloudtrain.features.sweeps.controller import Controller
from cloudtrain.features.sweeps.loader import LoadedSweep
from cloudtrain.features.sweeps.planning import SweepPlan, plan_sweep
from cloudtrain.features.sweeps.results import SweepState, SweepStatus
from cloudtrain.features.sweeps.shared_copy import SharedSweeps
from cloudtrain.features.sweeps.stored_sweep import (
    SWEEP_FILE,
    SWEEPS_FOLDER,
    StoredSweep,
    identity_of,
    known_sweeps,
)
from cloudtrain.features.sweeps.study import Study, check_optuna
from cloudtrain.features.sweeps.tuning_engine import TuningEngine
from cloudtrain.job.spec import JobSpec
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import DEFAULT_BACKEND, backend_option, facts_of


def plan(
    sweep: LoadedSweep,
    *,
    backend: str = DEFAULT_BACKEND,
    settings: Settings | None = None,
    code: Contents | None = None,
) -> SweepPlan:
    """Return the plan of a sweep. Offline.

    Args:
        sweep: The sweep.
        backend: Where its trials would run.
        settings: The account; None for the settings of environment and files.
        code: Its code; by default that of the job's folders is read.

    Raises:
        SpecError: A value of the space, or the job itself, cannot work.
        BundleError: The code folder cannot be packed.
    """
    uses_account = facts_of(backend).uses_account
    if sweep.is_tuning and not uses_account:
        message = "a tuning job runs on SageMaker or in the sandbox, not on this machine"
        raise SpecError([sweep.problem(("engine",), message, "use engine: optuna, or --sandbox")])
    planner = Client(settings, code=code).planner(sweep.job, backend=backend)
    return plan_sweep(sweep, planner, is_free=not uses_account)


def _find_unfinished(sweep: LoadedSweep, backend: str) -> StoredSweep | None:
    """Return the newest sweep of the same file, job and backend that has not ended; None if there is none."""
    home, identity = find_home(), identity_of(sweep, backend)
    for name, folder in known_sweeps().items():
        if name.endswith(identity[:6]) and folder.parent.parent == home:
            stored = StoredSweep.read(folder)
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
    if not sweep.is_tuning:
        check_optuna()
    known = None if new else _find_unfinished(sweep, backend)
    # The name of a tuning job finds that of another machine.
    shared = (
        None
        if sweep.is_tuning or known is not None
        else _shared_sweeps(sweep.job, backend, settings)
    )
    if not new and shared is not None:
        known = _adopt_unfinished(shared, sweep, backend)
    if known is not None:
        return known, None
    code = None if sweep.is_tuning else read_code(sweep.job, find_home())
    planned = plan(sweep, backend=backend, settings=settings, code=code)
    if sweep.is_tuning:
        Client(settings).backend(backend, sweep.job)
    lowest = 0.0 if planned.trial_usd is None else planned.trial_usd[0]
    stored = StoredSweep.create(
        make_home(), sweep, backend, (planned.digest, lowest, planned.trials)
    )
    if code is not None:
        Study(stored).close()
        stored.code.keep(code)
    return stored, planned


def _shared_sweeps(
    job: JobSpec, backend: str, settings: Settings | None, code: Contents | None = None
) -> SharedSweeps | None:
    """Return where the account's sweeps are copied to; None for local sweeps.

    Raises:
        CloudtrainError: The backend is not ready, for example because settings are missing.
    """
    opened = Client(settings, code=code).backend(backend, job)
    if not facts_of(backend).uses_account:
        return None
    from cloudtrain.aws.errors import aws_errors
    from cloudtrain.aws.s3_download import make_s3_client_of

    account = opened.target().settings
    with aws_errors("connect to S3"):
        s3 = make_s3_client_of(opened.storage_environ())
    return SharedSweeps(s3, f"s3://{account.bucket}/{account.prefix}")


def _adopt_unfinished(shared: SharedSweeps, sweep: LoadedSweep, backend: str) -> StoredSweep | None:
    """Return the newest unfinished sweep of the same content that another machine has started; None without."""
    identity, home = identity_of(sweep, backend), make_home()
    for name in shared.ids():
        if not name.endswith(identity[:6]) or (home / SWEEPS_FOLDER / name).exists():
            continue
        copy = shared.copy_of(name)
        content = copy.read_record(SWEEP_FILE)
        if content is not None and content.get("identity") == identity:
            stored = StoredSweep.adopt(home, content, sweep.job.base)
            copy.fetch_state(stored.database)
            if not read_status(stored).state.is_final:
                return stored
    return None


def start(
    stored: StoredSweep,
    environ: Mapping[str, str] | None = None,
    *,
    settings: Settings | None = None,
    new: bool = False,
) -> None:
    """Start a sweep: its tuning job, or its controller in the background. If it runs already, do nothing.

    Args:
        stored: The sweep.
        environ: Additional environment variables of a controller, such as settings of the account.
        settings: The account of a tuning job.
        new: Create a tuning job beside an unfinished one of an equal sweep.

    Raises:
        CloudtrainError: It cannot start, or the controller ended at once; or its code is not on this machine any more.
    """
    if stored.sweep.is_tuning:
        TuningEngine(stored, settings).start(new=new)
        return
    if stored.is_controlled:
        return
    stored.stop_file.unlink(missing_ok=True)
    stored.code.read()
    start_controller(stored, "cloudtrain.features.sweeps", environ or {})


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
        code = stored.code.read()
        shared = _shared_sweeps(stored.sweep.job, stored.backend, settings, code)
        copy = None if shared is None else shared.copy_of(stored.id)
        if copy is not None:
            stack.enter_context(copy.lock())
            copy.fetch_state(stored.database)
        study = stack.enter_context(contextlib.closing(Study(stored)))

        def publish() -> None:
            if copy is not None:
                copy.store_state(stored.database)

        if study.end is None:
            if copy is not None:
                copy.store_record(stored.folder / SWEEP_FILE)
                copy.store_state(stored.database)
            Controller(
                *(stored, study, code),
                settings=settings,
                report=report,
                score=score,
                on_save=publish,
            ).run()


def read_status(stored: StoredSweep) -> SweepStatus:
    """Return the status of a sweep."""
    if stored.sweep.is_tuning:
        return TuningEngine(stored).status()
    with contextlib.closing(Study(stored)) as study:
        is_controlled = (
            stored.is_controlled
        )  # before the end is read, which the controller may record meanwhile
        end, trials = study.end, study.trials()
    pause = stored.read_pause()
    if end is not None:
        state, reason = SweepState(end[0]), end[1]
    elif is_controlled:
        state, reason = SweepState.RUNNING, f"paused: {pause}" if pause else ""
    else:
        state = SweepState.INTERRUPTED
        command = f"cloudtrain sweep run FILE{backend_option(stored.backend)}"
        reason = f"{pause or 'its controller has ended'}; to continue: {command}"
    return SweepStatus.of(stored, state, reason, trials)


def find_best_trials() -> dict[str, BestTrial]:
    """Return the best trial of each local sweep that has one, by the sweep's objective."""
    found = {}
    for name, folder in known_sweeps().items():
        # Without Optuna, or with a damaged record, the best trial of a sweep is unknown.
        with contextlib.suppress(CloudtrainError):
            stored = StoredSweep.read(folder)
            if facts_of(stored.backend).uses_account:
                continue
            best = read_status(stored).best
            if best is not None:
                metric = stored.sweep.spec.objective.metric
                reason = f"best {metric} of the sweep {name}: {best.objective:.4g}"
                found[name] = BestTrial(best.run, reason)
    return found


def stop(stored: StoredSweep) -> None:
    """Ask a sweep to stop, and its active runs. Without a controller, this process stops them and waits."""
    if stored.sweep.is_tuning:
        TuningEngine(stored).stop()
        return
    stored.stop_file.touch()
    if not stored.is_controlled:
        control(stored)
