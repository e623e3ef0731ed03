"""Checks of the code and data folders against the job: missing files, secrets, and outputs that are sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from cloudtrain.bundle import Contents
from cloudtrain.errors import Problem
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.secrets.scanner import scan_folder
from cloudtrain_runtime.contract.task_signatures import find_module

_NAMES_IN_LINE = 3


def find_data_secrets(spec: JobSpec) -> Iterator[Diagnostic]:
    """Yield a problem for each data folder that would be uploaded with files whose names look like secrets."""
    for name, channel in spec.data.items():
        found = [] if channel.is_s3 else scan_folder(spec.base / channel.uri)
        if found:
            message = f"the data holds what looks like a secret: {', '.join(map(str, found))}"
            yield Diagnostic(message, ("data", name, "uri"), "move it elsewhere, or name the folder of the data alone")


def find_missing_files(spec: JobSpec, contents: Contents) -> Iterator[Problem]:
    """Yield a problem for each file that the job names and the bundle lacks, such as an ignored script."""
    code = spec.code
    module = find_module(spec.code_directory, code.task.partition(":")[0]) if code.task is not None else None
    wanted = {
        "task": module.relative_to(spec.code_directory).as_posix() if module is not None else None,
        "script": code.script,
        "requirements": code.requirements,
    }
    for field, written in wanted.items():
        name = PurePosixPath(written or "").as_posix()
        reason = contents.exclusion_reason(name) if written is not None else None
        if reason is not None:
            message = f"{name} would not be in the container: {reason}"
            yield spec.problem(f"code.{field}", message, f"write !{name} to .cloudtrainignore")


def find_source_outputs(spec: JobSpec, contents: Contents) -> Iterator[Problem]:
    """Yield a problem for each output that is source of the job: a resumed run would restore the old version."""
    for index, output in enumerate(spec.code.outputs):
        named = (spec.code.script, spec.code.requirements)
        source = next((name for name in _files_of(output, contents) if name.endswith(".py") or name in named), None)
        if source is not None:
            message = f"{source} is source of the job, and a run that resumes would start with its old content"
            yield spec.problem_of(Diagnostic(message, ("code", "outputs", index), "let the script write elsewhere"))


def bundled_output_warnings(spec: JobSpec, contents: Contents) -> list[str]:
    """Return a warning for each output that is in the bundle, too: a resumed run finds the saved one instead."""
    first = ((output, next(_files_of(output, contents), None)) for output in spec.code.outputs)
    return [
        f"code.outputs: {name} travels with the code, too; a run that resumes finds the kept {output} instead"
        for output, name in first
        if name is not None
    ]


def describe_default_exclusions(contents: Contents) -> list[str]:
    """Return a line about files that only cloudtrain's default rules exclude, or no line."""
    names = [left.name for left in contents.left_out if left.is_by_default]
    if not names:
        return []
    more = f" and {len(names) - _NAMES_IN_LINE} more" if len(names) > _NAMES_IN_LINE else ""
    return [f"left behind: {', '.join(names[:_NAMES_IN_LINE])}{more} (results and data; see: cloudtrain files)"]


def _files_of(output: str, contents: Contents) -> Iterator[str]:
    """Yield the files of the bundle that an entry of `code.outputs` names."""
    for entry in contents.entries:
        if entry.name == output or (output.endswith("/") and entry.name.startswith(output)):
            yield entry.name
