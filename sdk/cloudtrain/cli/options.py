"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import click

from cloudtrain.cli.completion import complete_fields, complete_runs
from cloudtrain.support.backend_facts import BACKENDS, choose_backend, facts_of
from cloudtrain.support.features import offer
from cloudtrain.support.job_file import JOB_FILES, find_job_files, names_notebook

if TYPE_CHECKING:
    from cloudtrain.job.spec import LoadedJob
    from cloudtrain.runs.log_lines import LogFilter

# Copies of the settings' names: importing settings would slow down --help.
_PROFILE_VARIABLE = "CLOUDTRAIN_PROFILE"
_SITE_VARIABLE = "CLOUDTRAIN_SITE"

_TRUST_KEY = "cloudtrain.settings.trust"

_LATEST = "latest"

Command = TypeVar("Command", bound=Callable[..., Any])


def decline(message: str) -> NoReturn:
    """End the command after the answer no to a question, which is no error.

    Args:
        message: What was not done.
    """
    from cloudtrain import console

    is_json = bool(click.get_current_context().params.get("as_json"))
    console.print_declined(message, as_json=is_json)
    raise click.exceptions.Exit(0)


def refuse_misspelt(ctx: click.Context, word: str, commands: Iterable[str]) -> None:
    """Fail if a word is close to a command of a group, and neither a file nor written as one."""
    from cloudtrain.errors import nearest

    is_file = word.startswith("-") or "." in word or "/" in word or os.path.exists(word)  # noqa: PTH110 (fast start)
    near = None if is_file or ctx.resilient_parsing else nearest(word, commands)
    if near is not None:
        ctx.fail(f'there is no command {word!r}; did you mean "{near}"?')


def option_group(
    name: str, build: Callable[..., object], *options: Callable[[Command], Command]
) -> Callable[[Command], Command]:
    """Return a decorator that adds options; the command gets their values as one argument.

    Args:
        name: Name of the command's argument.
        build: Function of the options' values, by keyword; usually a dataclass.
        options: click's options and arguments.
    """

    def take_options() -> None: ...

    members = [
        each.name for each in click.command(_add(options, take_options)).params if each.expose_value
    ]

    def apply(function: Command) -> Command:
        @functools.wraps(function)
        def call(*arguments: Any, **values: Any) -> Any:
            chosen = {str(member): values.pop(member) for member in members}
            return function(*arguments, **values, **{name: build(**chosen)})

        return cast("Command", _add(options, call))

    return apply


def _add(
    options: Sequence[Callable[[Any], Any]], function: Callable[..., Any]
) -> Callable[..., Any]:
    return functools.reduce(lambda command, option: option(command), reversed(options), function)


@dataclass(frozen=True)
class JobArguments:
    """The job of a command line: its file, and the changes of its fields."""

    job: str
    instances: int | None
    overrides: tuple[str, ...]

    def load(self) -> LoadedJob:
        """Return the job with all problems of its file. A notebook's job is read from its cells."""
        if names_notebook(self.job):
            found: LoadedJob = offer("job_of_notebook")(
                self.job, self.overrides, instances=self.instances
            )
            return found
        from cloudtrain.job.spec import load_job

        return load_job(self.job, self.overrides, instances=self.instances)

    def with_value(self, field: str, value: str) -> JobArguments:
        """Return these arguments with another value of a field."""
        return replace(self, overrides=(*self.overrides, f"{field}={value}"))

    def words(self) -> str:
        """Return the command-line words of the same job, without `checkpoint.resume`."""
        from cloudtrain.job.spec import job_words

        overrides = [each for each in self.overrides if not each.startswith("checkpoint.resume=")]
        return job_words(self.job, overrides, instances=self.instances)


def _job_arguments(job: str, instances: int | None, overrides: tuple[str, ...]) -> JobArguments:
    return JobArguments(_find_job_file(job), instances, overrides)


def _find_job_file(path: str) -> str:
    found, *unused = find_job_files(path)
    if unused:
        from cloudtrain.console import print_message

        names = (os.path.basename(each) for each in (found, *unused))  # noqa: PTH119 (fast start)
        print_message("{} is used, and not {} beside it".format(*names))
    return found


def set_option(help_text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds --set; the command gets its values as `overrides`."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="PATH=VALUE",
        shell_complete=complete_fields,
        help=help_text,
    )


job_options = option_group(
    "job",
    _job_arguments,
    click.argument("job", type=click.Path(path_type=str), default=JOB_FILES[0]),
    click.option(
        "--instances", type=click.IntRange(min=1), metavar="N", help="Number of instances."
    ),
    set_option("Replace a field: cluster.spot=true. Repeatable."),
)
"""Adds the JOB argument, --instances and --set; the command gets `JobArguments` as `job`.

JOB is by default ./job.yaml or ./job.yml, and of a folder the one in it."""


def _sets(
    variable: str,
) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """Return the callback of an option that sets a variable for its command."""

    def choose(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
        if value is None:
            return None
        before = os.environ.get(variable)
        os.environ[variable] = value

        def restore() -> None:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before

        ctx.call_on_close(restore)
        return value

    return choose


profile_option = click.option(
    "--profile",
    callback=_sets(_PROFILE_VARIABLE),
    expose_value=False,
    metavar="NAME",
    help="Profile of the settings (CLOUDTRAIN_PROFILE).",
)
"""Adds --profile, which sets CLOUDTRAIN_PROFILE for this command."""

trust_option = click.option(
    "--trust",
    is_flag=True,
    callback=lambda ctx, _, value: ctx.meta.update({_TRUST_KEY: True}) if value else None,
    expose_value=False,
    help="Trust the settings and runs of a cloned repository.",
)
"""Adds --trust, which agrees to the account settings of a file beside the job, and to a folder of local runs."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")
skip_check_option = click.option(
    "--skip-check", is_flag=True, help="Start without checking the account first."
)
new_option = click.option(
    "--new",
    is_flag=True,
    help="Start even if the same request and code is live.",
)
cuda_on_cpu_option = click.option(
    "--cuda-on-cpu",
    is_flag=True,
    help="With --local: a stand-in for CUDA without a GPU.",
)
run_argument = click.argument("run", metavar="RUN", shell_complete=complete_runs)
read_run_argument = click.argument(
    "run", metavar="[RUN]", default=_LATEST, shell_complete=complete_runs
)
"""Adds the RUN argument of a command that only reads: by default the newest local run."""
runs_argument = click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs
)

account_options = option_group(
    "flags",
    dict,
    click.option("--role", metavar="ARN", help="Execution role (CLOUDTRAIN_ROLE)."),
    click.option("--bucket", metavar="NAME", help="S3 bucket (CLOUDTRAIN_BUCKET)."),
    click.option("--region", metavar="NAME", help="AWS region (CLOUDTRAIN_REGION)."),
    profile_option,
    trust_option,
)
"""Adds the options for the account's settings; the command gets them by setting name as `flags`."""


def backend_options(local_help: str, sandbox_help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds --backend, --local, --sandbox and --site; the command gets the name as `backend`.

    --site sets CLOUDTRAIN_SITE for this command.
    """
    return option_group(
        "backend",
        _choose_backend,
        click.option("--local", is_flag=True, help=local_help),
        click.option("--sandbox", is_flag=True, help=sandbox_help),
        click.option(
            "--backend",
            metavar="NAME",
            help="Where it runs: local, slurm, sandbox or sagemaker (default).",
        ),
        click.option(
            "--site",
            callback=_sets(_SITE_VARIABLE),
            metavar="NAME",
            help="With --backend slurm: the cluster (CLOUDTRAIN_SITE).",
        ),
    )


def _choose_backend(backend: str | None, *, local: bool, sandbox: bool, site: str | None) -> str:
    given = {"--local": local, "--sandbox": sandbox, "--backend": backend is not None}
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise click.UsageError(f"{named[0]} and {named[1]} cannot be combined")
    job = click.get_current_context().params.get("job")
    if not named and job is not None and names_notebook(str(job)):
        backend = offer("backend_of_notebook")(job)
    chosen = choose_backend(backend, local=local, sandbox=sandbox)
    if site is not None and not facts_of(chosen).has_sites:
        raise click.UsageError("--site is for --backend slurm")
    return chosen


listed_backend_option = click.option(
    "--backend",
    metavar="NAME",
    help="Only runs of local, slurm, sandbox or sagemaker.",
)


def check_one_selection(only: str | None, backend: str | None) -> None:
    """Refuse --backend beside an option that selects backends, too."""
    if only is not None and backend is not None:
        raise click.UsageError(f"--{only} and --backend cannot be combined")


def listed_backends(only: str | None, backend: str | None = None) -> tuple[str, ...] | None:
    """Return the backends that options of `list` select; None without one.

    Args:
        only: A backend of this machine for all of them, or the account's.
        backend: The one that `--backend` names.
    """
    check_one_selection(only, backend)
    if backend is not None:
        return (facts_of(backend).name,)
    if only is None:
        return None
    if not facts_of(only).is_on_this_machine:
        return (only,)
    return tuple(name for name, each in BACKENDS.items() if each.is_on_this_machine)


def is_trusting() -> bool:
    """Return whether this command line has --trust."""
    return _TRUST_KEY in click.get_current_context().meta


def parsed_by(
    parse: Callable[[str], object],
) -> Callable[[click.Context, click.Parameter, str | None], object]:
    """Return the callback of an option whose value a function parses. Its ValueError becomes the message."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from None

    return convert


def parse_step(*words: str) -> Callable[[str], int | str]:
    """Return a function that parses the step of a checkpoint, or one of some words such as `best`."""

    def parse(text: str) -> int | str:
        if text not in words and not (text.isascii() and text.isdigit()):
            *first, last = ["a step such as 500", *words]
            raise ValueError(f"expected {', '.join(first)} or {last}, got {text!r}")
        return int(text) if text.isdigit() else text

    return parse


def read_moment(option: str, text: str | None, *, is_end: bool = False) -> datetime | None:
    """Return the moment that an option such as `--since` names; see `parse_moment`.

    Raises:
        UserError: the text names no moment.
    """
    from cloudtrain.errors import UserError
    from cloudtrain.support.units import parse_moment

    if text is None:
        return None
    try:
        return parse_moment(text, datetime.now(UTC), is_end=is_end)
    except ValueError as error:
        raise UserError(f"{option}: {error}", f"for example {option} 2d") from None


def confirm(question: str, *, unasked: str, refused: str, hint: str) -> None:
    """Ask a question on the terminal.

    Args:
        question: The question.
        unasked: The message without a terminal.
        refused: The message after the answer no.
        hint: How to do it without a question.

    Raises:
        UserError: there is no terminal.
        click.exceptions.Exit: the answer is no.
    """
    from cloudtrain.errors import UserError

    if not sys.stdin.isatty():
        raise UserError(unasked, hint)
    if not click.confirm(question, default=False, err=True):
        decline(refused)


def parse_seconds(text: str) -> int:
    """Parse a duration such as `10m` or `6h`; return seconds."""
    from cloudtrain.support.units import parse_duration

    return parse_duration(text)


def _parse_regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        where = "" if error.pos is None else f" at character {error.pos + 1} of {text!r}"
        raise ValueError(f"{error.msg}{where}") from None


def _parse_since(text: str) -> datetime | timedelta:
    from cloudtrain.runs.log_lines import parse_since

    return parse_since(text)


def _log_filter(
    host: str | None,
    grep: re.Pattern[str] | None,
    since: datetime | timedelta | None,
    rank: int | None,
) -> LogFilter:
    from cloudtrain.runs.log_lines import LogFilter

    return LogFilter(
        host=host,
        grep=grep,
        since=since,
        rank=rank,
    )


log_options = option_group(
    "only",
    _log_filter,
    click.option("--host", metavar="NAME", help="Only this host's lines, such as algo-1."),
    click.option(
        "--grep",
        callback=parsed_by(_parse_regex),
        metavar="REGEX",
        help="Only lines whose raw text matches.",
    ),
    click.option(
        "--since",
        callback=parsed_by(_parse_since),
        metavar="WHEN",
        help="Only lines since 10m (ago) or 2026-11-20T10:00.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only lines of this rank.",
    ),
)
"""Adds the options that filter log lines; the command gets one `LogFilter` as `only`."""
