"""Commands that ask the account: check."""

from __future__ import annotations

import click

from cloudtrain import console
from cloudtrain.cli.options import account_options, job_options, json_option
from cloudtrain.errors import EXIT_CLOUD


@click.command()
@job_options
@account_options
@json_option
def check(
    job: str,
    instances: int | None,
    overrides: tuple[str, ...],
    role: str | None,
    bucket: str | None,
    region: str | None,
    as_json: bool,
) -> int:
    """Ask the account whether the job can run there, in a few seconds. Changes nothing.

    Each check passes, fails, or could not be made; a failed one comes with its fix. Exit code 3 when one has failed, or
    AWS does not answer at all.
    """
    from cloudtrain.client import jobs
    from cloudtrain.client.account import find_settings
    from cloudtrain.console.account import print_checks

    settings = find_settings(job, {"role": role, "bucket": bucket, "region": region})
    spec = jobs.validate(job, overrides, instances=instances, settings=settings)
    with console.spinner("asking the account"):
        checks = jobs.check(spec, settings=settings)
    if as_json:
        console.print_json({"checks": [each.to_json() for each in checks]})
    else:
        print_checks(checks)
    # Who asks is the one question that everybody may ask: without an answer AWS cannot be reached.
    is_unreachable = any(each.name == "identity" and each.result == "unknown" for each in checks)
    return EXIT_CLOUD if is_unreachable or any(each.result == "fail" for each in checks) else 0
