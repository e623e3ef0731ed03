"""Summaries of a sweep, its plan and its status, for `repr`, notebooks and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.sweeps.trial import Trial, TrialState

if TYPE_CHECKING:
    from cloudtrain.sweeps.results import SweepStatus

_SHOWN_TRIALS = 5
_SHORT = 4
HEADER = ("", "trial", "state", "objective", "cost", "values", "run")


def summarize_sweep(reference: str, folder: str) -> Summary:
    """Return a summary of a sweep without reading its trials: its state is in `sweep.status()`."""
    next_calls: Row = ("next", "sweep.follow(), sweep.status(), sweep.best, sweep.best_job(), sweep.stop()")
    return Summary(f"Sweep {reference}", [("folder", folder)], [next_calls])


def summarize_status(status: SweepStatus) -> Summary:
    """Return a summary of a status, with the best trials."""
    rows = list(status_rows(status))
    for place, trial in enumerate(status.ranking()[:_SHOWN_TRIALS]):
        rows.append(("best trials" if place == 0 else "", " ".join(filter(None, trial_cells(status, trial)))))
    return Summary(f"Status {status.sweep}", rows)


def status_rows(status: SweepStatus) -> Iterator[Row]:
    """Yield what a status says about the sweep itself."""
    yield "state", f"{status.state}{f': {status.reason}' if status.reason else ''}"
    yield "trials", describe_counts(status)
    yield "budget", describe_budget(status)
    best = status.best
    if best is not None:
        yield "best", f"trial {best.number}, {status.metric} {best.objective:.6g}, {describe_values(best)}"


def describe_counts(status: SweepStatus) -> str:
    """Return the number of trials by state: `7 of 20, 5 succeeded, 2 running`."""
    counts = [(status.count(state), str(state).lower()) for state in TrialState]
    parts = [f"{number} {name}" for number, name in counts if number]
    return ", ".join([f"{len(status.trials)} of {count(status.planned_trials, 'trial')}", *parts])


def describe_budget(status: SweepStatus) -> str:
    """Return what is spent and reserved, and the limit."""
    budget = status.budget
    if status.backend == "local":
        return "local trials cost nothing"
    limit = "no limit" if budget.limit_usd is None else f"of {budget.limit_usd:,.2f} USD"
    reserved = f", {budget.reserved_usd:,.2f} USD reserved" if budget.reserved_usd else ""
    return f"{budget.spent_usd:,.2f} USD spent{reserved}, {limit}"


def ranking_rows(status: SweepStatus) -> list[tuple[str, ...]]:
    """Return the header and one row of cells per trial, best first."""
    return [HEADER, *(trial_cells(status, trial) for trial in status.ranking())]


def trial_cells(status: SweepStatus, trial: Trial) -> tuple[str, ...]:
    """Return the cells of a trial, in the order of `HEADER`."""
    best, is_free = status.best, status.backend == "local"
    cost = trial.settled_usd or trial.reservation_usd
    bound = "at most " if trial.state.is_active else ""
    return (
        "*" if best is not None and best.number == trial.number else "",
        str(trial.number),
        str(trial.state),
        "" if trial.objective is None else f"{trial.objective:.6g}",
        "" if is_free or not cost else f"{bound}{cost:,.2f}",
        describe_values(trial),
        trial.run if not trial.reason else f"{trial.run} {trial.reason}".strip(),
    )


def describe_values(trial: Trial) -> str:
    """Return the values of a trial in one line, by the last parts of their paths."""
    values = (f"{path.rpartition('.')[2]}={_show(value)}" for path, value in trial.values.items())
    length = () if trial.length is None else (f"length={trial.length}",)
    return " ".join((*values, *length))


def describe_trial(trial: Trial) -> str:
    """Return one line about a trial."""
    objective = "" if trial.objective is None else f", objective {trial.objective:.6g}"
    reason = f": {trial.reason}" if trial.reason else ""
    run = f", run {trial.run}" if trial.run else ""
    return f"trial {trial.number} {trial.state}{reason}{objective} ({describe_values(trial)}{run})"


def _show(value: object) -> str:
    return f"{value:.{_SHORT}g}" if isinstance(value, float) else str(value)
