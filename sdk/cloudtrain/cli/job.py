"""Commands that take a job or start a run: validate, plan, files, submit, resume."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from cloudtrain import console
from cloudtrain.cli.options import (
    account_options,
    duration,
    job_options,
    json_option,
    log_options,
    run_argument,
    trust_option,
)
from cloudtrain.errors import EXIT_USER, SpecError

if TYPE_CHECKING:
    from cloudtrain.runs.log_lines import LogFilter


@click.command()
@job_options
@click.option("--local", is_flag=True, help="Check for a run on this machine instead of SageMaker.")
@json_option
def validate(job: str, instances: int | None, overrides: tuple[str, ...], local: bool, as_json: bool) -> int:
    """Check a job file and report every problem with line and column. Offline; needs no credentials."""
    from cloudtrain.client import jobs

    try:
        spec = jobs.validate(job, overrides, instances=instances, local=local)
    except SpecError as error:
        console.print_problems(error, as_json=as_json)
        return EXIT_USER
    console.print_valid(job, spec.name, as_json=as_json)
    return 0


@click.command()
@job_options
@account_options
@click.option("--local", is_flag=True, help="Plan for this machine instead of SageMaker.")
@click.option("--request", "only_request", is_flag=True, help="Print only the CreateTrainingJob document.")
@json_option
def plan(
    job: str,
    instances: int | None,
    overrides: tuple[str, ...],
    role: str | None,
    bucket: str | None,
    region: str | None,
    local: bool,
    only_request: bool,
    as_json: bool,
) -> int:
    """Show everything that a submit would send. Offline; needs no credentials."""
    from cloudtrain.client import jobs
    from cloudtrain.client.account import find_settings
    from cloudtrain.console.plans import print_plan, print_warnings

    settings = find_settings(job, {"role": role, "bucket": bucket, "region": region})
    spec = jobs.validate(job, overrides, instances=instances, local=local, settings=settings)
    with console.progress_bar("reading the code") as progress:
        decided = jobs.plan(spec, local=local, settings=settings, progress=progress)
    if only_request:
        console.print_json(decided.request)
    elif as_json:
        console.print_json(decided.to_json())
    else:
        print_plan(decided)
        print_warnings(decided)
    return 0


@click.command()
@job_options
@click.option("--all", "show_all", is_flag=True, help="List every file; by default, long lists are shortened.")
@json_option
def files(job: str, instances: int | None, overrides: tuple[str, ...], show_all: bool, as_json: bool) -> int:
    """List the files that are uploaded as code and those that are excluded, with sizes and reasons. Offline."""
    from cloudtrain.client import jobs
    from cloudtrain.console.plans import print_files

    spec = jobs.validate(job, overrides, instances=instances)
    with console.progress_bar("reading the code") as progress:
        contents = jobs.files(spec, progress=progress)
    if as_json:
        console.print_json(contents.to_json())
    else:
        print_files(contents, show_all=show_all)
    return EXIT_USER if contents.refused else 0


def _job_arguments(job: str, instances: int | None, overrides: tuple[str, ...]) -> str:
    """Return the command-line arguments of the same job, without `checkpoint.resume`."""
    words = [job]
    if instances is not None:
        words += ["--instances", str(instances)]
    for override in overrides:
        if not override.startswith("checkpoint.resume="):
            words += ["--set", override]
    return shlex.join(words)


@click.command()
@job_options
@account_options
@click.option("--local", is_flag=True, help="Run on this machine: no account, no Docker.")
@click.option(
    "--sandbox", is_flag=True, help="Submit to the local AWS; it is started when it does not run (see sandbox)."
)
@click.option("--skip-check", is_flag=True, help="Submit without checking the account first (see check).")
@click.option("--new", is_flag=True, help="Start another run even if one of the same request and code is live.")
@click.option(
    "--wait-for-capacity",
    callback=duration,
    metavar="DURATION",
    help="Retry for this time, such as 6h, while there is no capacity or the quota is used up.",
)
@click.option("--follow/--detach", default=False, help="Show the run until it ends, or return at once (default).")
@log_options
@json_option
def submit(
    job: str,
    instances: int | None,
    overrides: tuple[str, ...],
    role: str | None,
    bucket: str | None,
    region: str | None,
    local: bool,
    sandbox: bool,
    skip_check: bool,
    new: bool,
    wait_for_capacity: int | None,
    follow: bool,
    only: LogFilter,
    as_json: bool,
) -> int:
    """Start a run and print its id. The run continues when this command ends, with or without --follow.

    The same request and code is started once: while that run is live, another submit attaches to it.
    """
    if local and sandbox:
        raise click.UsageError("--local and --sandbox cannot be combined")
    from cloudtrain.client import jobs, submission
    from cloudtrain.client.account import find_settings
    from cloudtrain.client.callbacks import Callbacks
    from cloudtrain.console import runs
    from cloudtrain.console.account import print_check_messages
    from cloudtrain.console.plans import warnings_at_end

    settings = find_settings(job, {"role": role, "bucket": bucket, "region": region})
    spec = jobs.validate(job, overrides, instances=instances, local=local, settings=settings)
    with (
        warnings_at_end() as on_plan,
        console.progress_bar("packing the code") as progress,
        console.progress_bar("uploading") as upload_progress,
    ):
        run = submission.submit(
            spec,
            local=local,
            sandbox=sandbox,
            settings=settings,
            skip_check=skip_check,
            new=new,
            wait_for_capacity=wait_for_capacity,
            callbacks=Callbacks(
                on_plan=on_plan,
                on_checks=print_check_messages,
                on_wait=runs.print_retry,
                on_sent=runs.print_waiting_for_instances,
                progress=progress,
                upload_progress=upload_progress,
            ),
        )
    runs.print_submitted(run, as_json=as_json)
    if follow:
        from cloudtrain.console.follow import follow as show

        return show(run, job=_job_arguments(job, instances, overrides), only=only, as_json=as_json)
    if as_json:
        console.print_json(runs.status_json(run, run.status()))
    return 0


@click.command()
@run_argument
@click.option(
    "--instances", type=click.IntRange(min=1), metavar="N", help="Number of instances; by default that of the run."
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change one field of the run's job.")
@click.option(
    "--from",
    "from_step",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Resume from the checkpoint of this step; by default the newest complete one (see checkpoints).",
)
@trust_option
@click.option("--skip-check", is_flag=True, help="Resume without checking the account first (see check).")
@click.option("--new", is_flag=True, help="Start another run even if one of the same request and code is live.")
@click.option("--follow/--detach", default=False, help="Show the run until it ends, or return at once (default).")
@log_options
@json_option
def resume(
    run: str,
    instances: int | None,
    overrides: tuple[str, ...],
    from_step: int | None,
    skip_check: bool,
    new: bool,
    follow: bool,
    only: LogFilter,
    as_json: bool,
) -> int:
    """Start a new run from the last complete checkpoint of one that has ended, and print its id.

    The new run has the same job, code and data. Neither job file nor code is needed on this machine.
    """
    from cloudtrain.client import submission
    from cloudtrain.client.callbacks import Callbacks
    from cloudtrain.console import runs
    from cloudtrain.console.account import print_check_messages
    from cloudtrain.console.plans import warnings_at_end

    with warnings_at_end() as on_plan:
        started = submission.resume(
            run,
            overrides,
            instances=instances,
            from_step=from_step,
            skip_check=skip_check,
            new=new,
            callbacks=Callbacks(on_plan=on_plan, on_checks=print_check_messages),
        )
    runs.print_submitted(started, as_json=as_json)
    if follow:
        from cloudtrain.console.follow import follow as show

        return show(started, only=only, as_json=as_json)
    if as_json:
        console.print_json(runs.status_json(started, started.status()))
    return 0
