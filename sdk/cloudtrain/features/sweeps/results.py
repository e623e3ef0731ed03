"""The results of a sweep: its state, its trials by rank and its best trial, for programs, notebooks and the console."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cloudtrain.controllers.budget import Budget
from cloudtrain.errors import EXIT_DONE, EXIT_RUN_ENDED_EARLY, EXIT_RUN_FAILED
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_plain_number, format_usd

_SHOWN_TRIALS = 5
_BEST = ("number", "run", "objective", "values")
HEADER = ("", "trial", "state", "objective", "cost", "values", "run")


class SweepState(StrEnum):
    """State of a sweep."""

    RUNNING = "RUNNING"
    INTERRUPTED = "INTERRUPTED"
    """Its controller has ended before the sweep. Its runs continue, and no others start until it is started again."""
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        """Whether the sweep has ended."""
        return self in (SweepState.SUCCEEDED, SweepState.STOPPED, SweepState.FAILED)

    @property
    def exit_code(self) -> int | None:
        """Exit code of a command that followed the sweep to this state; None before the end."""
        codes = {SweepState.SUCCEEDED: EXIT_DONE, SweepState.FAILED: EXIT_RUN_FAILED}
        return codes.get(self, EXIT_RUN_ENDED_EARLY) if self.is_final else None


@dataclass(frozen=True, repr=False)
class SweepStatus:
    """A sweep at one moment.

    Attributes:
        sweep: Id of the sweep.
        state: Its state.
        reason: Why it is in this state; may be empty.
        engine: `optuna` or `sagemaker`.
        backend: Where its trials run.
        metric: The metric.
        is_maximized: Whether larger values are better.
        trials: All trials so far, by number.
        planned_trials: Number of trials of the sweep.
        budget: The budget.
    """

    sweep: str
    state: SweepState
    reason: str
    engine: str
    backend: str
    metric: str
    is_maximized: bool
    trials: tuple[Trial, ...]
    planned_trials: int
    budget: Budget

    @classmethod
    def of(
        cls, stored: StoredSweep, state: SweepState, reason: str, trials: Iterable[Trial]
    ) -> SweepStatus:
        """Return the status of a stored sweep with these trials."""
        spec = stored.sweep.spec
        known = tuple(trials)
        return cls(
            sweep=stored.id,
            state=state,
            reason=reason,
            engine=spec.engine,
            backend=stored.backend,
            metric=spec.objective.metric,
            is_maximized=spec.objective.is_maximized,
            trials=known,
            planned_trials=stored.planned_trials,
            budget=Budget.of(spec.limits.cost, known),
        )

    def __repr__(self) -> str:
        return summarize_status(self).to_text()

    def _repr_html_(self) -> str:
        return summarize_status(self).to_html()

    def ranking(self) -> list[Trial]:
        """Return the trials, best first; those without an objective come last, by number."""
        sign = -1.0 if self.is_maximized else 1.0
        return sorted(
            self.trials,
            key=lambda trial: (
                trial.objective is None,
                trial.state in (TrialState.FAILED, TrialState.STOPPED),
                sign * (trial.objective or 0.0),
                trial.number,
            ),
        )

    @property
    def best(self) -> Trial | None:
        """The best of the trials that have succeeded, or None."""
        succeeded = [trial for trial in self.ranking() if trial.state is TrialState.SUCCEEDED]
        return succeeded[0] if succeeded else None

    @property
    def evaluated(self) -> int:
        """The number of trials that were compared: those that succeeded, and those stopped because others are better."""
        return self.count(TrialState.SUCCEEDED, TrialState.PRUNED)

    def count(self, *states: TrialState) -> int:
        """Return the number of trials in these states."""
        return sum(trial.state in states for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `sweep status --json` prints."""
        best = self.best
        return {
            "sweep": self.sweep,
            "state": str(self.state),
            "reason": self.reason or None,
            "engine": self.engine,
            "backend": self.backend,
            "objective": {"metric": self.metric, "goal": "max" if self.is_maximized else "min"},
            "planned_trials": self.planned_trials,
            "evaluated_trials": self.evaluated,
            "trials": [trial_json(trial) for trial in self.trials],
            "best": None if best is None else {each: trial_json(best)[each] for each in _BEST},
            "spent_usd": round(self.budget.spent_usd, 2),
            "reserved_usd": round(self.budget.reserved_usd, 2),
            "budget_usd": self.budget.limit_usd,
        }


def trial_json(trial: Trial) -> dict[str, Any]:
    """Return the entry of a trial in JSON."""
    return {
        "number": trial.number,
        "run": trial.run or None,
        "state": str(trial.state),
        "reason": trial.reason or None,
        "values": dict(trial.values),
        "objective": trial.objective,
        "cost_usd": round(trial.settled_usd, 2),
    }


def summarize_status(status: SweepStatus) -> Summary:
    """Return a summary of a status, with the best trials."""
    rows = list(status_rows(status))
    for place, trial in enumerate(status.ranking()[:_SHOWN_TRIALS]):
        rows.append(
            (
                "best trials" if place == 0 else "",
                " ".join(filter(None, trial_cells(status, trial))),
            )
        )
    return Summary(f"Status {status.sweep}", rows)


def status_rows(
    status: SweepStatus, number: Callable[[float], str] = format_plain_number
) -> Iterator[Row]:
    """Yield what a status says about the sweep itself.

    Args:
        status: The status.
        number: Returns a number as text.
    """
    yield "state", f"{status.state}{f': {status.reason}' if status.reason else ''}"
    yield "trials", describe_counts(status)
    yield "budget", describe_budget(status)
    best = status.best
    if best is not None:
        score = f"{status.metric} {number(best.objective or 0.0)}"
        text = f"trial {best.number}, {score}, {describe_values(best, number)}"
        evaluated = status.evaluated
        planned = status.planned_trials
        part = f" (best of {evaluated} of {planned} trials)" if evaluated < planned else ""
        yield "best", text + part


def describe_counts(status: SweepStatus) -> str:
    """Return the number of trials by state: `7 of 20, 5 succeeded, 2 running`."""
    counts = [(status.count(state), str(state).lower()) for state in TrialState]
    parts = [f"{number} {name}" for number, name in counts if number]
    return ", ".join([f"{len(status.trials)} of {count(status.planned_trials, 'trial')}", *parts])


def describe_budget(status: SweepStatus) -> str:
    """Return what is spent and reserved, and the limit."""
    budget = status.budget
    if not facts_of(status.backend).uses_account:
        return describe_free_trials(status.backend)
    limit = "no limit" if budget.limit_usd is None else f"of {format_usd(budget.limit_usd)}"
    reserved = f", {format_usd(budget.reserved_usd)} reserved" if budget.reserved_usd else ""
    spent = f"{format_usd(budget.spent_usd)} spent"
    if facts_of(status.backend).is_simulated:
        spent = f"would cost {format_usd(budget.spent_usd)} so far"
    return f"{spent}{reserved}, {limit}"


def describe_free_trials(backend: str) -> str:
    """Return that trials of a backend cost nothing."""
    if facts_of(backend).is_local:
        return "local trials cost nothing"
    return f"nothing is billed for trials {place_name(backend)}"


def trial_cells(status: SweepStatus, trial: Trial) -> tuple[str, ...]:
    """Return the cells of a trial in a pipe, in the order of `HEADER`."""
    best = status.best
    is_free = not facts_of(status.backend).uses_account
    cost = trial.settled_usd or trial.reservation_usd
    bound = "at most " if trial.state.is_active else ""
    return (
        "*" if best is not None and best.number == trial.number else "",
        str(trial.number),
        str(trial.state),
        "" if trial.objective is None else format_plain_number(trial.objective),
        "" if is_free or not cost else f"{bound}{cost:,.2f}",
        describe_values(trial),
        trial.run if not trial.reason else f"{trial.run} {trial.reason}".strip(),
    )


def describe_values(trial: Trial, number: Callable[[float], str] = format_plain_number) -> str:
    """Return the values of a trial in one line, by the last parts of their paths."""
    values = (
        f"{path.rpartition('.')[2]}={describe_value(value, number)}"
        for path, value in trial.values.items()
    )
    length = () if trial.length is None else (f"length={trial.length}",)
    return " ".join((*values, *length))


def describe_trial(trial: Trial) -> str:
    """Return one line about a trial."""
    objective = ""
    if trial.objective is not None:
        objective = f", objective {format_plain_number(trial.objective)}"
    reason = f": {trial.reason}" if trial.reason else ""
    run = f", run {trial.run}" if trial.run else ""
    return f"trial {trial.number} {trial.state}{reason}{objective} ({describe_values(trial)}{run})"


def describe_value(value: object, number: Callable[[float], str]) -> str:
    """Return the value of a searched field as text."""
    return number(value) if isinstance(value, float) else str(value)
