"""`cloudtrain rehearse`."""

from __future__ import annotations

import click

from cloudtrain import console
from cloudtrain.cli.examples import Command
from cloudtrain.cli.options import (
    JobArguments,
    account_options,
    job_options,
    json_option,
    parsed_by,
)
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED
from cloudtrain.support.backend_facts import MACHINE_BACKEND, choose_backend

_INTERRUPTED = "interrupted: the processes of the rehearsal have ended, its folder is deleted, and there is no receipt"


def _check_sample(text: str) -> str:
    from cloudtrain.features.rehearsal.data_sample import parse_sample

    parse_sample(text)
    return text


@click.command(
    cls=Command,
    examples={
        "cloudtrain rehearse": "the job.yaml of this folder",
        "cloudtrain rehearse my-job --minutes 3 --keep": "shorter; keep its runs",
    },
)
@job_options
@account_options
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Longest time from the first step on.",
)
@click.option("--sandbox", is_flag=True, help="Run in the sandbox, as a training job.")
@click.option("--backend", hidden=True)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    help="Seed of the steps that are interrupted.",
)
@click.option(
    "--sample",
    default="64",
    show_default=True,
    callback=parsed_by(_check_sample),
    metavar="SIZE",
    help="Objects read of each S3 channel, or 200MB.",
)
@click.option("--cuda-on-cpu", is_flag=True, help="Without a GPU: a stand-in for CUDA and NCCL.")
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the runs, also those of a success.",
)
@click.option("--save", is_flag=True, help="Also write rehearsal.json beside the job.")
@json_option
def rehearse(
    job: JobArguments,
    flags: dict[str, str | None],
    minutes: float,
    sandbox: bool,
    backend: str | None,
    seed: int | None,
    sample: str,
    cuda_on_cpu: bool,
    keep: bool,
    save: bool,
    as_json: bool,
) -> int:
    """Run a few steps of the job on this machine, stop and kill it, resume it, and report what is proven.

    Each check is proven, failed or unknown: it cannot be shown here. The exit code is 4 when a check has failed, and
    with limits.require_rehearsal also when the verdict is unknown. Nothing is sent to an account.
    """
    from cloudtrain.client.account import find_settings
    from cloudtrain.client.client import Client
    from cloudtrain.features.rehearsal.output import (
        print_rehearsal,
        rehearsal_observer,
        shows_checks_at_once,
    )
    from cloudtrain.features.rehearsal.rehearse import RehearsalOptions, rehearse_job
    from cloudtrain.support.checks import Result

    settings = find_settings(job.job, flags)
    loaded = job.load()
    options = RehearsalOptions(
        minutes=minutes,
        seed=seed,
        keep=keep,
        beside=save,
        sample=sample,
        cuda_on_cpu=cuda_on_cpu,
    )
    try:
        with rehearsal_observer() as observer:
            found = rehearse_job(
                Client(settings, observer=observer),
                loaded,
                options,
                backend=choose_backend(backend, sandbox=sandbox, default=MACHINE_BACKEND),
            )
    except KeyboardInterrupt:
        console.print_message(_INTERRUPTED)
        if as_json:
            console.print_json_error(_INTERRUPTED, "", EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    are_shown = shows_checks_at_once()
    console.print_answer(
        found.to_json,
        lambda: print_rehearsal(found, job.words(), are_shown=are_shown),
        as_json=as_json,
    )
    is_required = loaded.spec is not None and loaded.spec.limits.require_rehearsal
    bad = (Result.FAIL, Result.UNKNOWN) if is_required else (Result.FAIL,)
    return EXIT_RUN_FAILED if found.verdict in bad else 0
