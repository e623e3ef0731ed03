"""Commands that check the account: check."""

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
    """Check that the account can run the job, in a few seconds. Change nothing.

    Each check passes, fails or gives no result; a failed one comes with its fix. The exit code is 3 when a check has
    failed or AWS cannot be reached.
    """
    from cloudtrain.client import jobs
    from cloudtrain.client.account import find_settings
    from cloudtrain.console.account import print_checks

    settings = find_settings(job, {"role": role, "bucket": bucket, "region": region})
    spec = jobs.validate(job, overrides, instances=instances, settings=settings)
    with console.spinner("checking the account"):
        checks = jobs.check(spec, settings=settings)
    if as_json:
        console.print_json({"checks": [each.to_json() for each in checks]})
    else:
        print_checks(checks)
    # Every caller may ask for its own identity; without an answer, AWS cannot be reached.
    is_unreachable = any(each.name == "identity" and each.result == "unknown" for each in checks)
    return EXIT_CLOUD if is_unreachable or any(each.result == "fail" for each in checks) else 0
