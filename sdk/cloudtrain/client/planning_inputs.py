"""Everything that a plan is made of: the job file, the code folder, the data and an earlier run's checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from cloudtrain.bundle import Contents, ProgressCallback, collect
from cloudtrain.bundle.git_source import read_source
from cloudtrain.bundle.rejections import ignore_file_of
from cloudtrain.errors import BundleError, Problem, SpecError, UserError
from cloudtrain.job.diagnostics import Diagnostic, Severity
from cloudtrain.job.references import check_program, check_references
from cloudtrain.job.requirements import Requirements, read_requirements
from cloudtrain.job.spec import JobSpec, LoadedJob, load_job
from cloudtrain.job.static_analysis.conventions import (
    ScriptConventions,
    read_conventions,
)
from cloudtrain.job.static_analysis.module_search import entry_file
from cloudtrain.planning.diagnostics import texts_of, warning
from cloudtrain.planning.package_checks import warn_about_mlflow, warn_about_torch
from cloudtrain.planning.plan import CodeInfo, GitSource, Plan
from cloudtrain.planning.planner import make_plan, missing_type
from cloudtrain.planning.storage_layout import ResumeSource, local_uri
from cloudtrain.planning.targets import Target
from cloudtrain.runs.continuation import add_continuation
from cloudtrain.secrets.scanner import scan_folder
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.container_paths import below_code
from cloudtrain.support.data_files import data_files
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.file_pointers import find_pointers
from cloudtrain.support.run_id import is_run_id
from cloudtrain_runtime.contract import INCLUDE_FOLDER
from cloudtrain_runtime.contract.file_uri import path_of

Job = JobSpec | LoadedJob | str | Path
"""A job, or the path of its file."""

Planner = Callable[[JobSpec], Plan]
"""Plans a variant of a job, whose code was read before. It raises a SpecError for a job that cannot work."""

_NO_CODE = CodeInfo(digest="0" * 64, bytes=0, files=0)
"""Placeholder for the code where only the job file is checked."""
_NAMES_IN_LINE = 3
_MOST_LEFT_OUT = 500
"""Maximum number of excluded files that a plan lists, for `explain`."""


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made with besides the job.

    Attributes:
        target: What the plan is for.
        home: Folder of local runs, which is never part of the code.
        find_saved: Returns where a run that the job names saves its checkpoints, or None when it is unknown.
        resumed: Where the run that the job resumes has saved; by default that of `checkpoint.resume`.
        now: Time of the plan in UTC; by default the current time.
        suffix: Six hexadecimal digits of the run id; by default the target's choice.
        on_read: Callback `(bytes_read, bytes_total)` for the code.
        contents: Code that was read before; by default that of the job's folders is read.
        is_start: Whether the planned run is started, on this machine if the target is.
    """

    target: Target
    home: Path
    find_saved: Callable[[JobSpec, str], ResumeSource | None]
    resumed: ResumeSource | None = None
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    suffix: str | None = None
    on_read: ProgressCallback | None = None
    contents: Contents | None = None
    is_start: bool = False

    def make_plan(self, spec: JobSpec, code: CodeInfo, found: tuple[Problem, ...] = ()) -> Plan:
        """Return the plan of a job whose code has been read, and whose problems `found` were found before.

        Raises:
            SpecError: The job cannot work, or there are problems already.
        """
        spec = self._locate_initial_weights(spec)
        is_uploaded = self.target.uploads_data and code is not _NO_CODE
        return make_plan(
            spec,
            code,
            self.target,
            now=self.now,
            suffix=self.suffix,
            resumed=self.resumed or self.find_saved(spec, spec.checkpoint.resume),
            data_stamp=stamp_data(spec) if is_uploaded else "",
            found=found,
        )

    def _locate_initial_weights(self, spec: JobSpec) -> JobSpec:
        """Return a job whose `train.init_from` is a uri; one that names an unknown run stays as it is.

        Raises:
            SpecError: Other runs may save to the folder of the run that it names, too.
        """
        train = spec.train
        if train is None or train.init_from is None:
            return spec
        uri = train.init_from
        if not is_run_id(run := uri.rpartition(":")[2]):
            uri = local_uri(spec, uri)
        else:
            found = self.find_saved(spec, uri)
            if found is None:
                return spec
            uri = found.checkpoints
            if run not in uri:
                hint = f"name one of its checkpoints, {uri}/step-...; see: cloudtrain checkpoints {run}"
                message = f"{run} saves to a folder that other runs may share"
                raise SpecError([spec.problem("train.init_from", message, hint)])
        return spec.model_copy(update={"train": train.model_copy(update={"init_from": uri})})


def read_job(job: Job, contents: Contents | None = None) -> LoadedJob:
    """Return a job with all problems of its file.

    Args:
        job: The job.
        contents: Its code, if it was read before; the files that a `JobSpec` names are looked for there.

    Raises:
        UserError: The file cannot be read.
        SpecError: The file is not YAML.
    """
    if isinstance(job, LoadedJob):
        return job
    if isinstance(job, JobSpec):
        # A job that was built in Python was not checked before.
        located = job if contents is None else _locate_code(job, contents)
        found = check_references(located)
        if located is not job:
            # In a copy, the included folders are inside of the code folder.
            found = (each for each in found if each.path[:2] != ("code", "include"))
        return LoadedJob(job, tuple(map(job.problem_of, found)), frozenset())
    if not isinstance(job, str | Path):
        raise _not_a_job(job)
    return load_job(job)


def _not_a_job(given: object) -> UserError:
    """Return the error for what was given in place of a job."""
    hint = "a plan cannot be submitted; submit its job, for example cloudtrain.submit('job.yaml')"
    if isinstance(given, Mapping):
        hint = "make a job of it: cloudtrain.JobSpec(**job)"
    message = f"expected a JobSpec or the path of a job file, got {type(given).__name__}"
    return UserError(message, hint)


def check_job(job: LoadedJob, inputs: PlanInputs) -> JobSpec:
    """Return a job that can work, as far as can be seen without its code.

    Raises:
        SpecError: The job cannot work. The error lists every problem.
    """
    problems = list(job.problems)
    if job.spec is not None:
        problems += _missing_type_problems(job.spec, inputs.target)
        problems += _requirement_problems(job.spec, inputs.target)
        # The spec has legal values in place of wrong ones; a plan of it finds further mistakes.
        try:
            inputs.make_plan(job.spec, _NO_CODE)
        except SpecError as error:
            reported = {(problem.path, problem.message) for problem in problems}
            problems += [
                problem
                for problem in error.problems
                if not job.is_replaced(problem.path)
                and (problem.path, problem.message) not in reported
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
    if (
        spec is None
        or job.problems
        or _missing_type_problems(spec, inputs.target)
        or _requirement_problems(spec, inputs.target)
    ):
        # This raises the problems.
        spec = check_job(job, inputs)
    if inputs.contents is not None:
        return plan_with_code(spec, inputs.contents, inputs), inputs.contents
    try:
        contents = collect(
            spec.code_directory, spec.includes, home=inputs.home, progress=inputs.on_read
        )
    except BundleError as error:
        # Without the code there is no plan. What is wrong with the requirements is known all the same.
        for text in _torch_warnings(spec, inputs):
            error.add_note(f"warning: {text}")
        raise
    return plan_with_code(spec, contents, inputs, read_source(spec.code_directory)), contents


def plan_with_code(
    spec: JobSpec,
    contents: Contents,
    inputs: PlanInputs,
    source: GitSource | None = None,
    conventions: ScriptConventions | None = None,
    requirements: Requirements | None = None,
) -> Plan:
    """Return the plan of a job whose code folder has been read.

    Args:
        spec: The job.
        contents: The files of its code folder.
        inputs: What the plan is made with.
        source: The commit that the code comes from.
        conventions: How the job's script expects to be started; by default read from its source.
        requirements: What the job's requirements contain; by default read from the file.

    Raises:
        SpecError: The job cannot work. The error lists every problem.
    """
    files = _locate_code(spec, contents)
    requirements = requirements or _requirements(files)
    found = [
        *_find_missing_files(files, contents, requirements),
        *_find_source_outputs(spec, contents),
    ]
    pointers = list(_find_pointers_in_data(spec))
    found += [spec.problem_of(each) for each in pointers if each.severity is Severity.ERROR]
    if inputs.target.uses_this_environment:
        found += map(spec.problem_of, check_program(files))
        if inputs.is_start and not (inputs.target.installs and spec.code.requirements):
            from cloudtrain.job.missing_packages import check_packages

            found += check_packages(files)
    if inputs.target.uploads_data:
        found += map(spec.problem_of, _find_data_secrets(spec))
    code = dataclasses.replace(
        contents.info,
        source=source or contents.info.source,
        conventions=conventions or _conventions(files),
        rehearsed=contents.digest_without(spec.file),
        requirements=requirements,
    )
    plan = add_continuation(inputs.make_plan(spec, code, tuple(found)))
    left_out = tuple((left.name, left.reason) for left in contents.left_out[:_MOST_LEFT_OUT])
    decisions = (*plan.decisions, *_describe_default_exclusions(contents), *_describe_module(files))
    warnings = (
        *plan.warnings,
        *_bundled_output_warnings(spec, contents),
        *_excluded_file_warnings(files, contents, code.conventions),
        *_mlflow_warnings(plan, spec, inputs.target, requirements),
        *_pointer_warnings(contents),
        *texts_of(Severity.WARNING, pointers),
    )
    return dataclasses.replace(
        plan,
        decisions=decisions,
        warnings=warnings,
        left_out=left_out,
        modules=contents.modules,
    )


def _locate_code(spec: JobSpec, contents: Contents) -> JobSpec:
    """Return a job whose code is where its contents are: in its own folders, or in a copy of them."""
    folder = contents.folder
    if folder is None:
        return spec
    include = tuple(str(folder / INCLUDE_FOLDER / name) for name in spec.includes)
    moved = {"directory": str(folder), "include": include}
    return spec.model_copy(update={"code": spec.code.model_copy(update=moved)})


def make_planner(job: LoadedJob, inputs: PlanInputs) -> Planner:
    """Read the code of a job once, and return what plans variants of the job with it.

    Raises:
        SpecError: The job cannot work. The error lists every problem.
        BundleError: The code folder cannot be packed.
    """
    _, contents = plan_job(job, inputs)
    known: dict[object, tuple[ScriptConventions, Requirements]] = {}

    def plan_variant(spec: JobSpec) -> Plan:
        code = spec.code
        entry = (
            *(code.directory, code.task, code.script, code.module, code.command, code.include),
            # What else decides how the source and the requirements are read.
            *(code.variables.get("PYTHONPATH"), code.requirements, spec.cluster.image),
        )
        if entry not in known:
            files = _locate_code(spec, contents)
            known[entry] = _conventions(files), _requirements(files)
        conventions, requirements = known[entry]
        return plan_with_code(
            spec, contents, inputs, conventions=conventions, requirements=requirements
        )

    return plan_variant


def stamp_data(spec: JobSpec) -> str:
    """Return a digest of names, sizes and times of the local data files, which are not read."""
    stamp = hashlib.sha256()
    for name, channel in sorted(spec.data.items()):
        if channel.local_path is not None:
            root = spec.base / channel.local_path
            for file in data_files(root):
                # The upload reports what cannot be read.
                with contextlib.suppress(OSError):
                    found = file.path.stat()
                    text = f"{name} {file.name} {found.st_size} {found.st_mtime_ns}\n"
                    stamp.update(text.encode("utf-8", "surrogateescape"))
    return stamp.hexdigest()


def _conventions(spec: JobSpec) -> ScriptConventions:
    file = entry_file(spec)
    if file is None:
        from cloudtrain.job.static_analysis.shell_scripts import find_hidden_failures

        command = spec.code.command or ()
        return ScriptConventions(
            starts_ranks=bool(command),
            hidden_failures=find_hidden_failures(command, spec.code_directory),
        )
    name = os.path.relpath(file, spec.code_directory)
    if spec.code.task is not None:
        task = spec.code.task.rpartition(":")[2]
        return read_conventions(spec.code_directory, name, spec.includes, task=task)
    paths = spec.code.variables.get("PYTHONPATH", "").split(os.pathsep)
    return read_conventions(
        spec.code_directory,
        name,
        spec.includes,
        module=spec.code.module,
        search=tuple(below_code(each) for each in paths if each),
    )


def _requirements(spec: JobSpec) -> Requirements:
    name = spec.code.requirements
    if name is None:
        return Requirements()
    has_own_image = spec.cluster.image is not None
    return read_requirements(spec.code_directory, name, has_own_image=has_own_image)


def _requirement_problems(spec: JobSpec, target: Target) -> list[Problem]:
    """Return a problem for each line of the requirements that pip could not install in a container."""
    if target.machine is not None:
        return []
    at = ("code", "requirements")
    return [
        spec.problem_of(Diagnostic(fault.message, at, fault.hint))
        for fault in _requirements(spec).faults
    ]


def _missing_type_problems(spec: JobSpec, target: Target) -> list[Problem]:
    """Return the problem of a job without an instance type, where the target needs one."""
    missing = missing_type(spec, target)
    return [] if missing is None else [spec.problem_of(missing)]


def _torch_warnings(spec: JobSpec, inputs: PlanInputs) -> tuple[str, ...]:
    """Return the warnings about requirements that replace the image's PyTorch; none where the job has errors."""
    if inputs.target.machine is not None:
        return ()
    try:
        image = inputs.make_plan(spec, _NO_CODE).image
    except SpecError:
        return ()
    return texts_of(Severity.WARNING, warn_about_torch(_requirements(spec), image))


def _find_data_secrets(spec: JobSpec) -> Iterator[Diagnostic]:
    """Yield a problem for each data folder that would be uploaded with files whose names look like secrets."""
    for name, channel in spec.data.items():
        if channel.local_path is None:
            continue
        found = scan_folder(spec.base / channel.local_path)
        if found:
            message = f"the data holds what looks like a secret: {', '.join(map(str, found))}"
            yield Diagnostic(
                message,
                ("data", name, "uri"),
                "move it elsewhere, or name the folder of the data alone",
            )


def _find_pointers_in_data(spec: JobSpec) -> Iterator[Diagnostic]:
    """Yield an error for local data and weights that are there by name only, a warning where a part is."""
    places: dict[FieldPath, Path] = {
        ("data", name, "uri"): spec.base / channel.local_path
        for name, channel in spec.data.items()
        if channel.local_path is not None
    }
    weights = None if spec.train is None else spec.train.init_from
    if weights is not None and (uri := local_uri(spec, weights)).startswith("file:"):
        places["train", "init_from"] = path_of(uri)
    for at, path in places.items():
        pointers = find_pointers(path)
        if pointers.is_all:
            yield Diagnostic(f"{path} has no content: {pointers.message}", at, pointers.hint)
        elif pointers.message:
            yield warning(f"{at[0]}.{at[1]}: {pointers.message}: {pointers.hint}")


def _find_missing_files(
    spec: JobSpec, contents: Contents, requirements: Requirements
) -> Iterator[Problem]:
    """Yield a problem for each file that the job names and the bundle lacks, such as an ignored script."""
    code = spec.code
    entry = entry_file(spec)
    if code.task is not None:
        field = "task"
    elif code.script is not None:
        field = "script"
    else:
        field = "module"
    wanted = {
        field: _bundled_name(spec, entry) if entry is not None else None,
        "requirements": code.requirements,
    }
    named = list(wanted.items())
    named += [("requirements", each) for each in requirements.files]
    for name_of_field, written in named:
        name = PurePosixPath(written or "").as_posix()
        reason = contents.exclusion_reason(name) if written is not None else None
        if reason is not None:
            message = f"{name} would not be in the container: {reason}"
            ignore_file, name = ignore_file_of(name)
            yield spec.problem(f"code.{name_of_field}", message, f"write !{name} to {ignore_file}")


def _bundled_name(spec: JobSpec, file: Path) -> str:
    """Return the name in the bundle of a file of the code folder or an include."""
    for name, folder in spec.includes.items():
        if file.is_relative_to(folder):
            return f"{INCLUDE_FOLDER}/{name}/{file.relative_to(folder).as_posix()}"
    return file.relative_to(spec.code_directory).as_posix()


def _find_source_outputs(spec: JobSpec, contents: Contents) -> Iterator[Problem]:
    """Yield a problem for each output that is source of the job: a resumed run would restore the old version."""
    for index, output in enumerate(spec.code.outputs):
        named = (spec.code.script, spec.code.requirements)
        source = next(
            (name for name in _files_of(output, contents) if name.endswith(".py") or name in named),
            None,
        )
        if source is not None:
            message = f"{source} is source of the job, and a run that resumes would start with its old content"
            yield spec.problem_of(
                Diagnostic(message, ("code", "outputs", index), "let the script write elsewhere")
            )


def _bundled_output_warnings(spec: JobSpec, contents: Contents) -> list[str]:
    """Return a warning for each output that is in the bundle, too: a resumed run finds the saved one instead."""
    first = ((output, next(_files_of(output, contents), None)) for output in spec.code.outputs)
    return [
        f"code.outputs: {name} travels with the code, too; a run that resumes finds the kept {output} instead"
        for output, name in first
        if name is not None
    ]


def _excluded_file_warnings(
    spec: JobSpec, contents: Contents, conventions: ScriptConventions
) -> Iterator[str]:
    """Yield a warning for each file that the code opens and that is here and not in the bundle."""
    for path, place in conventions.opens:
        reason = contents.exclusion_reason(path)
        if reason is not None and (spec.code_directory / path).is_file():
            ignore_file, name = ignore_file_of(path)
            yield (
                f"{place} opens {path}, which does not travel with the code: {reason}. "
                f"Write !{name} to {ignore_file}, or make its folder a channel of data"
            )


def _pointer_warnings(contents: Contents) -> list[str]:
    """Return a warning about files of the bundle that are there by name only. The job names none of them itself."""
    pointers = contents.pointers
    if not pointers.message:
        return []
    return [f"code: {pointers.message}: {pointers.hint}"]


def _mlflow_warnings(
    plan: Plan, spec: JobSpec, target: Target, requirements: Requirements
) -> tuple[str, ...]:
    if target.machine is not None:
        return ()
    return texts_of(Severity.WARNING, warn_about_mlflow(spec, requirements, plan.image))


def _describe_default_exclusions(contents: Contents) -> list[str]:
    """Return a line about files that only cloudtrain's default rules exclude, or no line."""
    names = [left.name for left in contents.left_out if left.is_by_default]
    if not names:
        return []
    more = ""
    if len(names) > _NAMES_IN_LINE:
        more = f" and {len(names) - _NAMES_IN_LINE} more"
    return [
        f"not sent: {', '.join(names[:_NAMES_IN_LINE])}{more} (results and data; see: cloudtrain files)"
    ]


def _describe_module(spec: JobSpec) -> list[str]:
    """Return a line about a module that is not in the code folder, or no line."""
    if spec.code.module is None or entry_file(spec) is not None:
        return []
    return [f"{spec.code.module} is not in the code folder: an installed package must have it"]


def _files_of(output: str, contents: Contents) -> Iterator[str]:
    """Yield the files of the bundle that an entry of `code.outputs` names."""
    named = PurePosixPath(output).as_posix()
    for entry in contents.entries:
        if entry.name == named or (output.endswith("/") and entry.name.startswith(f"{named}/")):
            yield entry.name


def refuse_cuda_on_cpu(backend: str, *, cuda_on_cpu: bool = False, **_: bool) -> None:
    """Raise an error if other machines than this one are to have a stand-in for CUDA, which is this machine's."""
    if cuda_on_cpu and not facts_of(backend).is_local:
        hint = "leave it out, or use --local: its CUDA would not be that of the instances"
        raise UserError(f"--cuda-on-cpu is for local runs, not for {backend}", hint)
