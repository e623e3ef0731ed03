"""What the page of a sweep shows: its trials, the values of each field, and which fields mattered."""

from __future__ import annotations

from typing import Any

from cloudtrain.errors import MissingExtraError
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.domains import Choice, label_of
from cloudtrain.features.sweeps.results import SweepStatus
from cloudtrain.features.sweeps.space import Dimension, Space
from cloudtrain.features.sweeps.spec import SAGEMAKER_ENGINE
from cloudtrain.features.sweeps.stored_sweep import find_stored, known_sweeps
from cloudtrain.features.sweeps.study import check_optuna
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.runs.titles import metric_title

_LEAST_TRIALS = 4
"""Trials that have succeeded, below which an importance would be noise."""

_LEAST_POLL_SECONDS = 2.0
_MOST_SWEEPS = 50


def list_sweeps() -> list[str]:
    """Return the ids of the newest sweeps of this machine, the newest first."""
    return list(known_sweeps())[:_MOST_SWEEPS]


def sweep_row(name: str) -> dict[str, Any]:
    """Return what the list of runs shows of a sweep. Makes no calls: of a tuning job, the state is None.

    Raises:
        RunNotFoundError: There is no such sweep.
    """
    stored = find_stored(name)
    spec = stored.sweep.spec
    row: dict[str, Any] = {
        "sweep": stored.id,
        "backend": stored.backend,
        "name": spec.name or stored.sweep.job.name,
        "state": None,
        "is_final": False,
        "metric": spec.objective.metric,
        "metric_title": metric_title(spec.objective.metric),
        "is_maximized": spec.objective.is_maximized,
        "best": None,
        "planned_trials": stored.planned_trials,
    }
    if spec.engine == SAGEMAKER_ENGINE:
        return row
    try:
        status = service.read_status(stored)
    except MissingExtraError:
        # Without Optuna the record of the trials cannot be read; their runs are in the list.
        return row
    best = status.best
    return row | {
        "state": str(status.state),
        "is_final": status.state.is_final,
        "best": None if best is None else best.objective,
    }


def sweep_document(name: str) -> dict[str, Any]:
    """Return what the page of a sweep shows.

    Raises:
        RunNotFoundError: There is no such sweep.
        CloudError: AWS refused or cannot be reached.
    """
    stored = find_stored(name)
    engine = service.engine_of_stored(stored)
    status, _ = engine.look(stored)
    space = Space.of(stored.sweep.spec.space)
    document = status.to_json()
    document["objective"]["title"] = metric_title(stored.sweep.spec.objective.metric)
    return {
        **document,
        "name": stored.sweep.spec.name or stored.sweep.job.name,
        "strategy": stored.sweep.spec.strategy,
        "is_final": status.state.is_final,
        "poll_seconds": max(_LEAST_POLL_SECONDS, engine.poll_seconds),
        "axes": [_axis(each, status) for each in space.dimensions],
        "importance": importance_of(status, space),
    }


def importance_of(status: SweepStatus, space: Space) -> dict[str, float] | None:
    """Return how much each field mattered, as shares that add up to 1, by Optuna's PED-ANOVA.

    None where too few trials have succeeded, or Optuna is not installed. Fields with a condition are left out.
    """
    dimensions = [each for each in space.dimensions if not each.conditions]
    succeeded = [
        each
        for each in status.trials
        if each.state is TrialState.SUCCEEDED and each.objective is not None
    ]
    if len(succeeded) < _LEAST_TRIALS or len(dimensions) < 2:  # noqa: PLR2004 (the share of one field is always 1)
        return None
    try:
        check_optuna()
    except MissingExtraError:
        return None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize" if status.is_maximized else "minimize")
    distributions = {each.path: _distribution(each) for each in dimensions}
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={each.path: _parameter(each, trial) for each in dimensions},
                distributions=distributions,
                value=trial.objective,
            )
            for trial in succeeded
        ]
    )
    shares = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    return {path: float(share) for path, share in shares.items()}


def _distribution(dimension: Dimension) -> Any:
    import optuna

    domain = dimension.domain
    if isinstance(domain, Choice):
        return optuna.distributions.CategoricalDistribution(domain.labels)
    if domain.is_integer:
        step = int(domain.step or 1)
        return optuna.distributions.IntDistribution(
            int(domain.low), int(domain.high), domain.is_log, step
        )
    return optuna.distributions.FloatDistribution(
        domain.low, domain.high, domain.is_log, domain.step
    )


def _parameter(dimension: Dimension, trial: Trial) -> Any:
    """Return a trial's value as Optuna names it."""
    value = trial.values[dimension.path]
    return label_of(value) if isinstance(dimension.domain, Choice) else value


def _axis(dimension: Dimension, status: SweepStatus) -> dict[str, Any]:
    """Return the axis of a field: for choices their labels, and the position of each trial's value."""
    values = [trial.values.get(dimension.path) for trial in status.trials]
    if not isinstance(dimension.domain, Choice):
        return {"name": dimension.path, "is_log": dimension.domain.is_log, "values": values}
    labels = [str(each) for each in dimension.domain.labels]
    places = [None if value is None else labels.index(str(label_of(value))) for value in values]
    return {"name": dimension.path, "labels": labels, "values": places}
