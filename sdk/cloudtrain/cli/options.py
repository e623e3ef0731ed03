"""Options that several commands share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

_PROFILE_VARIABLE = "CLOUDTRAIN_PROFILE"  # importing settings would slow down --help

_TRUST = "cloudtrain.settings.trust"

Command = TypeVar("Command", bound=Callable[..., Any])


def _all(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(function: Command) -> Command:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def job_options(function: Command) -> Command:
    """Add what every command takes that takes a JOB."""
    return _all(
        click.argument("job", type=click.Path(path_type=str)),
        click.option("--instances", type=click.IntRange(min=1), metavar="N", help="Number of instances."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="PATH=VALUE",
            help="Replace one value of the job, such as cluster.spot=true. May be repeated.",
        ),
    )(function)


def account_options(function: Command) -> Command:
    """Add the account's settings that may be given as flags."""
    return _all(
        click.option("--role", metavar="ARN", help="Execution role (CLOUDTRAIN_ROLE)."),
        click.option("--bucket", metavar="NAME", help="S3 bucket (CLOUDTRAIN_BUCKET)."),
        click.option("--region", metavar="NAME", help="AWS region (CLOUDTRAIN_REGION)."),
        profile_option,
        trust_option,
    )(function)


def trust_option(function: Command) -> Command:
    """Add --trust, by which `run` agrees to the account settings of a file beside the job."""
    return click.option(
        "--trust",
        is_flag=True,
        callback=lambda ctx, _, value: ctx.meta.update({_TRUST: True}) if value else None,
        expose_value=False,
        help="Use role, bucket and key of a cloudtrain.toml beside the job; remembered for these values.",
    )(function)


def is_trusting() -> bool:
    """Return whether this command line has --trust."""
    return _TRUST in click.get_current_context().meta


def profile_option(function: Command) -> Command:
    """Add --profile, which is what CLOUDTRAIN_PROFILE would be for this one command."""
    return click.option(
        "--profile",
        callback=_choose_profile,
        expose_value=False,
        metavar="NAME",
        help="Profile of the settings (CLOUDTRAIN_PROFILE).",
    )(function)


def _choose_profile(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    before = os.environ.get(_PROFILE_VARIABLE)
    os.environ[_PROFILE_VARIABLE] = value

    def give_back() -> None:
        os.environ.pop(_PROFILE_VARIABLE)
        if before is not None:
            os.environ[_PROFILE_VARIABLE] = before

    ctx.call_on_close(give_back)


def json_option(function: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")(function)


def run_argument(function: Command) -> Command:
    """Add the RUN argument."""
    return click.argument("run", metavar="RUN")(function)


def duration(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Return the seconds that an option gives, written `10m` or `6h`."""
    from cloudtrain.support.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def _regex(ctx: click.Context, param: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    """Compile a regular expression, or say where it is wrong."""
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        where = "" if error.pos is None else f" at character {error.pos + 1} of {value!r}"
        raise click.BadParameter(f"{error.msg}{where}", ctx, param) from None


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | timedelta | None:
    """Read a duration up to now, or a time."""
    from cloudtrain.runs.log_lines import parse_since

    try:
        return None if value is None else parse_since(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def log_options(function: Command) -> Command:
    """Add what chooses lines of a log; the command gets one `LogFilter` as `only`."""

    @functools.wraps(function)
    def call(
        *arguments: Any,
        host: str | None,
        grep: re.Pattern[str] | None,
        since: datetime | timedelta | None,
        rank: int | None,
        **rest: Any,
    ) -> Any:
        from cloudtrain.runs.log_lines import LogFilter

        return function(*arguments, only=LogFilter(host, grep, since, rank), **rest)

    return _all(
        click.option("--host", metavar="NAME", help="Only this host's lines, such as algo-1."),
        click.option(
            "--grep", callback=_regex, metavar="REGEX", help="Only lines that match, as logs --raw shows them."
        ),
        click.option(
            "--since", callback=_moment, metavar="WHEN", help="Only lines since 10m ago, or 2026-11-20T10:00 (UTC)."
        ),
        click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only lines known to be of this rank."),
    )(call)  # type: ignore[return-value] # the same command, with the options as one argument
