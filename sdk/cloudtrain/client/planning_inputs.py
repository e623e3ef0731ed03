"""Everything that a plan is made of: the job file, the code folder, the data and an earlier run's checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cloudtrain.bundle import Contents, ProgressCallback, collect
from cloudtrain.bundle.git_source import read_source
from cloudtrain.client.source_checks import (
    bundled_output_warnings,
    describe_default_exclusions,
    find_data_secrets,
    find_missing_files,
    find_source_outputs,
)
from cloudtrain.errors import Problem, SpecError
from cloudtrain.job.references import check_references
from cloudtrain.job.script_conventions import ScriptConventions, read_conventions
from cloudtrain.job.spec import JobSpec, LoadedJob, load_job
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.storage_layout import ResumeSource
from cloudtrain.planning.targets import Target
from cloudtrain.runs.continuation import add_continuation
from cloudtrain.support.data_files import data_files
from cloudtrain_runtime.contract.task_signatures import find_module

Job = JobSpec | LoadedJob | str | Path
"""A job, or the path of its file."""

_NO_CODE = CodeInfo(digest="0" * 64, bytes=0, files=0)
"""Placeholder for the code where only the job file is checked."""
_MOST_LEFT_OUT = 500
"""Maximum number of excluded files that a plan lists, for `explain`."""


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made with besides the job.

    Attributes:
        target: What the plan is for.
        home: Folder of local runs, which is never part of the code.
        find_resumed: Returns where the run that the job resumes has saved, or None when the job names no run.
        now: Time of the plan in UTC; by default the current time.
        suffix: Six hexadecimal digits of the run id; by default the target's choice.
        on_read: Callback `(bytes_read, bytes_total)` for the code.
    """

    target: Target
    home: Path
    find_resumed: Callable[[JobSpec], ResumeSource | None]
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    suffix: str | None = None
    on_read: ProgressCallback | None = None

    def make_plan(self, spec: JobSpec, code: CodeInfo, found: tuple[Problem, ...] = ()) -> Plan:
        """Return the plan of a job whose code has been read.

        Args:
            spec: The job.
            code: Digest and size of its code.
            found: Problems of the job that were found before.

        Raises:
            SpecError: The job cannot work, or there are problems already.
        """
        data_stamp = stamp_data(spec) if self.target.uploads_data and code is not _NO_CODE else ""
        resumed = self.find_resumed(spec)
        return make_plan(
            spec,
            code,
            self.target,
            now=self.now,
            suffix=self.suffix,
            resumed=resumed,
            data_stamp=data_stamp,
            found=found,
        )


def read_job(job: Job) -> LoadedJob:
    """Return a job with all problems of its file.

    Raises:
        UserError: The file cannot be read.
        SpecError: The file is not YAML.
    """
    if isinstance(job, LoadedJob):
        return job
    if isinstance(job, JobSpec):
        # A job that was built in Python was not checked before.
        return LoadedJob(job, tuple(map(job.problem_of, check_references(job))), frozenset())
    return load_job(job)


def check_job(job: LoadedJob, inputs: PlanInputs) -> JobSpec:
    """Return a job that can work, as far as can be seen without its code.

    Raises:
        SpecError: The job cannot work. The error lists every problem.
    """
    problems = list(job.problems)
    if job.spec is not None:
        # The spec has legal values in place of wrong ones; a plan of it finds further mistakes.
        try:
            inputs.make_plan(job.spec, _NO_CODE)
        except SpecError as error:
            reported = {(problem.path, problem.message) for problem in problems}
            problems += [
                problem
                for problem in error.problems
                if not job.is_replaced(problem.path) and (problem.path, problem.message) not in reported
            ]
    if job.spec is None or problems:
        raise SpecError(problems)
    return job.spec


def plan_job(job: LoadedJob, inputs: PlanInputs) -> tuple[Plan, Contents]:
    """Read the code folder and return the plan of a job, with the contents of its bundle.

    Raises:
        SpecError: The job cannot work. The error lists every problem.
        BundleError: The code folder cannot be packed.
    """
    spec = job.spec
    if spec is None or job.problems:
        spec = check_job(job, inputs)  # it raises
    contents = collect(spec.code_directory, home=inputs.home, progress=inputs.on_read)
    found = [*find_missing_files(spec, contents), *find_source_outputs(spec, contents)]
    if inputs.target.uploads_data:
        found += map(spec.problem_of, find_data_secrets(spec))
    code = dataclasses.replace(contents.info, source=read_source(spec.code_directory), conventions=_conventions(spec))
    plan = add_continuation(inputs.make_plan(spec, code, tuple(found)))
    left_out = tuple((left.name, left.reason) for left in contents.left_out[:_MOST_LEFT_OUT])
    decisions = (*plan.decisions, *describe_default_exclusions(contents))
    warnings = (*plan.warnings, *bundled_output_warnings(spec, contents))
    return dataclasses.replace(plan, decisions=decisions, warnings=warnings, left_out=left_out), contents


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


def _conventions(spec: JobSpec) -> ScriptConventions:
    if spec.code.script is not None:
        return read_conventions(spec.code_directory, spec.code.script)
    module = find_module(spec.code_directory, (spec.code.task or "").partition(":")[0])
    if module is None:
        return ScriptConventions()
    read = read_conventions(spec.code_directory, module.relative_to(spec.code_directory).as_posix())
    return ScriptConventions(ml_paths=read.ml_paths)
