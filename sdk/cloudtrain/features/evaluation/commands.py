"""`cloudtrain evaluate`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import json_option, runs_argument, set_option, skip_check_option
from cloudtrain.support.backend_facts import MACHINE_BACKEND, SIMULATED_BACKEND

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


@click.command(
    cls=Command,
    examples={
        "cloudtrain evaluate 71810a --split test": "its final weights",
        "cloudtrain evaluate 71810a 7bec7f --data s3://team/new": "rank two on new data",
    },
)
@runs_argument
@click.option(
    "--data",
    multiple=True,
    metavar="[CHANNEL=]URI",
    help="New data for a channel. May be repeated.",
)
@click.option(
    "--checkpoint", metavar="STEP|best|initial", help="These weights; by default the final ones."
)
@click.option(
    "--split", "splits", multiple=True, metavar="NAME", help="Only this split. May be repeated."
)
@click.option(
    "--base",
    "with_base",
    is_flag=True,
    help="Also the weights that a run started with.",
)
@click.option("--local", "backend", flag_value=MACHINE_BACKEND, help="Evaluate on this machine.")
@click.option(
    "--sandbox",
    "backend",
    flag_value=SIMULATED_BACKEND,
    help="Evaluate in the sandbox, where the run was.",
)
@click.option(
    "--instances",
    type=click.IntRange(min=1),
    metavar="N",
    help="By default as many as the run had.",
)
@set_option("Change one field of the run's job.")
@skip_check_option
@click.option(
    "--follow/--detach",
    "--wait/--no-wait",
    "wait",
    default=True,
    help="Wait (default), or return at once.",
)
@json_option
def evaluate(
    runs: tuple[str, ...],
    data: tuple[str, ...],
    checkpoint: str | None,
    splits: tuple[str, ...],
    with_base: bool,
    backend: str | None,
    instances: int | None,
    overrides: tuple[str, ...],
    skip_check: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Evaluate the weights of runs, without training; rank several runs on the same data.

    Each evaluation is a run of its own, with the code of the evaluated run, on the machine or cluster type of that run.
    """
    from cloudtrain.client.client import Client
    from cloudtrain.console.plans import ConsoleObserver
    from cloudtrain.features.evaluation.evaluating import (
        INITIAL,
        EvaluationOptions,
        parse_data,
        prepare_evaluation,
    )

    step = int(checkpoint) if checkpoint is not None and checkpoint.isdecimal() else checkpoint
    weights = [INITIAL, step] if with_base else [step]
    choices = [EvaluationOptions(parse_data(data), each, splits) for each in weights]
    with ConsoleObserver() as observer:
        client = Client(observer=observer)
        prepared = [
            (
                run,
                prepare_evaluation(
                    run,
                    each,
                    client=client,
                    overrides=overrides,
                    instances=instances,
                    backend=backend,
                    skip_check=skip_check,
                ),
            )
            for run, each in product([client.get_run(name) for name in runs], choices)
        ]
        # Every argument has been checked, and now they start.
        pairs = []
        for run, start in prepared:
            started = start()
            console.print_message(f"evaluating {run.reference}: {started.reference}")
            pairs.append((run, started))
    if wait:
        return _show_results(pairs, as_json=as_json)
    found = [started.reference for _, started in pairs]
    console.print_answer(
        lambda: {"runs": found}, lambda: console.print_text("\n".join(found)), as_json=as_json
    )
    return 0


def _show_results(pairs: list[tuple[Run, Run]], *, as_json: bool) -> int:
    """Wait for evaluations and print them. Return the exit code.

    Args:
        pairs: The evaluated runs, each with the run that evaluates it.
        as_json: Print one JSON object.
    """
    from cloudtrain.features.evaluation.output import print_evaluation, print_ranking
    from cloudtrain.runs.evaluations import rank_evaluations

    found, exit_code, failures = [], 0, list[str]()
    for run, started in pairs:
        with console.spinner(f"evaluating {run.reference}; Ctrl-C leaves it running"):
            status = started.wait(on_trouble=console.print_message)
        if status.exit_code:
            reason = (status.reason.strip().splitlines() or [""])[0]
            failures.append(f"the evaluation of {run.reference} ended as {status.state}: {reason}")
            console.print_message(f"error: {failures[-1]}")
            console.print_message(f"  see: cloudtrain explain {started.reference}")
            exit_code = exit_code or status.exit_code
            continue
        found += [each for each in run.evaluations() if each.run == started.id]
    ranking = rank_evaluations(found)
    if as_json and failures and not found:
        console.print_json_error(
            "; ".join(failures), "cloudtrain explain RUN, with the run that evaluated", exit_code
        )
    elif as_json:
        console.print_json(
            {
                "evaluations": [each.to_json() for each in ranking.evaluations],
                "metric": ranking.metric,
                "warnings": list(ranking.warnings),
            }
        )
    elif len(found) == 1:
        print_evaluation(found[0])
    elif found:
        print_ranking(ranking)
    return exit_code
