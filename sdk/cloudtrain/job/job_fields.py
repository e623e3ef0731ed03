"""The fields of a job: the frozen content of job.yaml, and the checks of fields that depend on each other."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr

from cloudtrain.errors import Problem
from cloudtrain.job.diagnostics import Diagnostic, field_error, to_problem
from cloudtrain.job.document import Document, SourceLocation
from cloudtrain.job.fields import Section, Text
from cloudtrain.job.request_checks import request_errors
from cloudtrain.job.sections.checkpoint import Checkpoint
from cloudtrain.job.sections.cluster import Cluster
from cloudtrain.job.sections.code import Code
from cloudtrain.job.sections.data import ChannelOrUri
from cloudtrain.job.sections.limits import Limits
from cloudtrain.job.sections.reporting import MetricName, MetricPattern, Notify, Output, Tracking
from cloudtrain.job.sections.slurm import Slurm
from cloudtrain.job.sections.train import Train
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.notebook.summary import Summary
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

MAX_NAME_CHARACTERS = 42
"""Longest `name`: SageMaker allows 63 characters, and the run id appends `-yymmdd-hhmmss-xxxxxx`."""
OWN_TAG_PREFIX = "cloudtrain:"
"""Prefix of the tags that cloudtrain sets."""
JOB_TAG = f"{OWN_TAG_PREFIX}job"
"""Tag by which cloudtrain finds a job's runs."""
REQUEST_TAG = f"{OWN_TAG_PREFIX}request"
"""Tag with the identity of a plan, which is equal for two submits of the same request and code."""
SWEEP_TAG = "sweep"
TRIAL_TAG = "trial"
"""Tags of the runs of a sweep: its id, and the number of the trial."""
RUN_TAG = f"{OWN_TAG_PREFIX}run"
"""Key of an endpoint's tag: the run whose model it serves."""
NOTIFY_TAG = f"{OWN_TAG_PREFIX}notify"
"""Tag with the ARN of the topic that gets a message at the end; the EventBridge rule in infra/notify.tf matches it."""

_NAME = lazy_pattern(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*")


def _check_name(value: object) -> object:
    if isinstance(value, str):
        if not _NAME.fullmatch(value):
            if "$" in value:
                raise field_error(
                    "variables are not expanded in a job file",
                    hint='your shell does it on the command line: --set name="$NAME"',
                )
            # An accented letter has its plain one before its accent.
            plain = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", value))
            legal = re.sub(r"[^a-zA-Z0-9]+", "-", plain).strip("-")[:MAX_NAME_CHARACTERS].strip("-")
            raise field_error(
                "expected letters, digits and single hyphens between them",
                hint=f'did you mean "{legal}"?' if legal else "for example gpt-stdlib",
            )
        if len(value) > MAX_NAME_CHARACTERS:
            message = f"{len(value)} characters; at most {MAX_NAME_CHARACTERS}"
            raise field_error(message, hint="the run id adds date and suffix")
    return value


JobName = Annotated[Text, BeforeValidator(_check_name)]
"""At most 42 letters, digits and single hyphens between them."""


class JobFields(Section):
    """The fields of job.yaml, and what follows from them alone."""

    name: JobName = Field(examples=["gpt-stdlib"])
    """Start of every run id; at most 42 letters, digits and hyphens."""
    code: Code = Field(examples=[{"script": "train.py"}])
    """The code folder and what is started in it."""
    cluster: Cluster = Field(examples=[{"instance_type": "ml.p4d.24xlarge"}])
    """The instances that the job runs on."""
    data: dict[str, ChannelOrUri] = Field(default_factory=dict)
    """Input channels by name."""
    train: Train | None = None
    """How the shared entrypoint trains a Task (with code.task only)."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct)
    """Where and how often the run saves checkpoints."""
    limits: Limits = Field(default_factory=Limits.model_construct)
    """Limits of the run's time, cost and retries."""
    slurm: Slurm = Field(default_factory=Slurm.model_construct)
    """Options of the batch job on a Slurm cluster; other places ignore them."""
    metrics: dict[MetricName, MetricPattern] = Field(
        default_factory=dict, examples=[{"loss": "loss=([0-9.]+)"}]
    )
    """Regular expressions that find metrics in a script's output; step and total are its progress, epoch numbers steps."""
    tracking: Tracking = Field(default_factory=Tracking.model_construct)
    """Where metrics go besides the event lines."""
    output: Output = Field(default_factory=Output.model_construct)
    """Where and how the model and the other outputs are stored."""
    notify: Notify | None = None
    """Who gets a message when a run ends."""
    tags: dict[str, Text] = Field(default_factory=dict)
    """AWS tags of the job."""
    report: bool = False
    """Write report.html into the folder of a local run when it ends (the setting `report` does so for every run)."""
    request: dict[str, Any] = Field(
        default_factory=dict, examples=[{"ExperimentConfig": {"ExperimentName": "gpt"}}]
    )
    """Members of CreateTrainingJob that have no field here, by AWS's names; checked against the installed AWS model."""

    _base: Path = PrivateAttr(default_factory=Path.cwd)
    _document: Document | None = PrivateAttr(default=None)

    def __repr__(self) -> str:
        return _summarize(self).to_text()

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return _summarize(self).to_html()

    def to_document(self) -> dict[str, Any]:
        """Return the content of a job file for this job: the fields that were given, values with their units."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude_unset=True)
        return document

    def locate(self, document: Document, base: Path) -> None:
        """Set the document that the job comes from, for the locations of problems, and the folder of relative paths."""
        self._document = document
        self._base = base

    def is_tilde(self, path: FieldPath) -> bool:
        """Return whether a value is null because the job file has a `~` there."""
        return self._document is not None and path in self._document.tildes

    @property
    def base(self) -> Path:
        """The folder that relative paths start from: the job file's, or the working folder."""
        return self._base

    @property
    def file(self) -> Path | None:
        """Path of the job file; None for a job that was built in Python."""
        if self._document is None or self._document.location_of(()).line is None:
            return None
        return self._base / Path(self._document.file).name

    @property
    def code_directory(self) -> Path:
        """Absolute path of the code folder."""
        return Path(os.path.normpath(self._base / self.code.directory))

    @property
    def includes(self) -> dict[str, Path]:
        """Absolute paths of the folders of `code.include`, by the name under which they are imported."""
        folders = (Path(os.path.normpath(self._base / written)) for written in self.code.include)
        return {folder.name: folder for folder in folders}

    def import_root(self, module: str) -> Path:
        """Return the folder below which a module is found: the code folder, or the parent of its include."""
        folder = self.includes.get(module.partition(":")[0].partition(".")[0])
        if folder is None or not folder.is_dir():
            return self.code_directory
        return folder.parent

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        """Return a problem of a field that was found after validation, with the field's location."""
        return self.problem_of(Diagnostic(message, tuple(path.split(".")), hint))

    def problem_of(self, diagnostic: Diagnostic) -> Problem:
        """Return the problem that reports a diagnostic, with the location of its field."""
        document = self._document
        if document is None:
            return to_problem(diagnostic, SourceLocation(f"{type(self).__name__}(...)"))
        path = diagnostic.path
        # `train: s3://...` is short for `train: {uri: s3://...}`: report the field that the file has.
        is_short_form = (
            (
                path[-1:] == ("uri",)
                or path[-2:] == ("queue", "name")
                or path[-1:] == ("instance_type",)
            )
            and path not in document.values
            and path[:-1] in document.values
        )
        if is_short_form:
            diagnostic = replace(diagnostic, path=path[:-1])
        return to_problem(
            diagnostic, document.location_of(diagnostic.path, is_key=diagnostic.is_key)
        )

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        train = ("train",)
        entries = (("code", "task"), ("code", "script"), ("code", "module"), ("code", "command"))
        if self.code.task is not None and self.train is None:
            yield Diagnostic(
                "a Task needs this section", train, "train: {epochs: 1}", (*entries, train)
            )
        if self.code.task is None and self.code.entry and self.train is not None:
            message = "this section is for a Task; a script has its own loop"
            yield Diagnostic(message, train, "pass the values to the script by code.args", entries)
        yield from self._tag_errors()
        yield from self._isolation_errors()
        yield from self._spot_errors()
        yield from self._channel_errors()
        yield from request_errors(self.request, self.data)
        yield from self._placement_errors()

    def _placement_errors(self) -> Iterator[Diagnostic]:
        resources = self.request.get("ResourceConfig")
        name = "InstancePlacementConfig"
        if self.cluster.prefer and isinstance(resources, Mapping) and name in resources:
            # Source: botocore 1.44.5's model of ResourceConfig, InstancePreferences.
            message = (
                "SageMaker does not accept a placement on UltraServers with instance preferences"
            )
            yield Diagnostic(
                message,
                ("request", "ResourceConfig", name),
                "remove it, or use cluster.instance_type",
                (("cluster", "prefer"), ("request",)),
                is_key=True,
            )

    def _tag_errors(self) -> Iterator[Diagnostic]:
        for key in self.tags:
            lower = key.lower()
            if lower.startswith(OWN_TAG_PREFIX):
                message = "cloudtrain sets this tag itself"
            elif lower.startswith("aws:"):
                message = "AWS reserves tags that begin with aws:"
            else:
                continue
            yield Diagnostic(message, ("tags", key), "rename it", is_key=True)

    def _isolation_errors(self) -> Iterator[Diagnostic]:
        if not self.cluster.network.isolation:
            return
        if self.code.requirements is not None:
            fields = (("cluster", "network"), ("code", "requirements"))
            message = "an isolated container cannot download packages"
            hint = "install the packages in your own image (cluster.image), or set isolation: false"
            yield Diagnostic(message, ("code", "requirements"), hint, fields)
        for name in self.code.secrets:
            fields = (("cluster", "network"), ("code", "env"))
            message = "an isolated container cannot reach Secrets Manager, and has no credentials"
            yield Diagnostic(
                message, ("code", "env", name), "set cluster.network.isolation: false", fields
            )

    def _spot_errors(self) -> Iterator[Diagnostic]:
        max_wait = self.cluster.spot.max_wait if self.cluster.spot else None
        # A default runtime is shortened to max_wait instead; see `bound_time`.
        if (
            max_wait is not None
            and max_wait < self.limits.runtime
            and "runtime" in self.limits.model_fields_set
        ):
            message = f"shorter than limits.runtime, {format_duration(self.limits.runtime)}"
            hint = (
                f"it includes waiting and training: use {format_duration(2 * self.limits.runtime)}"
            )
            fields = (("cluster", "spot"), ("limits", "runtime"))
            yield Diagnostic(message, ("cluster", "spot", "max_wait"), hint, fields)

    def _channel_errors(self) -> Iterator[Diagnostic]:
        uris = {
            name: channel.source.rstrip("/") for name, channel in self.data.items() if channel.is_s3
        }
        checkpoints = (self.checkpoint.uri or "").rstrip("/")
        for name, uri in uris.items():
            if checkpoints.startswith("s3://") and f"{checkpoints}/".startswith(f"{uri}/"):
                fields = (("checkpoint", "uri"), ("data", name))
                message = f"checkpoints would be written into the data of channel {name}"
                yield Diagnostic(message, ("checkpoint", "uri"), "use another prefix", fields)
        for name in self.data:
            if name in (".", ".."):
                message = "a channel becomes a folder, and this is not the name of a folder"
                yield Diagnostic(message, ("data", name), "rename it", is_key=True)
            if name in (CODE_CHANNEL, CONFIG_CHANNEL):
                yield Diagnostic(
                    "cloudtrain uses this channel itself", ("data", name), "rename it", is_key=True
                )
            twins = [
                other for other in self.data if other != name and other.lower() == name.lower()
            ]
            if twins and name > twins[0]:
                message = f"differs from {twins[0]} by case only, and both would be SM_CHANNEL_{name.upper()}"
                yield Diagnostic(message, ("data", name), "rename one of them", is_key=True)


_SHOWN_SECTIONS = (
    "code",
    "cluster",
    "data",
    "train",
    "checkpoint",
    "limits",
    "slurm",
    "metrics",
    "tracking",
    "tags",
)


def _summarize(spec: JobFields) -> Summary:
    """Return a summary of a job: one row per section that was given, with its fields as in a job file."""
    document = spec.to_document()
    rows = [
        (name, ", ".join(_fields(document[name]))) for name in _SHOWN_SECTIONS if document.get(name)
    ]
    return Summary(f"JobSpec {spec.name}", rows)


def _fields(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the fields of a section as `path: value`. Values of environment variables can be secrets, so only names."""
    for name, value in section.items():
        if name == "env" and isinstance(value, Mapping):
            yield f"env: {', '.join(value)}"
        elif isinstance(value, Mapping) and list(value) == ["uri"]:
            yield f"{prefix}{name}: {value['uri']}"
        elif isinstance(value, Mapping) and value:
            yield from _fields(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}: {_show_value(value)}"


def _show_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show_value, value))}]"
    return str(value)
