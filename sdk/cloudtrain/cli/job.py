"""Commands that take a job or start a run: validate, plan, files, check, rehearse, submit, resume; and schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cloudtrain import console
from cloudtrain.cli.completion import complete_runs
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import (
    JobArguments,
    account_options,
    backend_options,
    cuda_on_cpu_option,
    job_options,
    json_option,
    log_options,
    new_option,
    parse_seconds,
    parsed_by,
    run_argument,
    set_option,
    skip_check_option,
    trust_option,
)
from cloudtrain.errors import EXIT_CLOUD, EXIT_USER, SpecError, UserError
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.features import offer
from cloudtrain.support.job_file import names_notebook

if TYPE_CHECKING:
    from cloudtrain.runs.log_lines import LogFilter
    from cloudtrain.runs.run import Run


_follow_option = click.option(
    "--follow/--detach",
    default=False,
    help="Show the run until it ends, or return at once.",
)


@click.command(
    cls=Command,
    examples={
        "cloudtrain validate": "the job.yaml of this folder",
        "cloudtrain validate my-job --set train.epochs=5": "with another value",
    },
)
@job_options
@backend_options(
    "Check for a run on this machine instead of SageMaker.", "Check for a run in the sandbox."
)
@json_option
def validate(job: JobArguments, backend: str, as_json: bool) -> int:
    """Check a job file and report every problem with line and column. Offline; needs no credentials."""
    from cloudtrain.client.offline import OfflineClient

    try:
        spec = OfflineClient().validate(job.load(), backend=backend)
    except SpecError as error:
        console.print_problems(error, as_json=as_json)
        return EXIT_USER
    valid = f"{job.job}: {spec.name} is valid"
    console.print_answer(
        lambda: {"ok": True, "problems": []}, lambda: console.print_text(valid), as_json=as_json
    )
    return 0


@click.command(
    cls=Command,
    examples={
        "cloudtrain plan": "this folder's job.yaml",
        "cloudtrain plan --instances 8 --set cluster.spot=true": "with other values",
        "cloudtrain plan notebook.ipynb --write my-job": "a notebook as a job",
    },
)
@job_options
@account_options
@backend_options("Plan for this machine instead of SageMaker.", "Plan for the sandbox.")
@cuda_on_cpu_option
@click.option(
    "--request", "only_request", is_flag=True, help="Print only the CreateTrainingJob document."
)
@click.option(
    "--write",
    metavar="FOLDER",
    help="Write the job of a notebook into a folder: job.yaml and its code.",
)
@json_option
def plan(
    job: JobArguments,
    flags: dict[str, str | None],
    backend: str,
    cuda_on_cpu: bool,
    only_request: bool,
    write: str | None,
    as_json: bool,
) -> None:
    """Show everything that a submit would send. Offline; needs no credentials.

    JOB may be a notebook whose cells submit a function or a Task class; its cells are read and not executed.
    """
    from cloudtrain.client.account import find_settings
    from cloudtrain.client.offline import OfflineClient
    from cloudtrain.console.plans import ConsoleObserver, print_plan, print_warnings

    if write is not None:
        written = _write_notebook(job, write)
        console.print_answer(
            lambda: {"written": written},
            lambda: console.print_text(f"written: {written}"),
            as_json=as_json,
        )
        return
    settings = find_settings(job.job, flags)
    with ConsoleObserver() as observer:
        decided = OfflineClient(settings, observer=observer).plan(
            job.load(), backend=backend, cuda_on_cpu=cuda_on_cpu
        )
    if only_request:
        console.print_json(decided.request)
    elif as_json:
        console.print_json(decided.to_json())
    else:
        print_plan(decided, is_simulated=facts_of(backend).is_simulated)
        print_warnings(decided)


def _write_notebook(job: JobArguments, folder: str) -> str:
    """Write the job of a notebook into a folder; return the job file's path."""
    if not names_notebook(job.job):
        raise UserError(f"--write: {job.job} is no notebook", "its job file is there already")
    return str(offer("write_job")(job.load().valid_spec(), folder))


@click.command(
    cls=Command,
    examples={
        "cloudtrain files": "what would be uploaded, and its size",
        "cloudtrain files my-job --all": "every file of long lists",
    },
)
@job_options
@click.option(
    "--all", "show_all", is_flag=True, help="List every file; by default, long lists are shortened."
)
@json_option
def files(job: JobArguments, show_all: bool, as_json: bool) -> int:
    """List the files that are uploaded as code and those that are excluded, with sizes and reasons. Offline."""
    from cloudtrain.client.offline import OfflineClient
    from cloudtrain.console.plans import ConsoleObserver, print_files

    with ConsoleObserver() as observer:
        contents = OfflineClient(observer=observer).files(job.load())
    console.print_answer(
        contents.to_json, lambda: print_files(contents, show_all=show_all), as_json=as_json
    )
    return EXIT_USER if contents.refused else 0


@click.command(
    cls=Command,
    examples={
        "cloudtrain check": "permissions, quotas, image and data",
        "cloudtrain check my-job --profile team": "in the account of a profile",
    },
)
@job_options
@account_options
@backend_options("Check for a run on this machine.", "Check for a run in the sandbox.")
@json_option
def check(job: JobArguments, flags: dict[str, str | None], backend: str, as_json: bool) -> int:
    """Check that the account or cluster can run the job, in a few seconds. Change nothing.

    Each check passes, fails or gives no result; a failed one comes with its fix. The exit code is 3 when a check has
    failed or AWS cannot be reached.
    """
    from cloudtrain.client.account import find_settings
    from cloudtrain.client.client import Client
    from cloudtrain.console.checks import print_account_checks

    client = Client(find_settings(job.job, flags))
    what = "account" if facts_of(backend).uses_account else "machine"
    if facts_of(backend).has_sites:
        what = "cluster"
    with console.spinner(f"checking the {what}"):
        checks = client.check(job.load(), backend=backend)
    found = {"checks": [each.to_json() for each in checks]}
    console.print_answer(lambda: found, lambda: print_account_checks(checks), as_json=as_json)
    # Every caller may ask for its own identity; without an answer, AWS cannot be reached.
    is_unreachable = any(each.name == "identity" and each.result == "unknown" for each in checks)
    has_failed = any(each.result == "fail" for each in checks)
    return EXIT_CLOUD if is_unreachable or has_failed else 0


@click.command(
    cls=Command,
    examples={
        "cloudtrain submit --local --follow": "train on this machine",
        "cloudtrain submit my-job --instances 4": "train on SageMaker",
        "cloudtrain submit --continue 71810a": "begin with a run's checkpoint",
    },
)
@job_options
@account_options
@backend_options(
    "Run on this machine: no account, no Docker.",
    "Run in the local AWS of this machine.",
)
@skip_check_option
@new_option
@click.option(
    "--wait-for-capacity",
    callback=parsed_by(parse_seconds),
    metavar="TIME",
    help="Retry for this time (6h) until there is capacity.",
)
@click.option(
    "--recover",
    is_flag=True,
    default=None,
    help="Continue it by itself after outside causes.",
)
@click.option(
    "--install",
    is_flag=True,
    help="With --local or on Slurm: install code.requirements first.",
)
@cuda_on_cpu_option
@click.option(
    "--continue",
    "continued",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Begin with the newest checkpoint of this run.",
)
@_follow_option
@json_option
@log_options
def submit(
    job: JobArguments,
    flags: dict[str, str | None],
    backend: str,
    continued: str | None,
    skip_check: bool,
    new: bool,
    wait_for_capacity: int | None,
    recover: bool | None,
    install: bool,
    cuda_on_cpu: bool,
    follow: bool,
    as_json: bool,
    only: LogFilter,
) -> int:
    """Start a run and print its id. The run continues when this command ends, with or without --follow.

    The same request and code is started once: while that run is live, another submit attaches to it.
    """
    from cloudtrain.client.account import find_settings
    from cloudtrain.client.client import Client
    from cloudtrain.console.plans import ConsoleObserver

    settings = find_settings(job.job, flags)
    with ConsoleObserver("packing the code") as observer:
        client = Client(settings, observer=observer)
        if continued is not None:
            job = job.with_value("checkpoint.resume", client.get_run(continued).id)
        run = client.submit(
            job.load(),
            backend=backend,
            skip_check=skip_check,
            new=new,
            wait_for_capacity=wait_for_capacity,
            recover=recover,
            install=install,
            cuda_on_cpu=cuda_on_cpu,
        )
    return _show_started(run, only if follow else None, job=job.words(), as_json=as_json)


@click.command(
    cls=Command,
    examples={
        "cloudtrain resume 71810a --follow": "from its newest checkpoint",
        "cloudtrain resume 71810a --from 500 --instances 4": "from step 500",
    },
)
@run_argument
@click.option(
    "--instances",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of instances; as the run's by default.",
)
@set_option("Change one field of the run's job.")
@click.option(
    "--from",
    "from_step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Resume from this checkpoint; by default the newest.",
)
@trust_option
@skip_check_option
@new_option
@_follow_option
@json_option
@log_options
def resume(
    run: str,
    instances: int | None,
    overrides: tuple[str, ...],
    from_step: int | None,
    skip_check: bool,
    new: bool,
    follow: bool,
    as_json: bool,
    only: LogFilter,
) -> int:
    """Start a new run from the last complete checkpoint of one that has ended, and print its id.

    The new run has the same job, code and data. Neither job file nor code is needed on this machine.
    """
    from cloudtrain.client.client import Client
    from cloudtrain.console.plans import ConsoleObserver
    from cloudtrain.console.runs import print_old_code_warning

    with ConsoleObserver() as observer:
        client = Client(observer=observer)
        print_old_code_warning(client.get_run(run))
        started = client.resume(
            run, overrides, instances=instances, from_step=from_step, skip_check=skip_check, new=new
        )
    return _show_started(started, only if follow else None, job=None, as_json=as_json)


def _show_started(run: Run, followed: LogFilter | None, *, job: str | None, as_json: bool) -> int:
    """Print a run that was started, and follow it if a filter of its log lines is given. Return the exit code."""
    from cloudtrain.console import runs

    runs.print_submitted(run, as_json=as_json, is_followed=followed is not None)
    if followed is not None:
        from cloudtrain.console.follow import follow

        return follow(run, job=job, only=followed, as_json=as_json)
    if as_json:
        console.print_json(runs.status_json(run, run.status()))
    return 0


@click.command(
    cls=Command,
    examples={
        "cloudtrain schema > job.schema.json": "for an editor",
        "cloudtrain schema --reference": "every field, explained",
    },
)
@click.option(
    "--reference", is_flag=True, help="Print the reference page (Markdown) of job.yaml instead."
)
@click.option("--sweep", is_flag=True, help="Print the schema of sweep.yaml instead.")
def schema(reference: bool, sweep: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of job.yaml, for completion and validation in an editor."""
    from cloudtrain.job.schema import job_schema, reference_page

    if reference and sweep:
        raise click.UsageError("--reference and --sweep cannot be combined")
    if reference:
        console.print_text(reference_page())
    elif sweep:
        console.print_json(offer("sweep_schema")())
    else:
        console.print_json(job_schema())
