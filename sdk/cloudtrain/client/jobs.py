"""Verbs about a job that start nothing: validate, plan, check, files."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.bundle import Contents, ProgressCallback, list_contents
from cloudtrain.client.account import find_settings
from cloudtrain.client.backend_lookup import sagemaker_backend
from cloudtrain.client.home import find_home
from cloudtrain.client.plan_builder import plan_code, plan_with_contents
from cloudtrain.errors import SpecError
from cloudtrain.job.spec import JobSpec, load_job
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.settings.settings import Settings

if TYPE_CHECKING:
    from cloudtrain.preflight import Check

_NO_CODE = CodeInfo(digest="0" * 64, bytes=0, files=0)
"""Placeholder for the code where only the job file is checked."""


def validate(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    instances: int | None = None,
    local: bool = False,
    settings: Settings | None = None,
) -> JobSpec:
    """Read a job file and check it offline.

    Of the code folder only the files that the job names are read; `plan` reads all of it.

    Args:
        path: The job file.
        overrides: `path=value`, as the `--set` option takes them.
        instances: Replaces `cluster.instances`.
        local: Check for a run on this machine instead of SageMaker.
        settings: The account; by default from environment and files.

    Raises:
        SpecError: The job is not valid; `problems` holds every mistake with line and column.
        UserError: The file cannot be read.
    """
    reading = load_job(path, overrides, instances=instances)
    problems = list(reading.problems)
    if reading.spec is not None:
        # `spec` has legal values in place of wrong ones; a plan of it finds further mistakes.
        try:
            plan_code(reading.spec, _NO_CODE, local=local, settings=settings)
        except SpecError as error:
            reported = {(problem.path, problem.message) for problem in problems}
            problems += [
                problem
                for problem in error.problems
                if not reading.is_replaced(problem.path) and (problem.path, problem.message) not in reported
            ]
    if reading.spec is None or problems:
        raise SpecError(problems)
    return reading.spec


def plan(
    spec: JobSpec | str | Path,
    *,
    local: bool = False,
    settings: Settings | None = None,
    now: datetime | None = None,
    suffix: str | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Return the plan of a job: everything that a submit would send. Offline.

    Args:
        spec: The job, or the path of its file.
        local: Plan for this machine instead of SageMaker.
        settings: The account; by default from environment and files.
        now: Time of the plan in UTC; by default the current time.
        suffix: Six hexadecimal digits of the run id; by default random.
        progress: Callback `(bytes_read, bytes_total)` for the code.

    Raises:
        SpecError: The job cannot work.
        BundleError: The code folder cannot be packed.
    """
    spec = spec if isinstance(spec, JobSpec) else validate(spec, local=local, settings=settings)
    return plan_with_contents(spec, local=local, settings=settings, now=now, suffix=suffix, progress=progress)[0]


def check(spec: JobSpec | str | Path, *, settings: Settings | None = None) -> tuple[Check, ...]:
    """Check, in parallel, that the account has everything that a submit needs. Nothing is changed.

    Args:
        spec: The job, or the path of its file.
        settings: The account; by default from environment and files.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong.
        CloudError: There are no credentials.
    """
    spec = spec if isinstance(spec, JobSpec) else validate(spec, settings=settings)
    settings = settings or find_settings(spec)
    backend = sagemaker_backend(settings)
    backend.check_ready()
    decided, _ = plan_with_contents(spec, local=False, settings=settings, cloud=backend)
    return backend.start_checks(decided).wait()


def files(spec: JobSpec | str | Path, *, progress: ProgressCallback | None = None) -> Contents:
    """Return the files of the bundle, the excluded files with the reason, and files that look like secrets.

    Args:
        spec: The job, or the path of its file.
        progress: Callback `(bytes_read, bytes_total)` for the code.

    Raises:
        SpecError: The job is not valid.
        BundleError: The code folder cannot be packed.
    """
    spec = spec if isinstance(spec, JobSpec) else JobSpec.from_yaml(spec)
    return list_contents(spec.code_directory, home=find_home(), progress=progress)
