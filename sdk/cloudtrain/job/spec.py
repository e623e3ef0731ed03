"""`JobSpec`: a job that was read from a file or built in Python, and the functions that load it."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloudtrain.errors import Problem, SpecError
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.document import Document, read_document
from cloudtrain.job.job_fields import JobFields
from cloudtrain.job.loader import (
    apply_overrides,
    change_document,
    override_texts,
    validate_document,
)
from cloudtrain.job.references import check_references
from cloudtrain.job.sections.cluster import wrong_types
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.job_file import find_job_files

_PLACEHOLDER_TYPE = "ml.p4d.24xlarge"
"""Replaces a missing or invalid instance type while the rest of a job is checked: it supports every feature."""


class JobSpec(JobFields):
    """One training job, as job.yaml describes it.

    Raises:
        SpecError: a field is unknown, missing or invalid. The error lists every problem.
    """

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: Iterable[str] = (), *, instances: int | None = None
    ) -> JobSpec:
        """Read and validate a job file.

        Args:
            path: The job file, or the folder of a job.yaml.
            overrides: `path=value`, as the `--set` option takes them.
            instances: Replaces `cluster.instances`.

        Raises:
            UserError: the file cannot be read.
            SpecError: the job is invalid. Every problem has its line and column.
        """
        return load_job(path, overrides, instances=instances).valid_spec()

    def with_values(self, values: Mapping[str, Any]) -> JobSpec:
        """Return this job with other values, validated as a job file is.

            spec.with_values({"train.epochs": 2, "cluster.spot": True})

        Args:
            values: New values by path. None removes a value, so that its default applies.

        Raises:
            UserError: a path is empty, or leads below a single value.
            SpecError: the changed job is invalid; unknown fields are reported with the nearest legal one.
        """
        return check_document(
            change_document(type(self).__name__, self.to_document(), values, self._document),
            self._base,
        ).valid_spec()


@dataclass(frozen=True)
class LoadedJob:
    """The result of loading a job file, which may be invalid.

    Attributes:
        spec: The job, with legal values in place of invalid ones; None when too little is valid.
        problems: Everything that is wrong with the job.
        replaced: Paths of the invalid values that were replaced. Further diagnostics about them are meaningless.
        words: The job as words of a command line, for messages.
    """

    spec: JobSpec | None
    problems: tuple[Problem, ...]
    replaced: frozenset[FieldPath]
    words: str = "JOB"

    def valid_spec(self) -> JobSpec:
        """Return the job.

        Raises:
            SpecError: the job is not valid. The error lists every problem.
        """
        if self.spec is None or self.problems:
            raise SpecError(self.problems)
        return self.spec

    def is_replaced(self, path: str) -> bool:
        """Return whether a field was replaced, is inside a replaced one, or contains one."""
        return Diagnostic("", tuple(path.split("."))).concerns(self.replaced)


def load_job(
    path: str | Path, overrides: str | Iterable[str] = (), *, instances: int | None = None
) -> LoadedJob:
    """Load a job file and find everything that is wrong with it. See `JobSpec.from_yaml` for the arguments.

    Raises:
        UserError: the file cannot be read, or an override is malformed.
        SpecError: the file is not YAML.
    """
    path = find_job_files(str(path))[0]
    document = read_document(Path(path))
    changes = override_texts(overrides)
    apply_overrides(document, changes, instances=instances)
    words = job_words(path, changes, instances=instances)
    return replace(check_document(document, Path(path).resolve().parent), words=words)


def job_words(path: str | Path, overrides: Iterable[str], *, instances: int | None) -> str:
    """Return the arguments of `load_job` as words of a command line."""
    options = [] if instances is None else ["--instances", str(instances)]
    return shlex.join(
        [str(path), *options, *(word for change in overrides for word in ("--set", change))]
    )


def check_document(document: Document, base: Path, *, has_files: bool = True) -> LoadedJob:
    """Return the job in a document, with everything that is wrong with it.

    Args:
        document: The content of a job file.
        base: Where relative paths start.
        has_files: Whether the files that the job refers to are on this machine, so that they are checked.
    """
    spec, problems, replaced = validate_document(JobSpec, document)
    problems = [*document.problems, *problems]
    if spec is not None:
        spec.locate(document, base)
        diagnostics = [*spec.cross_field_errors(), *(check_references(spec) if has_files else ())]
        problems += [spec.problem_of(each) for each in diagnostics if not each.concerns(replaced)]
        # A missing type is an error of the plan, because not each place needs one.
        if not spec.cluster.types and wrong_types().below(("cluster",)).concerns(replaced):
            spec = with_placeholder_type(spec)
            replaced.add(("cluster", "instance_type"))
    return LoadedJob(spec, tuple(problems), frozenset(replaced))


def with_placeholder_type(spec: JobSpec) -> JobSpec:
    """Return a job with an instance type that supports every feature, for further checks of one that has none."""
    cluster = spec.cluster.model_copy(update={"instance_type": _PLACEHOLDER_TYPE})
    return spec.model_copy(update={"cluster": cluster})


def load_job_document(
    data: Mapping[str, Any],
    name: str,
    overrides: Iterable[str] = (),
    *,
    instances: int | None = None,
) -> JobSpec:
    """Load a job from the result of `JobSpec.to_document`, without a check of the files that it refers to.

    Messages name the document. See `JobSpec.from_yaml` for the other arguments.

    Raises:
        UserError: an override is malformed.
        SpecError: the job is invalid. The error lists every problem.
    """
    document = Document(name, copy.deepcopy(dict(data)))
    apply_overrides(document, override_texts(overrides), instances=instances)
    return check_document(document, Path.cwd(), has_files=False).valid_spec()
