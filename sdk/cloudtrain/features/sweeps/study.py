"""The trials of a sweep in Optuna's storage: one SQLite file, which Optuna's own tools can read, too.

Each trial of the study has the record of a `Trial` as its user attribute, which is written in one transaction and is
all that a controller needs to continue. Only public names of Optuna are used.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import MissingExtraError
from cloudtrain.features.sweeps.domains import Choice, label_of
from cloudtrain.features.sweeps.space import Dimension, Space, point_of
from cloudtrain.features.sweeps.spec import BAYESIAN, GRID, SweepSpec
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.support.installation import install_command

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

    from cloudtrain.features.sweeps.stored_sweep import StoredSweep

_RECORD = "cloudtrain"
_END = "cloudtrain_end"
_LOCK_SECONDS = 60
_BAYESIAN_ATTEMPTS = 10


def check_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("optuna") is None:
        raise MissingExtraError("sweeps need optuna", install_command("sweep"))


def _create_file(file: Path, name: str, spec: SweepSpec) -> None:
    """Create the SQLite file of a sweep. Readers see a complete file or none."""
    import optuna

    partial = file.with_name(f".{file.name}.new")
    # A process that was killed may have left one.
    partial.unlink(missing_ok=True)
    storage = _open_storage(partial, is_new=True)
    direction = "maximize" if spec.objective.is_maximized else "minimize"
    optuna.create_study(storage=storage, study_name=name, direction=direction)
    storage.remove_session()
    storage.engine.dispose()
    partial.replace(file)


def _open_storage(file: Path, *, is_new: bool) -> RDBStorage:
    import optuna

    # A reader or a copy may hold the file for a moment.
    options = {"connect_args": {"timeout": _LOCK_SECONDS}}
    return optuna.storages.RDBStorage(
        f"sqlite:///{file}", engine_kwargs=options, skip_table_creation=not is_new
    )


class Study:
    """The trials of one sweep. Their file is created when it does not exist.

    Args:
        stored: The sweep.

    Raises:
        MissingExtraError: Optuna is not installed.
    """

    def __init__(self, stored: StoredSweep) -> None:
        check_optuna()
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        spec = stored.sweep.spec
        self.file = stored.database
        if not self.file.exists():
            _create_file(self.file, stored.id, spec)
        self._spec = spec
        self._space = Space.of(spec.space)
        self._storage = _open_storage(self.file, is_new=False)
        self._study = optuna.load_study(
            storage=self._storage, study_name=stored.id, pruner=_make_pruner(spec)
        )
        self._id = self._storage.get_study_id_from_name(stored.id)
        self._grid = grid_of(self._space, spec) if spec.strategy == GRID else ()

    def trials(self) -> list[Trial]:
        """Return the trials that have a record, by number."""
        found = (trial.user_attrs.get(_RECORD) for trial in self._study.get_trials(deepcopy=False))
        return [Trial.from_text(text) for text in found if text is not None]

    def propose(self) -> Trial | None:
        """Return a new trial with values, which `save` has to record; None if all combinations have a trial.

        A trial without a record, whose controller was killed before it wrote one, is proposed again.
        """
        import optuna

        known = self._study.get_trials(deepcopy=False)
        open_trials = [each for each in known if not each.state.is_finished()]
        abandoned = next((each for each in open_trials if _RECORD not in each.user_attrs), None)
        number = len(known) if abandoned is None else abandoned.number
        if self._spec.strategy == BAYESIAN:
            self._study.sampler = self._make_sampler(number)
        if abandoned is None and not self._is_free:
            values = self._new_values(number, known)
            if values is None:
                return None
            return self._begin(number, values)
        if abandoned is not None and abandoned.state is optuna.trial.TrialState.RUNNING:
            trial = optuna.trial.Trial(self._study, self._trial_id(number))
        else:
            trial = self._study.ask()
        values = self._space.fill(lambda dimension: _suggest(trial, dimension))
        return Trial(trial.number, values)

    def save(self, trial: Trial) -> None:
        """Record a trial; report its end to Optuna."""
        self._storage.set_trial_user_attr(self._trial_id(trial.number), _RECORD, trial.to_text())
        if trial.state.is_final:
            self._tell(trial)

    def repair(self) -> None:
        """Report the ended trials to Optuna whose controller was killed before it could."""
        for trial in self.trials():
            if trial.state.is_final:
                self._tell(trial)

    def should_prune(self, trial: Trial, values: Iterable[tuple[int, float]]) -> bool:
        """Record values of the metric by step; return whether the trial is to be stopped early."""
        known = self._frozen(trial).intermediate_values
        new = [(step, value) for step, value in values if step not in known]
        for step, value in new:
            self._storage.set_trial_intermediate_value(self._trial_id(trial.number), step, value)
        return bool(new) and self._study.pruner.prune(self._study, self._frozen(trial))

    @property
    def end(self) -> tuple[str, str] | None:
        """State and reason of the sweep after its end; None before."""
        state = self._study.user_attrs.get(_END)
        return None if state is None else (str(state[0]), str(state[1]))

    def set_end(self, state: str, reason: str) -> None:
        """Record the end of the sweep. Proposals without a trial are withdrawn."""
        import optuna

        for trial in self._study.get_trials(deepcopy=False):
            if _RECORD not in trial.user_attrs and not trial.state.is_finished():
                self._storage.set_trial_state_values(
                    self._trial_id(trial.number), optuna.trial.TrialState.FAIL
                )
        self._study.set_user_attr(_END, [state, reason])

    def close(self) -> None:
        """Close the connections to the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _tell(self, trial: Trial) -> None:
        import optuna

        state, value = optuna.trial.TrialState.FAIL, None
        if trial.state is TrialState.PRUNED:
            state = optuna.trial.TrialState.PRUNED
        elif trial.state is TrialState.SUCCEEDED and trial.objective is not None:
            state, value = optuna.trial.TrialState.COMPLETE, trial.objective
        self._study.tell(trial.number, value, state=state, skip_if_finished=True)

    def _frozen(self, trial: Trial) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[trial.number]

    def _trial_id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._id, number))

    @property
    def _is_free(self) -> bool:
        """Whether Optuna chooses values among so many that it never chooses the same ones again."""
        return self._spec.strategy == BAYESIAN and not self._space.is_countable

    def _make_sampler(self, number: int, attempt: int = 0) -> BaseSampler:
        """Return the sampler of a trial. What it proposes depends on seed, number and results, not on the process."""
        import optuna

        seed = self._spec.seed * 100_003 + number + attempt * 1_000_003
        return optuna.samplers.TPESampler(seed=seed % 2**32)

    def _new_values(self, number: int, known: list[FrozenTrial]) -> Mapping[str, Any] | None:
        """Return values that no trial has; None if all combinations have one."""
        taken = {point_of(trial.values) for trial in self.trials()}
        if self._grid:
            return next((values for values in self._grid if point_of(values) not in taken), None)
        if self._spec.strategy == BAYESIAN:
            for values in self._bayesian_values(number, known):
                if point_of(values) not in taken:
                    return values
        return self._space.new_sample(self._spec.seed, number, taken)

    def _bayesian_values(
        self, number: int, known: list[FrozenTrial]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield what Optuna proposes for a trial, again and again, without a trace in the study."""
        import optuna

        results = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        trials = [each for each in known if each.state in results]
        for attempt in range(_BAYESIAN_ATTEMPTS):
            study = optuna.create_study(
                direction=self._study.direction, sampler=self._make_sampler(number, attempt)
            )
            study.add_trials(trials)
            trial = study.ask()
            yield self._space.fill(functools.partial(_suggest, trial))

    def _begin(self, number: int, values: Mapping[str, Any]) -> Trial:
        """Store a trial with values that has begun, in one transaction; return it.

        A trial that is enqueued and then asked for takes one more for each value, and two others.
        """
        self._study.add_trial(self._as_running(values))
        return Trial(number, self._space.fill(lambda each: _as_spelled(values[each.path], each)))

    def _as_running(self, values: Mapping[str, Any]) -> FrozenTrial:
        """Return a trial with values that has begun, as Optuna stores it."""
        import optuna

        stored = {}
        distributions = {}
        for each in self._space.dimensions:
            # A field that depends on the value of another one may have none.
            if each.path not in values:
                continue
            value = values[each.path]
            is_choice = isinstance(each.domain, Choice)
            stored[each.path] = label_of(value) if is_choice else value
            distributions[each.path] = _distribution_with(value, each)
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING, params=stored, distributions=distributions
        )


def grid_of(space: Space, spec: SweepSpec) -> tuple[dict[str, Any], ...]:
    """Return the combinations that a grid tries: all, or `trials` of them at random."""
    grid = list(space.grid())
    if spec.trials is not None and spec.trials < len(grid):
        random.Random(spec.seed).shuffle(grid)  # noqa: S311 (no secret depends on it)
    return tuple(grid[: spec.trials])


def _as_spelled(value: Any, dimension: Dimension) -> Any:
    """Return the value of a field in the form in which Optuna would return it: 1.0 for 1 of a range of any numbers."""
    domain = dimension.domain
    if isinstance(domain, Choice) or domain.is_integer:
        return value
    return float(value)


def _distribution_with(value: Any, dimension: Dimension) -> BaseDistribution:
    """Return the values of a field, as Optuna describes them, so that they contain a value of the sweep.

    The sweep rounds numbers to 12 digits. They are then no exact multiples of a step, which Optuna requires.
    """
    import optuna

    domain = dimension.domain
    if isinstance(domain, Choice):
        return optuna.distributions.CategoricalDistribution(domain.labels)
    if domain.is_integer:
        low = int(domain.low)
        high = int(domain.high)
        step = int(domain.step or 1)
        return optuna.distributions.IntDistribution(low, high, log=domain.is_log, step=step)
    return optuna.distributions.FloatDistribution(
        min(domain.low, value), max(domain.high, value), log=domain.is_log
    )


def _suggest(trial: Any, dimension: Dimension) -> Any:
    """Return the proposed value of a field, in the spelling of the sweep file."""
    domain = dimension.domain
    if isinstance(domain, Choice):
        return domain.of_label(trial.suggest_categorical(dimension.path, domain.labels))
    if domain.is_integer:
        step = int(domain.step or 1)
        return trial.suggest_int(
            dimension.path, int(domain.low), int(domain.high), step=step, log=domain.is_log
        )
    value = trial.suggest_float(
        dimension.path, domain.low, domain.high, step=domain.step, log=domain.is_log
    )
    return value if domain.step is None else round(value, 12)


def _make_pruner(spec: SweepSpec) -> BasePruner:
    import optuna

    if spec.pruning == "median":
        return optuna.pruners.MedianPruner()
    if spec.pruning == "asha":
        return optuna.pruners.SuccessiveHalvingPruner()
    return optuna.pruners.NopPruner()
