"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

_PROFILE_VARIABLE = "CLOUDTRAIN_PROFILE"  # importing settings would slow down --help

_TRUST_KEY = "cloudtrain.settings.trust"

Command = TypeVar("Command", bound=Callable[..., Any])


def _combine(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(function: Command) -> Command:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def job_options(function: Command) -> Command:
    """Add the JOB argument, --instances and --set."""
    return _combine(
        click.argument("job", type=click.Path(path_type=str)),
        click.option("--instances", type=click.IntRange(min=1), metavar="N", help="Number of instances."),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="PATH=VALUE",
            help="Replace one field of the job, such as cluster.spot=true. May be repeated.",
        ),
    )(function)


def account_options(function: Command) -> Command:
    """Add the options for the account's settings."""
    return _combine(
        click.option("--role", metavar="ARN", help="Execution role (CLOUDTRAIN_ROLE)."),
        click.option("--bucket", metavar="NAME", help="S3 bucket (CLOUDTRAIN_BUCKET)."),
        click.option("--region", metavar="NAME", help="AWS region (CLOUDTRAIN_REGION)."),
        profile_option,
        trust_option,
    )(function)


def trust_option(function: Command) -> Command:
    """Add --trust, which agrees to the account settings of a file beside the job."""
    return click.option(
        "--trust",
        is_flag=True,
        callback=lambda ctx, _, value: ctx.meta.update({_TRUST_KEY: True}) if value else None,
        expose_value=False,
        help="Use role, bucket and key of a cloudtrain.toml beside the job; the consent is stored.",
    )(function)


def is_trusting() -> bool:
    """Return whether this command line has --trust."""
    return _TRUST_KEY in click.get_current_context().meta


def profile_option(function: Command) -> Command:
    """Add --profile, which sets CLOUDTRAIN_PROFILE for this command."""
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

    def restore() -> None:
        os.environ.pop(_PROFILE_VARIABLE)
        if before is not None:
            os.environ[_PROFILE_VARIABLE] = before

    ctx.call_on_close(restore)


def json_option(function: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")(function)


def run_argument(function: Command) -> Command:
    """Add the RUN argument."""
    return click.argument("run", metavar="RUN")(function)


def duration(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Parse an option's duration such as `10m` or `6h`; return seconds."""
    from cloudtrain.support.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def _regex(ctx: click.Context, param: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    """Compile a regular expression; report the position of a mistake."""
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        where = "" if error.pos is None else f" at character {error.pos + 1} of {value!r}"
        raise click.BadParameter(f"{error.msg}{where}", ctx, param) from None


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | timedelta | None:
    """Parse a duration before now, or a time."""
    from cloudtrain.runs.log_lines import parse_since

    try:
        return None if value is None else parse_since(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def log_options(function: Command) -> Command:
    """Add the options that filter log lines; the command gets one `LogFilter` as `only`."""

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

    return _combine(
        click.option("--host", metavar="NAME", help="Only this host's lines, such as algo-1."),
        click.option("--grep", callback=_regex, metavar="REGEX", help="Only lines whose raw text matches."),
        click.option(
            "--since",
            callback=_moment,
            metavar="WHEN",
            help="Only lines since then: 10m (ago) or 2026-11-20T10:00 (UTC).",
        ),
        click.option(
            "--rank", type=click.IntRange(min=0), metavar="N", help="Only lines of this rank, where the rank is known."
        ),
    )(call)  # type: ignore[return-value] # the same command, with the options as one argument
