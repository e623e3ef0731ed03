"""Commands that take a run: status, logs, follow, list, stop."""

from __future__ import annotations

import itertools
import shlex
from datetime import UTC, datetime

import click

from cloudtrain import console
from cloudtrain.cli.options import is_trusting, json_option, log_options, run_argument
from cloudtrain.console import run_list
from cloudtrain.console import runs as shown
from cloudtrain.errors import CloudtrainError, UnreadableStateError, UntrustedSettingsError, UserError, did_you_mean
from cloudtrain.runs.log_lines import LogFilter
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import State
from cloudtrain.support.units import parse_moment


@click.command()
@run_argument
@json_option
def status(run: str, as_json: bool) -> int:
    """Tell the truth about a run: state, reason, progress, last checkpoint, cost."""
    from cloudtrain.client.runs import get_run

    found = get_run(run).status()
    if as_json:
        console.print_json(found.to_json())
    else:
        shown.print_status(found)
    return 0


@click.command()
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--raw", is_flag=True, help="Every line byte for byte as it was written.")
@log_options
@json_option
def logs(run: str, follow: bool, raw: bool, only: LogFilter, as_json: bool) -> int:
    """Print the log of a run's hosts."""
    from cloudtrain.client.runs import get_run
    from cloudtrain.console.logs import print_logs, print_logs_json

    handle = get_run(run)
    lines = handle.logs(follow=follow, only=only, on_trouble=console.print_message)
    if as_json:
        return print_logs_json(handle, lines, follow=follow)
    return print_logs(handle, lines, follow=follow, raw=raw, is_filtered=only != LogFilter())


@click.command()
@run_argument
@log_options
@json_option
def follow(run: str, only: LogFilter, as_json: bool) -> int:
    """Come back to a run: its log, how it stands, what it costs, until it ends. Ctrl-C leaves it going."""
    from cloudtrain.client.runs import get_run
    from cloudtrain.console.follow import follow as show

    return show(get_run(run), only=only, as_json=as_json)


@click.command(name="list")
@click.option("--local", "only", flag_value="local", help="Only this machine's runs.")
@click.option("--sagemaker", "only", flag_value="sagemaker", help="Only the account's runs.")
@click.option("--name", default="", metavar="TEXT", help="Only runs whose id holds this text.")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only runs in this state. May be repeated.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Only runs with this tag. May be repeated.")
@click.option("--since", metavar="TIME", help="Submitted since: 2d, 2026-11-01 or 2026-11-01T10:15 (UTC).")
@click.option("--until", metavar="TIME", help="Submitted until; a day counts to its end.")
@click.option(
    "-n", "limit", metavar="N", type=click.IntRange(min=1), default=20, show_default=True, help="At most this many."
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
    as_json: bool,
) -> int:
    """List runs, newest first: this machine's, and the account's where settings are complete."""
    from cloudtrain.client.runs import list_runs

    wanted = _wanted(name, states, tags, since, until)
    found = list_runs(
        wanted,
        local=only != "sagemaker",
        sagemaker={"local": False, "sagemaker": True}.get(only or ""),
        on_unreachable=None if only == "sagemaker" else _say_unreachable,
    )
    with console.spinner("looking for runs"):
        # One more than are shown tells whether there are more; it comes from a page that has been asked for already.
        runs = list(itertools.islice(found, limit + 1))
    if as_json:
        console.print_json({"runs": [status.to_json() for status in runs[:limit]]})
        return 0
    run_list.print_runs(runs[:limit], is_filtered=wanted != ALL_RUNS)
    if len(runs) > limit:
        given = [("--name", name), *(("--state", each) for each in states), *(("--tag", each) for each in tags)]
        given += [("--since", since or ""), ("--until", until or ""), ("-n", str(2 * limit))]
        words = [f"--{only}"] if only else []
        run_list.print_more(shlex.join([*words, *(word for pair in given if pair[1] for word in pair)]))
    return 0


def _say_unreachable(error: CloudtrainError) -> None:
    if isinstance(error, UntrustedSettingsError) and is_trusting():
        raise error
    console.print_message(f"the account's runs are not shown: {error}")


def _wanted(
    name: str, states: tuple[str, ...], tags: tuple[str, ...], since: str | None, until: str | None
) -> RunFilter:
    """Return which runs the options ask for.

    Raises:
        UserError: a value is not one of its kind.
    """
    now = datetime.now(UTC)
    return RunFilter(
        name=name,
        states=frozenset(map(_state, states)),
        tags=dict(map(_tag, tags)),
        since=None if since is None else _moment("--since", since, now),
        until=None if until is None else _moment("--until", until, now, is_end=True),
    )


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
    "--pool", is_flag=True, help="End its warm pool, too: the cluster that cluster.keep_alive keeps for the next job."
)
@json_option
def stop(run: str, wait: bool, pool: bool, as_json: bool) -> int:
    """End a run. A Task saves a checkpoint first; what does not end in the grace time is killed."""
    from cloudtrain.client.runs import get_run

    handle = get_run(run)
    try:
        is_over = handle.state.is_final
    except UnreadableStateError:
        is_over = False  # it is stopped all the same
    if pool and not wait and not is_over:
        hint = "leave out --no-wait, or end the pool later with the same command"
        raise UserError(f"{handle.reference} goes on; its warm pool can only be ended after it", hint)
    handle.stop()
    # Asked before the stop: a run that waits in a queue ends at once.
    console.print_message(f"{handle.reference} had ended already" if is_over else f"stopping {handle.reference}")
    found = handle.wait() if wait and not is_over else handle.status()
    if pool:
        try:
            handle.end_warm_pool()
        except UserError as error:
            if is_over:
                raise
            console.print_message(error.message)  # what was asked for is so: nothing is kept
        found = handle.status()
    if as_json:
        console.print_json(found.to_json())
    else:
        shown.print_status(found)
    return 0
