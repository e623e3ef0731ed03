"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

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
    )(function)


def json_option(function: Command) -> Command:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")(function)


def run_argument(function: Command) -> Command:
    """Add the RUN argument."""
    return click.argument("run", metavar="RUN")(function)


def duration(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Return the seconds that an option gives, written `10m` or `6h`."""
    from cloudtrain.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
