"""Commands that take a run: status, logs, follow, explain, list, stop."""

from __future__ import annotations

import itertools
import shlex
import sys
from datetime import UTC, datetime

import click

from cloudtrain import console
from cloudtrain.cli.options import (
    is_trusting,
    json_option,
    log_options,
    parse_seconds,
    parsed_by,
    run_argument,
)
from cloudtrain.client.observer import Observer
from cloudtrain.console import runs as shown
from cloudtrain.errors import CloudtrainError, UnreadableStateError, UntrustedSettingsError, UserError, did_you_mean
from cloudtrain.runs.log_lines import LogFilter
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State, Status
from cloudtrain.support.units import parse_moment


@click.command()
@run_argument
@json_option
def status(run: str, as_json: bool) -> None:
    """Show a run's status: state, reason, progress, last checkpoint, cost."""
    from cloudtrain.client.shortcuts import get_run

    _print_status(get_run(run).status(), as_json=as_json)


def _print_status(status: Status, *, as_json: bool) -> None:
    console.print_answer(status.to_json, lambda: console.print_columns(shown.status_rows(status)), as_json=as_json)


@click.command()
@run_argument
@json_option
def explain(run: str, as_json: bool) -> None:
    """Explain why a run has failed: the first error of all hosts and ranks, its class, and what to do."""
    from cloudtrain.client import shortcuts

    handle = shortcuts.get_run(run)
    found = shortcuts.explain(handle)
    lines = shown.explanation_lines(found, handle.reference)
    console.print_answer(found.to_json, lambda: console.print_text("\n".join(lines)), as_json=as_json)


@click.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="Only the last N lines; -f continues after them.")
@click.option("--raw", is_flag=True, help="Print every line unchanged, without formatting events.")
@log_options
@json_option
def logs(run: str, follow: bool, tail: int | None, raw: bool, only: LogFilter, as_json: bool) -> int:
    """Print the log of a run's hosts."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.logs import print_logs, print_logs_json
    from cloudtrain.runs.last_lines import last_lines

    handle = get_run(run)
    if tail is None:
        lines = handle.logs(follow=follow, only=only, on_trouble=console.print_message)
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


@click.command()
@run_argument
@log_options
@json_option
def follow(run: str, only: LogFilter, as_json: bool) -> int:
    """Show a run's log, progress and cost until it ends. Ctrl-C ends the command, not the run."""
    from cloudtrain.client.shortcuts import get_run
    from cloudtrain.console.follow import follow as show

    return show(get_run(run), only=only, as_json=as_json)


@click.command(name="list")
@click.option("--local", "only", flag_value="local", help="Only this machine's runs.")
@click.option("--sagemaker", "only", flag_value="sagemaker", help="Only the account's runs.")
@click.option("--name", default="", metavar="TEXT", help="Only runs whose id contains this text.")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only runs in this state. May be repeated.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Only runs with this tag. May be repeated.")
@click.option("--since", metavar="TIME", help="Submitted since: 2d (ago), 2026-11-01 or 2026-11-01T10:15 (UTC).")
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
@click.option("--endpoints", is_flag=True, help="List endpoints instead, which cost money while they exist.")
@click.option(
    "--idle",
    callback=parsed_by(parse_seconds),
    default="1d",
    show_default=True,
    metavar="TIME",
    help="With --endpoints: report those without an invocation for so long.",
)
@json_option
def list_(
    only: str | None,
    name: str,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int,
    endpoints: bool,
    idle: int,
    as_json: bool,
) -> None:
    """List runs, newest first: this machine's, and the account's where settings are complete."""
    if endpoints:
        from cloudtrain.cli.endpoints import list_endpoints

        list_endpoints(only, idle, as_json=as_json)
        return
    from cloudtrain.client.client import Client
    from cloudtrain.console.run_list import print_runs

    now = datetime.now(UTC)
    wanted = RunFilter(
        name=name,
        states=frozenset(map(_state, states)),
        tags=dict(map(_tag, tags)),
        since=None if since is None else _moment("--since", since, now),
        until=None if until is None else _moment("--until", until, now, is_end=True),
    )
    observer = Observer() if only == "sagemaker" else _ListObserver()
    found = Client(observer=observer).list_runs(wanted, backends=_LISTED.get(only or ""))
    with console.spinner("looking for runs"):
        # One more run than is shown, to know whether there are more.
        runs = list(itertools.islice(found, limit + 1))
    if as_json:
        console.print_json({"runs": [status.to_json() for status in runs[:limit]]})
        return
    print_runs(runs[:limit], is_filtered=wanted != ALL_RUNS)
    if len(runs) > limit:
        given = [("--name", name), *(("--state", each) for each in states), *(("--tag", each) for each in tags)]
        given += [("--since", since or ""), ("--until", until or ""), ("-n", str(2 * limit))]
        words = [f"--{only}"] if only else []
        arguments = shlex.join([*words, *(word for pair in given if pair[1] for word in pair)])
        console.print_message(f"more: {console.command_name()} list {arguments}")


_LISTED = {"local": ("local", "sandbox"), "sagemaker": ("sagemaker",)}
"""Backends whose runs an option of `list` selects."""


class _ListObserver(Observer):
    """Prints why runs are missing from a list, which continues without them."""

    def on_unreachable(self, error: CloudtrainError) -> None:
        """Print why the account's runs are not shown."""
        if isinstance(error, UntrustedSettingsError) and is_trusting():
            raise error
        console.print_message(f"the account's runs are not shown: {error}")


def _state(text: str) -> State:
    legal = [str(state) for state in State]
    if text.upper() not in legal:
        raise UserError(f"--state {text}: there is no such state", did_you_mean(text.upper(), legal))
    return State(text.upper())


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--tag {text}: expected KEY=VALUE", "for example --tag team=vision")
    return key, value


def _moment(option: str, text: str, now: datetime, *, is_end: bool = False) -> datetime:
    try:
        return parse_moment(text, now, is_end=is_end)
    except ValueError as error:
        raise UserError(f"{option}: {error}", f"for example {option} 2d") from None


@click.command()
@run_argument
@click.option("--wait/--no-wait", default=True, help="Wait until every process has ended (default).")
@click.option(
    "--pool", is_flag=True, help="Also end its warm pool: the cluster that cluster.keep_alive keeps for the next job."
)
@click.option("--yes", is_flag=True, help="Do not ask when a short name means a run that costs money.")
@json_option
def stop(run: str, wait: bool, pool: bool, yes: bool, as_json: bool) -> None:
    """Stop a run. A Task saves a checkpoint first; processes that outlive the grace period are killed."""
    from cloudtrain.client.shortcuts import get_run

    handle = get_run(run)
    try:
        is_over = handle.state.is_final
    except UnreadableStateError:
        is_over = False  # `stop` works without a readable state
    if pool and not wait and not is_over:
        hint = "leave out --no-wait, or end the pool later with the same command"
        raise UserError(f"{handle.reference} has not ended; its warm pool can only be ended after it", hint)
    if handle.is_billed and not is_over and not yes and run not in (handle.id, handle.reference):
        _confirm_stop(run, handle.reference)
    handle.stop()
    # `is_over` is from before the stop: a run that waits in a queue ends at once.
    console.print_message(f"{handle.reference} had ended already" if is_over else f"stopping {handle.reference}")
    found = handle.wait() if wait and not is_over else handle.status()
    if pool:
        try:
            handle.end_warm_pool()
        except UserError as error:
            if is_over:
                raise
            console.print_message(error.message)  # no warm pool is kept, which is what the user wants
        found = handle.status()
    _print_status(found, as_json=as_json)


def _confirm_stop(name: str, reference: str) -> None:
    """Ask whether a short name means the right run.

    Raises:
        UserError: There is no terminal, or the answer is no.
    """
    hint = f"to stop it: cloudtrain stop {reference}"
    if not sys.stdin.isatty():
        raise UserError(f"{name!r} means {reference}, which is active and costs money; nothing was stopped", hint)
    if not click.confirm(f"{name!r} means {reference}, which is active. Stop it?", default=False, err=True):
        raise UserError("nothing was stopped", hint)
