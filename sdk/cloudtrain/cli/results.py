"""Commands that show, compare and evaluate runs: dashboard, report, compare, card, evaluate."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain import console
from cloudtrain.cli.completion import complete_runs
from cloudtrain.cli.options import json_option, read_run_argument, set_option, skip_check_option
from cloudtrain.errors import UserError
from cloudtrain.support.backend_facts import MACHINE_BACKEND, SIMULATED_BACKEND

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


_runs_argument = click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs
)


@click.command()
@_runs_argument
@json_option
def compare(runs: tuple[str, ...], as_json: bool) -> None:
    """Compare runs: the settings in which they differ, and the last and best values of their metrics."""
    from cloudtrain.client import shortcuts
    from cloudtrain.console.metrics import print_comparison

    with console.spinner("reading the logs"):
        found = shortcuts.compare(runs)
    console.print_answer(found.to_json, lambda: print_comparison(found), as_json=as_json)


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port on this machine; 0 is a free one.",
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name of a proxy. May be repeated.",
)
@click.option(
    "--root-path", default="", metavar="PATH", help="Prefix of a proxy that does not remove it."
)
@json_option
def dashboard(
    port: int | None, opens: bool, hosts: tuple[str, ...], root_path: str, as_json: bool
) -> None:
    """Show runs in the browser, live: of this machine, the sandbox and the account. Ctrl-C ends it.

    The page is served on 127.0.0.1 only, and the printed address contains a token. From another machine:
    ssh -L 8787:127.0.0.1:8787 HOST. Behind Jupyter's proxy: --allowed-host with the name of the Jupyter server.
    """
    from cloudtrain.dashboard.server import Dashboard

    server = Dashboard(port, allowed_hosts=hosts, root_path=root_path)
    console.print_answer(
        lambda: {"url": server.url}, lambda: console.print_text(server.url), as_json=as_json
    )
    if not opens:
        server.serve()
        return
    from cloudtrain.dashboard.browser import opened_page

    with opened_page(server.url):
        server.serve()


@click.command()
@_runs_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Default: <run>.html.",
)
@click.option(
    "--watch", is_flag=True, help="Write it again while a run is active, until all have ended."
)
@json_option
def report(runs: tuple[str, ...], output: Path | None, watch: bool, as_json: bool) -> None:
    """Write the page of runs, with curves, plan, failure and log, into one HTML file that needs no server."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.dashboard.report import watch_report, write_report

    handles = [get_run(run) for run in runs]
    path = output or Path(
        f"{handles[0].id}.html" if len(handles) == 1 else "cloudtrain-report.html"
    )
    with console.spinner("reading the logs"):
        size = write_report(handles, path)
    if watch:
        size = watch_report(handles, path)
    console.print_answer(
        lambda: {"path": str(path), "bytes": size},
        lambda: console.print_text(str(path)),
        as_json=as_json,
    )


@click.command()
@read_run_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write it into a new file.",
)
@json_option
def card(run: str, output: Path | None, as_json: bool) -> None:
    """Print the model card of a run, in Markdown with the metadata of Hugging Face: data, code, job, metrics, cost."""
    from cloudtrain.dashboard.model_cards import model_card
    from cloudtrain.support.atomic_write import write_atomically

    if output is not None and output.exists():
        raise UserError(f"{output} exists already", "give another name, or delete it")
    with console.spinner("reading the run"):
        text = model_card(run)
    if output is None:
        console.print_answer(
            lambda: {"card": text}, lambda: console.print_text(text), as_json=as_json
        )
        return
    try:
        write_atomically(output, text)
    except OSError as error:
        raise UserError(
            f"{output}: cannot be written: {error.strerror}", "choose another file: -o FILE"
        ) from None
    found = {"path": str(output), "card": text}
    console.print_answer(lambda: found, lambda: console.print_text(str(output)), as_json=as_json)


@click.command()
@_runs_argument
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
    help="Also the weights that each run started with; rank both.",
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
    help="Wait for the results (default), or return at once.",
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
    from cloudtrain.client.evaluating import INITIAL, EvaluationChoice, parse_data
    from cloudtrain.console.plans import ConsoleObserver

    pairs = []
    step = int(checkpoint) if checkpoint is not None and checkpoint.isdecimal() else checkpoint
    weights = [INITIAL, step] if with_base else [step]
    choices = [EvaluationChoice(parse_data(data), each, splits) for each in weights]
    with ConsoleObserver() as observer:
        client = Client(observer=observer)
        # All names are resolved before anything starts.
        for run, each in product([client.get_run(name) for name in runs], choices):
            started = client.evaluate(
                run,
                each,
                overrides=overrides,
                instances=instances,
                backend=backend,
                skip_check=skip_check,
            )
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
    from cloudtrain.console.metrics import print_evaluation, print_ranking
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
