"""Everything that a plan is made of: the code folder, the data, the machine, the settings and the prices."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.bundle import Contents, ProgressCallback, collect
from cloudtrain.bundle.git_source import read_source
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.backend_lookup import local_backend
from cloudtrain.client.home import find_home
from cloudtrain.client.resume_checks import add_continuation
from cloudtrain.client.source_checks import (
    bundled_output_warnings,
    describe_default_exclusions,
    find_data_secrets,
    find_missing_files,
    find_source_outputs,
)
from cloudtrain.errors import SpecError, UserError
from cloudtrain.job.script_conventions import Conventions, read_conventions
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.storage_layout import ResumeSource, direct_folder_of
from cloudtrain.planning.targets import LocalTarget, SageMakerTarget
from cloudtrain.runs.previous_run import checkpoints_of
from cloudtrain.settings.settings import Settings
from cloudtrain.support.data_files import data_files
from cloudtrain.support.run_id import is_run_id
from cloudtrain_runtime.contract.task_signatures import find_module

if TYPE_CHECKING:
    from cloudtrain.backends.sagemaker import SageMakerBackend

_MOST_LEFT_OUT = 500
"""Maximum number of excluded files that a plan lists, for `explain`."""


def plan_with_contents(
    spec: JobSpec,
    *,
    local: bool,
    settings: Settings | None,
    now: datetime | None = None,
    suffix: str | None = None,
    progress: ProgressCallback | None = None,
    cloud: SageMakerBackend | None = None,
) -> tuple[Plan, Contents]:
    """Read the code folder and return the plan of a job, with the contents of its bundle.

    Args:
        spec: The job.
        local: Plan for this machine instead of SageMaker.
        settings: The account; by default from environment and files.
        now: Time of the plan in UTC; by default the current time.
        suffix: Six hexadecimal digits of the run id.
        progress: Callback `(bytes_read, bytes_total)`.
        cloud: Backend to look up the run that `checkpoint.resume` names; by default AWS is not called.

    Raises:
        SpecError: The job cannot work.
        BundleError: The code folder cannot be packed.
    """
    # A job that was built in Python was not checked before.
    if missing := [spec.problem_of(finding) for finding in spec.references.check()]:
        raise SpecError(missing)
    if not local and (found := [spec.problem_of(finding) for finding in find_data_secrets(spec)]):
        raise SpecError(found)
    contents = collect(spec.code_directory, home=find_home(), progress=progress)
    if problems := [*find_missing_files(spec, contents), *find_source_outputs(spec, contents)]:
        raise SpecError(problems)
    code = dataclasses.replace(contents.info, source=read_source(spec.code_directory), conventions=_conventions(spec))
    data_stamp = "" if local else stamp_data(spec)
    settings = settings or find_settings(spec)
    resumed = find_resume_source(spec, settings, local=local, cloud=cloud)
    decided = plan_code(
        spec, code, local=local, settings=settings, now=now, suffix=suffix, data_stamp=data_stamp, resumed=resumed
    )
    decided = add_continuation(decided)
    left_out = tuple((left.name, left.reason) for left in contents.left_out[:_MOST_LEFT_OUT])
    decisions = (*decided.decisions, *describe_default_exclusions(contents))
    warnings = (*decided.warnings, *bundled_output_warnings(spec, contents))
    return dataclasses.replace(decided, decisions=decisions, warnings=warnings, left_out=left_out), contents


def plan_code(
    spec: JobSpec,
    code: CodeInfo,
    *,
    local: bool,
    settings: Settings | None,
    now: datetime | None = None,
    suffix: str | None = None,
    data_stamp: str = "",
    resumed: ResumeSource | None = None,
) -> Plan:
    """Return the plan of a job whose code has been read already. The arguments are those of `plan_with_contents`.

    Args:
        spec: The job.
        code: Digest and size of the code.
        local: Plan for this machine instead of SageMaker.
        settings: The account; by default from environment and files.
        now: Time of the plan in UTC; by default the current time.
        suffix: Six hexadecimal digits of the run id.
        data_stamp: What `stamp_data` returns.
        resumed: Where the run that `checkpoint.resume` names has saved; by default looked up without a call to AWS.
    """
    settings = settings or find_settings(spec)
    target = LocalTarget(settings, find_home(), _this_machine()) if local else SageMakerTarget(settings, known_prices())
    return make_plan(
        spec,
        code,
        target,
        now=now or datetime.now(UTC),
        suffix=suffix,
        resumed=resumed or find_resume_source(spec, settings, local=local),
        data_stamp=data_stamp,
    )


def stamp_data(spec: JobSpec) -> str:
    """Return a digest of names, sizes and times of the local data files, which are not read."""
    stamp = hashlib.sha256()
    for name, channel in sorted(spec.data.items()):
        if not channel.is_s3:
            root = spec.base / channel.uri
            for file in data_files(root):
                with contextlib.suppress(OSError):  # the upload reports what cannot be read
                    found = file.path.stat()
                    text = f"{name} {file.name} {found.st_size} {found.st_mtime_ns}\n"
                    stamp.update(text.encode("utf-8", "surrogateescape"))
    return stamp.hexdigest()


def find_resume_source(
    spec: JobSpec, settings: Settings, *, local: bool, cloud: SageMakerBackend | None = None
) -> ResumeSource | None:
    """Return where the run that `checkpoint.resume` names has saved its checkpoints, or None when it names no run.

    Args:
        spec: The job.
        settings: The account.
        local: Whether the new run is a local one.
        cloud: Backend to read the run's plan from. Without it, the default place of a run of the account is assumed.
    """
    run = spec.checkpoint.resume.rpartition(":")[2]
    if not is_run_id(run):
        return None
    here = local_backend()
    if here.has(run):
        return checkpoints_of(here.plan_of(run), run)
    if local or settings.bucket is None:
        return None
    if cloud is not None:
        # The plan may be deleted while the checkpoints exist; the checks report missing checkpoints.
        with contextlib.suppress(UserError):
            return checkpoints_of(cloud.plan_of(run), run)
    folder = f"s3://{settings.bucket}/{settings.prefix}/{run}/checkpoints"
    return ResumeSource(folder, direct_folder_of(folder) if spec.code.script is not None else folder, run)


def _conventions(spec: JobSpec) -> Conventions:
    if spec.code.script is not None:
        return read_conventions(spec.code_directory, spec.code.script)
    module = find_module(spec.code_directory, (spec.code.task or "").partition(":")[0])
    if module is None:
        return Conventions()
    read = read_conventions(spec.code_directory, module.relative_to(spec.code_directory).as_posix())
    return Conventions(ml_paths=read.ml_paths)


def _this_machine() -> Machine:
    from cloudtrain.backends.container.machine import usable_cpus, visible_gpus
    from cloudtrain.backends.container.mount_namespace import is_available

    return Machine(
        gpus=len(visible_gpus()),
        cpus=usable_cpus(),
        variables=frozenset(os.environ),
        has_ml_namespace=is_available(),
    )
