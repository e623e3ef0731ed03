"""Commands that take runs: status, logs, follow, explain, list, stop, metrics, download, rm."""

from __future__ import annotations

import itertools
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from cloudtrain import console
from cloudtrain.cli.completion import complete_runs
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import (
    confirm,
    is_trusting,
    json_option,
    listed_backend_option,
    listed_backends,
    log_options,
    parse_seconds,
    parse_step,
    parsed_by,
    read_moment,
    read_run_argument,
    run_argument,
)
from cloudtrain.client.observer import Observer
from cloudtrain.console import runs as shown
from cloudtrain.errors import (
    CloudtrainError,
    UnreadableStateError,
    UntrustedSettingsError,
    UserError,
    did_you_mean,
)
from cloudtrain.runs.log_lines import LogFilter
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.support.backend_facts import DEFAULT_BACKEND, MACHINE_BACKEND, facts_of
from cloudtrain.support.features import find_offer, offer
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.run_id import short_id
from cloudtrain.support.units import format_size


@click.command(
    cls=Command,
    examples={
        "cloudtrain status": "the newest local run",
        "cloudtrain status 71810a --json": "a run by the end of its id, for a script",
    },
)
@read_run_argument
@json_option
def status(run: str, as_json: bool) -> None:
    """Show a run's status: state, reason, progress, last checkpoint, cost."""
    from cloudtrain.client.shortcuts import get_run

    _print_status(get_run(run).status(), as_json=as_json)


def _print_status(status: Status, *, as_json: bool) -> None:
    console.print_answer(status.to_json, lambda: shown.print_status(status), as_json=as_json)


@click.command(
    cls=Command,
    examples={
        "cloudtrain explain": "the newest local run",
        "cloudtrain explain 71810a": "a run by the end of its id",
    },
)
@read_run_argument
@json_option
def explain(run: str, as_json: bool) -> None:
    """Explain why a run has failed: the first error of all hosts and ranks, its class, and what to do."""
    from cloudtrain.client import shortcuts
    from cloudtrain.console.facts import print_facts

    handle = shortcuts.get_run(run)
    found = shortcuts.explain(handle)
    rows = shown.explanation_rows(found, handle.reference)
    console.print_answer(found.to_json, lambda: print_facts(rows), as_json=as_json)


@click.command(
    cls=Command,
    examples={
        "cloudtrain logs -f": "the newest local run, until it ends",
        "cloudtrain logs 71810a --tail 50 --rank 0": "the last lines of rank 0",
    },
)
@read_run_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option(
    "--tail",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the last N lines; -f continues after them.",
)
@click.option("--raw", is_flag=True, help="Print every line unchanged, without formatting events.")
@log_options
@json_option
def logs(
    run: str, follow: bool, tail: int | None, raw: bool, only: LogFilter, as_json: bool
) -> int:
    """Print the log of a run's hosts."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.runs import print_logs, print_logs_json
    from cloudtrain.runs.log_lines import last_lines

    handle = get_run(run)
    if tail is None:
        lines = iter(handle.logs(follow=follow, only=only, on_trouble=console.print_message))
    else:
        all_shown = raw or as_json
        lines = last_lines(
            handle,
            tail,
            follow=follow,
            only=only,
            on_trouble=console.print_message,
            is_shown=lambda line: all_shown or shown.format_log_line(line) is not None,
        )
    if as_json:
        return print_logs_json(handle, lines, follow=follow)
    return print_logs(handle, lines, follow=follow, raw=raw, only=only)


@click.command(
    cls=Command,
    examples={
        "cloudtrain follow": "the newest local run",
        "cloudtrain follow 71810a --host algo-2": "the lines of one host",
    },
)
@read_run_argument
@log_options
@json_option
def follow(run: str, only: LogFilter, as_json: bool) -> int:
    """Show a run's log, progress and cost until it ends. Ctrl-C ends the command, not the run."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.follow import follow as show

    return show(get_run(run), only=only, as_json=as_json)


@click.command(
    cls=Command,
    name="list",
    examples={
        "cloudtrain list --state failed --since 2d": "failures of two days",
        "cloudtrain list --local --name digits": "on this machine, by name",
    },
)
@click.option("--local", "only", flag_value=MACHINE_BACKEND, help="Only this machine's runs.")
@click.option("--sagemaker", "only", flag_value=DEFAULT_BACKEND, help="Only the account's runs.")
@listed_backend_option
@click.option("--name", default="", metavar="TEXT", help="Only runs whose id contains this text.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="STATE",
    help="Only runs in this state. May be repeated.",
)
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only runs with this tag. May be repeated.",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Submitted since: 2d (ago) or 2026-11-01T10:15 (UTC).",
)
@click.option("--until", metavar="TIME", help="Submitted until; a date includes the whole day.")
@click.option(
    "-n",
    "limit",
    metavar="N",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Maximum number of runs.",
)
@click.option(
    "--endpoints", is_flag=True, help="List endpoints instead, which cost money while they exist."
)
@click.option(
    "--idle",
    callback=parsed_by(parse_seconds),
    default="1d",
    show_default=True,
    metavar="TIME",
    help="With --endpoints: report those unused so long.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show whole run ids, also on a terminal.")
@json_option
def list_(
    only: str | None,
    backend: str | None,
    name: str,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int,
    endpoints: bool,
    idle: int,
    verbose: bool,
    as_json: bool,
) -> None:
    """List runs, newest first: of this machine, of Slurm sites, and of the account where settings are complete."""
    if endpoints:
        offer("endpoint_list")(only, idle, as_json=as_json)
        return
    from cloudtrain.client.client import Client
    from cloudtrain.console.runs import print_runs

    wanted = RunFilter(
        name=name,
        states=frozenset(map(_state, states)),
        tags=dict(map(_tag, tags)),
        since=read_moment("--since", since),
        until=read_moment("--until", until, is_end=True),
    )
    named = listed_backends(only, backend)
    is_account_asked_for = named is not None and any(facts_of(each).is_billed for each in named)
    observer = Observer() if is_account_asked_for else _ListObserver()
    found = Client(observer=observer).list_runs(wanted, backend=named)
    with console.spinner("looking for runs"):
        # One more run than is shown, to know whether there are more.
        runs = list(itertools.islice(found, limit + 1))
    if as_json:
        console.print_json({"runs": [status.to_json() for status in runs[:limit]]})
        return
    print_runs(runs[:limit], is_filtered=wanted != ALL_RUNS, with_ids=verbose)
    if len(runs) > limit:
        given = [
            ("--backend", backend or ""),
            ("--name", name),
            *(("--state", each) for each in states),
            *(("--tag", each) for each in tags),
        ]
        given += [("--since", since or ""), ("--until", until or ""), ("-n", str(2 * limit))]
        words = [f"--{only}"] if only else []
        arguments = shlex.join([*words, *(word for pair in given if pair[1] for word in pair)])
        console.print_message(f"more: {console.command_name()} list {arguments}")


class _ListObserver(Observer):
    """Prints why runs are missing from a list, which continues without them."""

    def on_unreachable(self, error: CloudtrainError) -> None:
        """Print why the account's runs are not shown."""
        if isinstance(error, UntrustedSettingsError) and is_trusting():
            raise error
        console.print_message(f"the account's runs are not shown: {error.for_terminal()}")


def _state(text: str) -> State:
    legal = [str(state) for state in State]
    if text.upper() not in legal:
        raise UserError(
            f"--state {text}: there is no such state", did_you_mean(text.upper(), legal)
        )
    return State(text.upper())


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--tag {text}: expected KEY=VALUE", "for example --tag team=vision")
    return key, value


@click.command(
    cls=Command,
    examples={
        "cloudtrain stop 71810a": "wait for its checkpoint and its end",
        "cloudtrain stop 71810a --no-wait": "return at once",
    },
)
@run_argument
@click.option(
    "--wait/--no-wait", default=True, help="Wait until every process has ended (default)."
)
@click.option(
    "--pool",
    is_flag=True,
    help="Also end its warm pool (cluster.keep_alive).",
)
@click.option("--yes", is_flag=True, help="Do not ask when a short name means a billed run.")
@json_option
def stop(run: str, wait: bool, pool: bool, yes: bool, as_json: bool) -> None:
    """Stop a run. A Task saves a checkpoint first; processes that outlive the grace period are killed."""
    from cloudtrain.client.shortcuts import get_run

    handle = get_run(run)
    try:
        is_over = handle.state.is_final
    except UnreadableStateError:
        # `stop` works without a readable state.
        is_over = False
    if pool and not wait and not is_over:
        hint = "leave out --no-wait, or end the pool later with the same command"
        raise UserError(
            f"{handle.reference} has not ended; its warm pool can only be ended after it", hint
        )
    # Also the short id, which `submit` prints: only a name or another part of the id is uncertain.
    is_exact = run in (handle.id, handle.reference, short_id(handle.id))
    if handle.is_billed and not is_over and not yes and not is_exact:
        means = f"{run!r} means {handle.reference}, which is active"
        confirm(
            f"{means}. Stop it?",
            unasked=f"{means} and costs money; nothing was stopped",
            refused="nothing was stopped",
            hint=f"to stop it: cloudtrain stop {handle.reference}",
        )
    handle.stop()
    # `is_over` is from before the stop: a run that waits in a queue ends at once.
    if is_over:
        console.print_message(f"{handle.reference} had ended already")
    else:
        console.print_message(f"stopping {handle.reference}")
    with console.spinner(f"waiting for the end of {handle.reference}"):
        found = handle.wait() if wait and not is_over else handle.status()
    if pool:
        try:
            handle.end_warm_pool()
        except UserError as error:
            if is_over:
                raise
            # No warm pool is kept, which is what the user wants.
            console.print_message(error.message)
        found = handle.status()
    _print_status(found, as_json=as_json)


@click.command(
    cls=Command,
    examples={
        "cloudtrain metrics": "the newest local run",
        "cloudtrain metrics 71810a validation/loss --all": "every value of one",
    },
)
@read_run_argument
@click.argument("names", nargs=-1, metavar="[METRIC]...")
@click.option("--all", "show_all", is_flag=True, help="Print every step and every metric.")
@json_option
def metrics(run: str, names: tuple[str, ...], show_all: bool, as_json: bool) -> int:
    """Print the values of a run's metrics by step.

    METRIC is a name such as train/loss, or loss for all splits. A terminal shows as many steps as fit, without the
    metrics of the training's speed, unless they are named.
    """
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.metrics import print_history
    from cloudtrain.runs.history import read_history

    handle = get_run(run)
    with console.spinner("reading the log"):
        history = read_history(handle)
    if names or not as_json:
        chosen = tuple(history.metrics)
        if names or not show_all:
            chosen = history.select(names)
        history = history.only(chosen)
    if as_json:
        console.print_json(history.to_json(handle.id))
    else:
        unmatched = () if history.metrics else handle.status().progress.unmatched
        print_history(history, show_all=show_all, unmatched=unmatched)
    return 0


@click.command(
    cls=Command,
    examples={
        "cloudtrain download 71810a": "everything, into ./<run>",
        "cloudtrain download 71810a --what model --to model": "only its model",
    },
)
@run_argument
@click.option(
    "--what",
    multiple=True,
    type=click.Choice(["model", "outputs", "checkpoints"]),
    help="Only this part. Repeatable.",
)
@click.option(
    "--to", type=click.Path(path_type=Path), metavar="DIR", help="The folder; by default ./<run>."
)
@click.option(
    "--step",
    callback=parsed_by(parse_step("best", "last")),
    metavar="N|best|last",
    help="Only this checkpoint; all by default.",
)
@click.option("--unpack", is_flag=True, help="Unpack model.tar.gz and output.tar.gz, too.")
@click.option("--force", is_flag=True, help="Replace files that have other content.")
@json_option
def download(
    run: str,
    what: tuple[str, ...],
    to: Path | None,
    step: int | str | None,
    unpack: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Copy a run's model, outputs and checkpoints into a folder, and verify them.

    A file appears when it is complete. The same command continues an interrupted download, and leaves equal files as
    they are. `sha256sum -c SHA256SUMS` verifies the folder later.
    """
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.checkpoints import print_download

    with console.progress_bar("downloading") as progress:
        done = get_run(run).download(
            to, what=what, step=step, unpack=unpack, force=force, progress=progress
        )
    console.print_answer(done.to_json, lambda: print_download(done), as_json=as_json)


@click.command(
    cls=Command,
    examples={
        "cloudtrain rm 71810a": "one run; asks first",
        "cloudtrain rm --older-than 30d --keep-best": "old runs, but not the best",
    },
)
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@click.option(
    "--older-than",
    callback=parsed_by(parse_seconds),
    metavar="AGE",
    help="All local runs that ended before: 30d.",
)
@click.option("--keep-best", is_flag=True, help="Keep the best run of each job and sweep.")
@click.option("--yes", is_flag=True, help="Delete without a question.")
@json_option
def rm(
    runs: tuple[str, ...], older_than: int | None, keep_best: bool, yes: bool, as_json: bool
) -> None:
    """Delete the folders of local runs: logs, checkpoints and models. Shows them with their sizes and asks.

    Active runs are refused, and runs whose checkpoints another run names. Files in S3 and jobs on SageMaker are never
    deleted.
    """
    from cloudtrain.client import removal
    from cloudtrain.client.client import Client

    if bool(runs) == (older_than is not None):
        raise click.UsageError(
            "give runs, or --older-than: cloudtrain rm RUN, cloudtrain rm --older-than 30d"
        )
    if keep_best and older_than is None:
        raise click.UsageError("--keep-best needs --older-than, such as --older-than 30d")
    with console.spinner("looking for runs"):
        if older_than is None:
            found = removal.select_named(Client(), runs)
        else:
            before = datetime.now(UTC) - timedelta(seconds=older_than)
            best_trials = find_offer("best_trials") if keep_best else None
            best = best_trials() if best_trials is not None else {}
            found = removal.select_older(Client(), before, keep_best=keep_best, best_trials=best)
        sizes = {status.reference: removal.run_bytes(status) for status in found.runs}
    total = f"{count(len(sizes), 'run')}, {format_size(sum(sizes.values()))}"
    if not as_json:
        from cloudtrain.console.removal import print_removal

        print_removal(found, sizes)
    if sizes and not yes:
        confirm(
            f"Delete {total}?",
            unasked=f"there is no terminal to ask whether to delete {total}; nothing was deleted",
            refused="nothing was deleted",
            hint="to delete without a question: --yes",
        )
    for status in found.runs:
        removal.delete_run(status)
    if as_json:
        removed = [{"run": run, "bytes": size} for run, size in sizes.items()]
        kept = [{"run": f"local:{run}", "reason": reason} for run, reason in found.kept.items()]
        console.print_json({"removed": removed, "kept": kept})
    elif sizes:
        console.print_message(f"deleted {total}")
