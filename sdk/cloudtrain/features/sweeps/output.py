"""Output of `sweep`: the plan, the ranking of trials, and a sweep that is followed."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from cloudtrain.console import column_lines, command_name, print_columns, print_json, print_message
from cloudtrain.console.terminal import strip_unsafe_escapes, unfiltered
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_ENDED_EARLY
from cloudtrain.features.sweeps.results import SweepState, ranking_rows, status_rows
from cloudtrain.support.backend_facts import backend_option
from cloudtrain.support.notebook.summary import printable
from cloudtrain.support.units import format_usd

if TYPE_CHECKING:
    from cloudtrain.features.sweeps.handle import Sweep
    from cloudtrain.features.sweeps.planning import SweepPlan
    from cloudtrain.features.sweeps.results import SweepStatus
    from cloudtrain.features.sweeps.stored_sweep import StoredSweep
    from cloudtrain.features.sweeps.trial import Trial

_COLOURS = {
    "SUCCEEDED": "32",
    "FAILED": "1;31",
    "REFUSED": "33",
    "STOPPED": "33",
    "RUNNING": "36",
    "*": "32",
}


def print_sweep_plan(plan: SweepPlan) -> None:
    """Print the plan of a sweep."""
    paths = list(plan.space)
    rows = [
        ("sweep", f"{plan.name}, {plan.strategy}, engine {plan.engine}"),
        *(("space" if path == paths[0] else "", f"{path}: {plan.space[path]}") for path in paths),
        ("trials", f"{plan.trials}, {plan.parallel} at the same time"),
        ("price", _price(plan)),
        ("ceiling", _ceiling(plan)),
        (
            "planned",
            f"{plan.planned} jobs: every bound and choice, and samples; {plan.refused} samples refused",
        ),
    ]
    if plan.lengths:
        rows.insert(-3, ("rungs", f"compared after {', '.join(map(str, plan.lengths))}"))
    print_columns([(name, printable(value)) for name, value in rows])
    print_plan_warnings(plan)


def print_plan_warnings(plan: SweepPlan) -> None:
    """Print the warnings of a plan."""
    for text in plan.warnings:
        print_message(f"warning: {text}")


def print_started(sweep: Sweep, *, is_new: bool) -> None:
    """Print the id of a sweep that was started or continued, and the next commands."""
    verb = "started" if is_new else "continues"
    print_message(f"{sweep.id} {verb}; to see it: {command_name()} sweep follow {sweep.id}")
    print_message(f"to stop it: {command_name()} sweep stop {sweep.id}")


def print_changed_code(stored: StoredSweep, file: str) -> None:
    """Print that a sweep continues with the code of its start, which has been edited, and how to use the new one."""
    folder = printable(str(stored.sweep.job.code_directory))
    other = f"{command_name()} sweep run {shlex.quote(file)}{backend_option(stored.backend)} --new"
    print_message(
        f"note: {folder} has changed since the sweep began; its trials use the code of its start. "
        f"For a sweep of the present code: {other}"
    )


def print_sweep(status: SweepStatus) -> None:
    """Print the status of a sweep and the ranking of its trials."""
    print_columns([(name, printable(value)) for name, value in status_rows(status)])
    if status.trials:
        print()
        print_columns(_cells(status), skip_empty=True, colours=_COLOURS)


def print_trial(sweep: str, trial: Trial) -> None:
    """Print one trial."""
    rows = [
        ("trial", f"{trial.number} of {sweep}"),
        ("state", f"{trial.state}{f': {trial.reason}' * bool(trial.reason)}"),
    ]
    rows += [("objective", f"{trial.objective:.6g}")] if trial.objective is not None else []
    rows += [
        ("" if index else "values", f"{path}: {value}")
        for index, (path, value) in enumerate(trial.values.items())
    ]
    runs = [run for run in (*trial.earlier, trial.run) if run]
    rows += [("" if index else "runs", run) for index, run in enumerate(runs)]
    rows += [("cost", f"{format_usd(trial.settled_usd)}")] if trial.settled_usd else []
    print_columns([(name, printable(value)) for name, value in rows])
    if runs:
        print_message(f"next: {command_name()} status {runs[-1]}, {command_name()} logs {runs[-1]}")


def follow_sweep(sweep: Sweep, *, as_json: bool) -> int:
    """Show a sweep until it ends; return the exit code. Ctrl-C ends the command, not the sweep."""
    try:
        is_live = not as_json and sys.stdout.isatty()
        status = _follow_live(sweep) if is_live else sweep.follow_trials(print_message)
    except KeyboardInterrupt:
        print_message(
            f"{sweep.id} continues. To attach again: {command_name()} sweep follow {sweep.id}"
        )
        return EXIT_INTERRUPTED
    if as_json:
        print_json(status.to_json())
    else:
        print_sweep(status)
    if status.state is SweepState.INTERRUPTED:
        print_message(f"the controller has ended; its log: {sweep.log}")
        return EXIT_RUN_ENDED_EARLY
    return status.state.exit_code or 0


def _follow_live(sweep: Sweep) -> SweepStatus:
    """Show the ranking in place until the sweep has ended."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(
        console=Console(file=unfiltered(sys.stdout)), auto_refresh=False, transient=True
    ) as live:
        for status in sweep.statuses(lambda text: live.console.print(Text(printable(text)))):
            lines = [f"{name:<7} {printable(value)}" for name, value in status_rows(status)]
            lines += ["", *column_lines(_cells(status))]
            live.update(
                Text(strip_unsafe_escapes("\n".join(lines)), no_wrap=True, overflow="ellipsis"),
                refresh=True,
            )
    return status


def _cells(status: SweepStatus) -> list[tuple[str, ...]]:
    return [tuple(map(printable, row)) for row in ranking_rows(status)]


def _price(plan: SweepPlan) -> str:
    if plan.trial_usd is None:
        return "unknown: cloudtrain prices --refresh"
    low, high = plan.trial_usd
    if not high:
        return "local trials cost nothing"
    amount = f"{low:,.2f}" if low == high else f"{low:,.2f} to {high:,.2f}"
    return f"{amount} USD at most per trial, with the reserve for a late stop"


def _ceiling(plan: SweepPlan) -> str:
    if plan.ceiling_usd is None:
        return "none: give limits.cost"
    is_budget = plan.ceiling_usd == plan.budget_usd
    return f"{format_usd(plan.ceiling_usd)}{', the budget' if is_budget else ''}"
