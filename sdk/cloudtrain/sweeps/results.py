"""The results of a sweep: its state, its trials by rank, its best trial and the job of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cloudtrain.errors import EXIT_DONE, EXIT_RUN_ENDED_EARLY, EXIT_RUN_FAILED
from cloudtrain.sweeps.budget import Budget
from cloudtrain.sweeps.summary import summarize_status
from cloudtrain.sweeps.trial import Trial, TrialState


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
            "trials": [trial_json(trial) for trial in self.trials],
            "best": None if best is None else best_json(best),
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


def best_json(trial: Trial) -> dict[str, Any]:
    """Return the entry of the best trial in JSON."""
    values: Mapping[str, Any] = trial.values
    return {"number": trial.number, "run": trial.run, "objective": trial.objective, "values": dict(values)}
