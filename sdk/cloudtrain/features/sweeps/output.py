"""Output of `sweep`: the plan, the ranking of trials, and a sweep that is followed."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from cloudtrain.console import YELLOW, command_name, print_json, print_message, print_row
from cloudtrain.console.facts import print_facts, print_sentence
from cloudtrain.console.runs import STATE_COLOURS
from cloudtrain.console.tables import Cell, Column, print_table, table_lines
from cloudtrain.console.terminal import is_terminal, unfiltered
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_ENDED_EARLY
from cloudtrain.features.sweeps.results import (
    HEADER,
    SweepState,
    describe_free_trials,
    describe_value,
    status_rows,
    trial_cells,
)
from cloudtrain.support.backend_facts import backend_option
from cloudtrain.support.notebook.summary import Row, printable
from cloudtrain.support.run_id import short_id
from cloudtrain.support.units import format_number, format_plain_number, format_usd

if TYPE_CHECKING:
    from cloudtrain.features.sweeps.handle import Sweep
    from cloudtrain.features.sweeps.planning import SweepPlan
    from cloudtrain.features.sweeps.results import SweepStatus
    from cloudtrain.features.sweeps.stored_sweep import StoredSweep
    from cloudtrain.features.sweeps.trial import Trial

_COLOURS = {**STATE_COLOURS, "REFUSED": YELLOW, "*": "32"}


def print_sweep_plan(plan: SweepPlan, backend: str) -> None:
    """Print the plan of a sweep whose trials run on a backend."""
    paths = list(plan.space)
    rows = [
        ("sweep", f"{plan.name}, {plan.strategy}, engine {plan.engine}"),
        *(("space" if path == paths[0] else "", f"{path}: {plan.space[path]}") for path in paths),
        ("trials", f"{plan.trials}, {plan.parallel} at the same time"),
        *((("rungs", _rungs(plan)),) if plan.lengths else ()),
        ("price", _price(plan, backend)),
        # Trials that cost nothing need no limit.
        *((("limit", _limit(plan)),) if plan.ceiling_usd != 0 else ()),
        (
            "planned",
            f"{plan.planned} jobs with values of the space, {plan.refused} of them refused",
        ),
    ]
    print_facts([(name, printable(value)) for name, value in rows])
    print_plan_warnings(plan)


def print_plan_warnings(plan: SweepPlan) -> None:
    """Print the warnings of a plan, each once."""
    for text in dict.fromkeys(plan.warnings):
        print_sentence(f"warning: {text}", print_message)


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
    print_facts(_facts(status))
    if status.trials:
        print()
        left_out = print_table(_columns(status), _rows(status), colours=_COLOURS)
        if left_out:
            print_sentence(
                f"without {', '.join(left_out)}; all of a trial: "
                f"{command_name()} sweep show SWEEP TRIAL",
                print_message,
            )


def _facts(status: SweepStatus) -> list[Row]:
    return [(name, printable(value)) for name, value in status_rows(status, _number)]


def _number(value: float) -> str:
    """Return a number with four significant digits on a terminal, and as scripts read it in a pipe."""
    return format_number(value) if is_terminal() else format_plain_number(value)


def print_trial(sweep: str, trial: Trial) -> None:
    """Print one trial."""
    rows = [
        ("trial", f"{trial.number} of {sweep}"),
        ("state", f"{trial.state}{f': {trial.reason}' * bool(trial.reason)}"),
    ]
    if trial.objective is not None:
        rows.append(("objective", _number(trial.objective)))
    # A script reads a value with all of its digits.
    number = format_number if is_terminal() else str
    rows += [
        ("values", f"{path}: {describe_value(value, number)}")
        for path, value in trial.values.items()
    ]
    runs = [run for run in (*trial.earlier, trial.run) if run]
    rows += [("runs", run) for run in runs]
    rows += [("cost", f"{format_usd(trial.settled_usd)}")] if trial.settled_usd else []
    print_facts([(name, printable(value)) for name, value in rows])
    if runs:
        run = short_id(runs[-1]) if is_terminal() else runs[-1]
        print_message(f"next: {command_name()} status {run}, {command_name()} logs {run}")


def follow_sweep(sweep: Sweep, *, as_json: bool) -> int:
    """Show a sweep until it ends; return the exit code. Ctrl-C ends the command, not the sweep."""
    try:
        is_live = not as_json and is_terminal()
        status = _follow_live(sweep) if is_live else sweep.follow_trials(print_message)
    except KeyboardInterrupt:
        print_row(
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
            lines: list[str] = []
            print_facts(_facts(status), write=lines.append)
            width = live.console.width
            lines += ["", *table_lines(_columns(status), _rows(status), width, colours=_COLOURS)]
            shown = Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis")
            live.update(shown, refresh=True)
    return status


def _columns(status: SweepStatus) -> list[Column]:
    """Return the columns of the ranking; a terminal has one for each searched field, of which the last go first."""
    paths = _paths(status)
    best, number, state, objective, cost, values, run = HEADER
    fields = [
        Column(
            path,
            title=path.rpartition(".")[2],
            is_number=True,
            only="terminal",
            drop=len(paths) + 1 - place if place else 0,
        )
        for place, path in enumerate(paths)
    ]
    return [
        Column(best),
        Column(number, is_number=True),
        Column(state),
        Column(
            objective,
            title=status.metric.rpartition("/")[2],
            least=_LEAST_NUMBER,
            is_number=True,
        ),
        Column(cost, title="USD", is_number=True, drop=1),
        *fields,
        Column("length", is_number=True, only="terminal", drop=len(paths) + 1),
        Column(values, only="pipe"),
        Column(run, title="RUN"),
        Column("", least=_LEAST_REASON, only="terminal"),
    ]


_LEAST_REASON = 20
_LEAST_NUMBER = 10
"""Numbers of four digits are not longer; their header can be."""


def _paths(status: SweepStatus) -> list[str]:
    return list(dict.fromkeys(path for trial in status.trials for path in trial.values))


def _rows(status: SweepStatus) -> list[list[str | Cell]]:
    """Return a row per trial, best first, with the cells of `_columns`."""
    paths = _paths(status)
    rows: list[list[str | Cell]] = []
    for trial in status.ranking():
        best, number, state, objective, cost, values, run = map(
            printable, trial_cells(status, trial)
        )
        fields = [
            printable(describe_value(trial.values[path], format_number))
            if path in trial.values
            else ""
            for path in paths
        ]
        length = "" if trial.length is None else f"{trial.length:,}"
        rows.append(
            [
                best,
                number,
                state,
                Cell(objective, shown=objective and format_number(trial.objective or 0.0)),
                Cell(cost, shown=cost.replace("at most ", "<= ")),
                *fields,
                length,
                values,
                Cell(run, shown=short_id(trial.run)),
                printable(trial.reason),
            ]
        )
    return rows


def _rungs(plan: SweepPlan) -> str:
    return f"compared after {', '.join(map(str, plan.lengths))}"


def _price(plan: SweepPlan, backend: str) -> str:
    if plan.trial_usd is None:
        return "unknown: cloudtrain prices --refresh"
    low, high = plan.trial_usd
    if not high:
        return describe_free_trials(backend)
    amount = f"{low:,.2f}" if low == high else f"{low:,.2f} to {high:,.2f}"
    return f"{amount} USD at most per trial, with the reserve for a late stop"


def _limit(plan: SweepPlan) -> str:
    if plan.ceiling_usd is None:
        return "none; to set one: limits.cost in the sweep's file"
    is_budget = plan.ceiling_usd == plan.budget_usd
    return f"at most {format_usd(plan.ceiling_usd)}{', the budget' if is_budget else ''}"
