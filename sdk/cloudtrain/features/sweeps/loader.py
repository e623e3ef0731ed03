"""Loading of sweep.yaml: the sweep, its job, and everything that is wrong with both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.errors import Problem, SpecError, UserError
from cloudtrain.features.sweeps.spec import SweepSpec
from cloudtrain.job.diagnostics import to_problem
from cloudtrain.job.document import Document, SourceLocation, dotted, read_document
from cloudtrain.job.loader import validate_document
from cloudtrain.job.spec import JobSpec, LoadedJob, check_document, load_job

_JOB = ("job",)


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep whose file and job are valid by themselves.

    Attributes:
        spec: The sweep.
        job: Its job.
        document: The document of the sweep, for the locations of problems.
    """

    spec: SweepSpec
    job: JobSpec
    document: Document

    @property
    def name(self) -> str:
        """The sweep's name, by default the job's."""
        return self.spec.name or self.job.name

    def problem(self, path: tuple[str | int, ...], message: str, hint: str = "") -> Problem:
        """Return a problem of a field of the sweep, with the field's location."""
        at = self.document.location_of(path)
        shown = ".".join(str(part) for part in path if isinstance(part, str))
        return Problem(at.file, at.line, at.column, shown, message, hint)

    def identity_document(self) -> dict[str, Any]:
        """Return the content of the sweep and of its job: equal for equal sweeps, wherever their files are."""
        return {
            **self.spec.model_dump(mode="json", exclude_unset=True),
            "job": self.job.to_document(),
        }


def load_sweep(path: str | Path) -> LoadedSweep:
    """Load a sweep file and its job.

    Raises:
        UserError: the file cannot be read.
        SpecError: the sweep or its job is not valid. The error lists every problem.
    """
    document = read_document(Path(path), kind="sweep")
    return check_sweep(document, Path(path).resolve().parent)


def make_sweep(job: JobSpec | str | Path, fields: Mapping[str, Any]) -> LoadedSweep:
    """Return a sweep that is built in Python.

    Args:
        job: The job, or the path of its file.
        fields: The other fields of a sweep file.

    Raises:
        UserError: the job file cannot be read.
        SpecError: the sweep or its job is not valid.
    """
    spec = job if isinstance(job, JobSpec) else JobSpec.from_yaml(job)
    place = "sweep(...)"
    document = Document(place, {**fields, "job": spec.to_document()}, {(): SourceLocation(place)})
    return check_sweep(document, spec.base, spec)


def check_sweep(
    document: Document, base: Path, job: JobSpec | None = None, *, has_files: bool = True
) -> LoadedSweep:
    """Return the sweep in a document.

    Args:
        document: The document.
        base: Folder where its relative paths start.
        job: The job, if it is known; by default that of the document.
        has_files: Whether the files that the job refers to are checked; not those of a sweep that has begun.

    Raises:
        UserError: the job file cannot be read.
        SpecError: the sweep or its job is not valid.
    """
    spec, problems, replaced = validate_document(SweepSpec, document)
    problems = [*document.problems, *problems]
    if spec is not None:
        unknown = tuple(each.path for each in problems)
        wrong = [
            each
            for each in spec.cross_field_errors()
            # Of a parameter with an unknown field, only this field is reported.
            if not each.concerns(replaced)
            and not any(path.startswith(f"{dotted(each.path)}.") for path in unknown)
        ]
        problems += [
            to_problem(each, document.location_of(each.path, is_key=each.is_key)) for each in wrong
        ]
    if job is None and _JOB not in replaced and document.data.get("job"):
        loaded = _load_job(document, base, has_files=has_files)
        job, problems = loaded.spec, [*problems, *loaded.problems]
    if spec is None or job is None or problems:
        raise SpecError(problems)
    return LoadedSweep(spec, job, document)


def _load_job(document: Document, base: Path, *, has_files: bool) -> LoadedJob:
    """Return the job of a sweep file, which is the path of a file or the content of one."""
    job = document.data["job"]
    if not isinstance(job, dict):
        return _load_job_file(document, base / str(job))
    values = {path[1:]: at for path, at in document.values.items() if path[:1] == _JOB}
    keys = {path[1:]: at for path, at in document.keys.items() if path[:1] == _JOB and path != _JOB}
    loaded = check_document(Document(document.file, job, values, keys), base, has_files=has_files)
    problems = tuple(dataclasses.replace(each, path=f"job.{each.path}") for each in loaded.problems)
    return dataclasses.replace(loaded, problems=problems)


def _load_job_file(document: Document, path: Path) -> LoadedJob:
    try:
        return load_job(path)
    except SpecError:
        # It is not YAML, and the error names the place in the job file.
        raise
    except UserError as error:
        at = document.location_of(_JOB)
        problem = Problem(at.file, at.line, at.column, "job", error.message, error.hint)
        return LoadedJob(None, (problem,), frozenset())
