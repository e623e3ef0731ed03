"""The plan of a sweep, made before its first trial: what can be started, and what it costs at most.

Every bound and every choice of each field is planned with the job's own values for the other fields. A value that the
plan refuses is a mistake in the file. Then 200 samples of the sweep's seed are planned; a combination that is refused
becomes a refused trial later, so only their share is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cloudtrain.client.planning_inputs import Planner
from cloudtrain.errors import Problem, SpecError
from cloudtrain.features.sweeps.domains import Choice
from cloudtrain.features.sweeps.halving import length_field
from cloudtrain.features.sweeps.loader import LoadedSweep
from cloudtrain.features.sweeps.space import Dimension, Space
from cloudtrain.features.sweeps.spec import GRID, SweepSpec
from cloudtrain.features.sweeps.study import grid_of
from cloudtrain.features.sweeps.trial import Trial
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_usd
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_FOLDERS_OF_CODE = ("code.directory", "code.include")
SAMPLES = 200
MOST_GRID = 10_000


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep would do.

    Attributes:
        name: The sweep's name.
        engine: `optuna` or `sagemaker`.
        strategy: How values are proposed.
        space: The searched fields, each with a text that describes its values.
        trials: Most trials.
        parallel: Most trials at the same time.
        lengths: Lengths of hyperband's rungs; empty with other strategies.
        trial_usd: Lowest and highest reservation of a trial among the planned ones; None if a price is unknown.
        ceiling_usd: Most that the sweep can cost: the budget, or all trials at the highest reservation.
        budget_usd: `limits.cost`, or None.
        planned: Number of values and samples that were planned.
        refused: Number of samples that the plan refuses.
        warnings: One sentence each.
        digest: Digest of the code.
    """

    name: str
    engine: str
    strategy: str
    space: Mapping[str, str]
    trials: int
    parallel: int
    lengths: tuple[int, ...]
    trial_usd: tuple[float, float] | None
    ceiling_usd: float | None
    budget_usd: float | None
    planned: int
    refused: int
    warnings: tuple[str, ...]
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the object that `sweep plan --json` prints."""
        names = {"name": "sweep", "lengths": "rungs"}
        # This gives lists in place of tuples.
        content = load_json(dump_json(asdict(self)))
        return {names.get(name, name): value for name, value in content.items() if name != "digest"}


@dataclass(frozen=True)
class EngineRules:
    """What the engine of a sweep means for its plan.

    Attributes:
        problems: What the engine cannot do.
        lengths: Lengths of hyperband's rungs; empty without rungs, or if the engine chooses them.
        repeats_values: Whether it may try a combination of values twice.
        starts_all: Whether it starts all trials, so that a budget has to hold for all of them.
    """

    problems: tuple[Problem, ...]
    lengths: tuple[int, ...]
    repeats_values: bool = False
    starts_all: bool = False


def plan_sweep(
    sweep: LoadedSweep, planner: Planner, rules: EngineRules, *, is_free: bool
) -> SweepPlan:
    """Return the plan of a sweep.

    Args:
        sweep: The sweep.
        planner: Plans a variant of the job.
        rules: What its engine means.
        is_free: Whether its trials cost nothing, because they are local.

    Raises:
        SpecError: A value of the space, or the job itself, cannot work. The error lists every problem.
    """
    spec = sweep.spec
    space = Space.of(sweep.spec.space)
    warnings = list[str]()
    problems = [*rules.problems, *_check_sweep(sweep, space)]
    bounds: list[Plan] = [] if problems else _plan_variations(sweep, space, planner, problems)
    if problems:
        raise SpecError(problems)
    trials = _count_trials(space, spec, rules)
    if spec.trials is not None and trials < spec.trials:
        warnings.append(
            f"{count(trials, 'combination')}, {count(spec.trials, 'trial')} asked: {trials} will run"
        )
    plans, refusals = _plan_samples(
        sweep, space, planner, min(trials, SAMPLES) if spec.strategy == GRID else SAMPLES
    )
    if refusals and not plans:
        raise SpecError([_relocate(sweep, ("space",), each) for each in refusals[0].problems])
    if refusals:
        first = refusals[0].problems[0]
        share = f"{len(refusals)} of {len(plans) + len(refusals)} samples"
        warnings.append(
            f"the plan refuses {share}, such as {first.path}: {first.message}; these trials cost nothing"
        )
    reservations = (0.0, 0.0) if is_free else _reservations([*bounds, *plans])
    if spec.limits.cost is not None and is_free:
        warnings.append("limits.cost: nothing is billed for these trials")
    _check_budget(sweep, trials, reservations, rules)
    return SweepPlan(
        name=sweep.name,
        engine=spec.engine,
        strategy=spec.strategy,
        space={each.path: describe(each) for each in space.dimensions},
        trials=trials,
        parallel=spec.parallel,
        lengths=rules.lengths,
        trial_usd=reservations,
        ceiling_usd=_ceiling(sweep, trials, reservations, rules),
        budget_usd=spec.limits.cost,
        planned=len(bounds) + len(plans) + len(refusals),
        refused=len(refusals),
        warnings=(*warnings, *_budget_warnings(sweep, trials, reservations)),
        digest=(bounds or plans)[0].bundle.digest,
    )


def _count_trials(space: Space, spec: SweepSpec, rules: EngineRules) -> int:
    """Return the number of trials: most engines try no combination of values twice."""
    if spec.strategy == GRID:
        return len(grid_of(space, spec))
    asked = spec.trials or 0
    if rules.repeats_values or not space.is_countable:
        return asked
    return space.grid_size(asked)


def job_of(sweep: LoadedSweep, trial: Trial, tags: Mapping[str, str] | None = None) -> JobSpec:
    """Return the job of a trial, with additional tags."""
    values = {**trial.values, **{f"tags.{name}": value for name, value in (tags or {}).items()}}
    if trial.length is not None:
        values[length_field(sweep.job)] = trial.length
    return sweep.job.with_values(values)


def describe(dimension: Dimension) -> str:
    """Return the values of a field as text."""
    domain = dimension.domain
    when = "".join(
        f", when {path} is {' or '.join(map(str, values))}"
        for path, values in dimension.conditions.items()
    )
    if isinstance(domain, Choice):
        return f"one of {', '.join(map(str, domain.labels))}{when}"
    scale = ""
    if domain.is_log:
        scale = ", logarithmic"
    elif domain.step is not None:
        scale = f" in steps of {domain.step:g}"
    kind = "integer " if domain.is_integer else ""
    return f"{kind}{domain.low:g} to {domain.high:g}{scale}{when}"


def _check_sweep(sweep: LoadedSweep, space: Space) -> list[Problem]:
    """Return what is wrong between the sweep and its job."""
    problems: list[Problem] = []
    for path in space.dimensions:
        if path.path == "name" or path.path.startswith("tags"):
            message = "a sweep needs this field to find its runs"
            problems.append(sweep.problem(("space", path.path), message, "remove it"))
        if path.path.startswith(_FOLDERS_OF_CODE):
            message = "the code of a sweep is packed once, so all its trials have the same folders"
            hint = "search code.script, code.task or an argument, or start a sweep for each folder"
            problems.append(sweep.problem(("space", path.path), message, hint))
    if {"sweep", "trial"} & sweep.job.tags.keys():
        problems.append(
            sweep.problem(("job",), "the sweep sets the tags sweep and trial itself", "remove them")
        )
    if sweep.spec.strategy == GRID and space.grid_size(MOST_GRID + 1) > MOST_GRID:
        hint = "use fewer values, or strategy: random"
        problems.append(sweep.problem(("space",), f"more than {MOST_GRID} combinations", hint))
    return problems


def _plan_variations(
    sweep: LoadedSweep, space: Space, planner: Planner, problems: list[Problem]
) -> list[Plan]:
    """Plan each bound and choice; add the problems of those that are refused, each once for a field."""
    plans = []
    known = set[tuple[str, str, str]]()
    for dimension, index, values in space.variations():
        try:
            plans.append(planner(sweep.job.with_values(values)))
        except SpecError as error:
            kind = sweep.spec.space[dimension.path].kinds[0]
            for each in error.problems:
                key = (dimension.path, each.path, each.message)
                if key not in known:
                    known.add(key)
                    problems.append(_relocate(sweep, ("space", dimension.path, kind, index), each))
    return plans


def _plan_samples(
    sweep: LoadedSweep, space: Space, planner: Planner, count: int
) -> tuple[list[Plan], list[SpecError]]:
    grid = grid_of(space, sweep.spec) if sweep.spec.strategy == GRID else ()
    plans: list[Plan] = []
    refusals: list[SpecError] = []
    # Samples of choices are often equal.
    known: dict[str, Plan | SpecError] = {}
    for number in range(count):
        values = grid[number] if grid else space.sample(sweep.spec.seed, number)
        key = dump_json(values, sort_keys=True)
        if key not in known:
            try:
                known[key] = planner(sweep.job.with_values(values))
            except SpecError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, SpecError):
            refusals.append(found)
        else:
            plans.append(found)
    return plans, refusals


def _relocate(sweep: LoadedSweep, path: tuple[str | int, ...], problem: Problem) -> Problem:
    """Return a problem of a changed job at the value in the sweep file that causes it."""
    at = sweep.document.location_of(path)
    return Problem(at.file, at.line, at.column, problem.path, problem.message, problem.hint)


def _reservations(plans: list[Plan]) -> tuple[float, float] | None:
    """Return the lowest and the highest reservation; None if a price is unknown.

    A trial reserves the ceiling of its plan, which contains the reserve for a late stop: `planning.cost.OverLimit`.
    """
    found = [plan.cost.max_usd for plan in plans]
    known = [each for each in found if each is not None]
    return (min(known), max(known)) if known and len(known) == len(found) else None


def _check_budget(
    sweep: LoadedSweep, trials: int, reservations: tuple[float, float] | None, rules: EngineRules
) -> None:
    cost = sweep.spec.limits.cost
    if cost is None:
        return
    message = hint = ""
    if reservations is None:
        message = "no price is known for an instance type of the trials, so no budget can hold"
        hint = "cloudtrain prices --refresh, or remove limits.cost"
    elif reservations[0] > cost:
        lowest = reservations[0]
        message = f"a trial reserves {format_usd(lowest)}, so none fits into {cost:g} USD"
        hint = f"raise it to {math.ceil(lowest)} USD, or lower limits.runtime of the job"
    elif rules.starts_all and (most := trials * reservations[1]) > cost:
        message = (
            f"{count(trials, 'trial')} reserve up to {format_usd(reservations[1])} each, {format_usd(most)} together, "
            f"and a tuning job starts all of them"
        )
        hint = f"use trials: {int(cost // reservations[1])}, raise it to {format_usd(most)}, or use engine: optuna"
    if message:
        raise SpecError([sweep.problem(("limits", "cost"), message, hint)])


def _ceiling(
    sweep: LoadedSweep, trials: int, reservations: tuple[float, float] | None, rules: EngineRules
) -> float | None:
    budget = sweep.spec.limits.cost
    if reservations is None:
        return budget
    # With hyperband a trial has a run per rung, and each of them reserves.
    runs = trials * max(1, len(rules.lengths))
    everything = round(runs * reservations[1], 2)
    return everything if budget is None else min(everything, budget)


def _budget_warnings(
    sweep: LoadedSweep, trials: int, reservations: tuple[float, float] | None
) -> list[str]:
    cost = sweep.spec.limits.cost
    parallel = sweep.spec.parallel
    if cost is None or reservations is None:
        return []
    highest = reservations[1]
    if not highest:
        text = (
            "limits.cost does not limit the instances of a training plan, which are paid in advance: limit the sweep "
            "by trials, and by limits.runtime of the job"
        )
        return [text]
    sure = int(cost // highest)
    found = []
    if sure < min(parallel, trials):
        found.append(f"limits.cost pays for {sure} of {parallel} trials at the same time")
    if trials * highest > cost:
        found.append(
            f"limits.cost is certain to pay for {sure} of {trials} trials; more if they end early"
        )
    return found
