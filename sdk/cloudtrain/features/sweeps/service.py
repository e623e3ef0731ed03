"""Sweeps as users start and find them: plan, run or continue, status and stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from cloudtrain.client.home import find_home
from cloudtrain.client.removal import BestTrial
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.sweeps.controller_engine import ControllerEngine
from cloudtrain.features.sweeps.engine import Engine
from cloudtrain.features.sweeps.loader import LoadedSweep
from cloudtrain.features.sweeps.planning import SweepPlan
from cloudtrain.features.sweeps.results import SweepStatus
from cloudtrain.features.sweeps.spec import SAGEMAKER_ENGINE
from cloudtrain.features.sweeps.stored_sweep import StoredSweep, identity_of, known_sweeps
from cloudtrain.features.sweeps.tuning_engine import TuningEngine
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import DEFAULT_BACKEND, facts_of
from cloudtrain.support.units import format_number


def engine_of(
    sweep: LoadedSweep, backend: str, settings: Settings | None = None, home: Path | None = None
) -> Engine:
    """Return the engine that a sweep has chosen."""
    if sweep.spec.engine == SAGEMAKER_ENGINE:
        return TuningEngine(sweep, backend, settings, home)
    return ControllerEngine(sweep, backend, settings, home)


def engine_of_stored(stored: StoredSweep, settings: Settings | None = None) -> Engine:
    """Return the engine of a sweep that has begun."""
    return engine_of(stored.sweep, stored.backend, settings, stored.home)


def plan(
    sweep: LoadedSweep, *, backend: str = DEFAULT_BACKEND, settings: Settings | None = None
) -> SweepPlan:
    """Return the plan of a sweep. Offline.

    Args:
        sweep: The sweep.
        backend: Where its trials would run.
        settings: The account; None for the settings of environment and files.

    Raises:
        SpecError: A value of the space, or the job itself, cannot work.
        BundleError: The code folder cannot be packed.
    """
    return engine_of(sweep, backend, settings).plan()


def _find_unfinished(sweep: LoadedSweep, backend: str, home: Path) -> StoredSweep | None:
    """Return the newest sweep of the same file, job and backend that has not ended; None if there is none."""
    identity = identity_of(sweep, backend)
    for name, folder in known_sweeps(home).items():
        if name.endswith(identity[:6]):
            stored = StoredSweep.read(folder)
            if stored.identity == identity and not read_status(stored).state.is_final:
                return stored
    return None


def open_sweep(
    sweep: LoadedSweep,
    *,
    backend: str,
    settings: Settings | None = None,
    home: Path | None = None,
    new: bool = False,
) -> tuple[StoredSweep, SweepPlan | None]:
    """Return the unfinished sweep of the same content, or plan a new one and create its folder.

    Returns:
        The sweep, and the plan of a new one.

    Raises:
        SpecError, BundleError, MissingExtraError: The input is wrong; nothing was created.
    """
    engine = engine_of(sweep, backend, settings, home)
    known = None if new else _find_unfinished(sweep, backend, home or find_home())
    known = known or engine.find_elsewhere(new=new)
    return engine.create() if known is None else (known, None)


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
    engine_of_stored(stored, settings).start(stored, environ or {}, new=new)


def control(
    stored: StoredSweep,
    *,
    report: Callable[[str], None] = lambda _: None,
    score: Callable[[Run], float] | None = None,
    settings: Settings | None = None,
) -> None:
    """Be the controller of a sweep until it has ended. If another process is, do nothing.

    Raises:
        CloudtrainError: The sweep cannot continue; its runs do.
    """
    engine = ControllerEngine(stored.sweep, stored.backend, settings, stored.home)
    engine.control(stored, report, score)


def read_status(stored: StoredSweep) -> SweepStatus:
    """Return the status of a sweep."""
    return engine_of_stored(stored).look(stored)[0]


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
                reason = (
                    f"best {metric} of the sweep {name}: {format_number(best.objective or 0.0)}"
                )
                found[name] = BestTrial(best.run, reason)
    return found
