"""The protocol of trackers: what a service implements so that a run is logged to it."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json, encode_floats, load_json
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.s3.objects import S3Objects


class Value(NamedTuple):
    """One value of a metric. `time` is in seconds since the epoch."""

    name: str
    value: float
    time: float
    step: int


class Ending(Enum):
    """How a run has ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Connection:
    """What a service has of the run already.

    Attributes:
        logged: Last step that is logged, by metric.
        fields: Fields of the event `tracking` with the place of the run: `url` and others.
    """

    logged: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """A service that a run is logged to.

    One thread calls all methods but `require_packages`. A method that raises an exception is called again later, with
    growing pauses; one that does not return delays nothing but this service.
    """

    @property
    def name(self) -> str:
        """The service's name in job.yaml and in the event `tracking`."""

    @property
    def place(self) -> str:
        """The service in words, such as `MLflow at https://mlflow.example.com`."""

    def require_packages(self) -> None:
        """Raise a JobError if this environment lacks a package. Called before training starts."""

    def connect(self, started: Mapping[str, Any]) -> Connection:
        """Find or create the run, and log what describes it.

        A run that continues the same training, as another attempt or as another run, continues the run of the service.

        Args:
            started: The event of the start.
        """

    def log(self, values: Sequence[Value]) -> int:
        """Log values, none of which is logged already; return how many the service has rejected for good."""

    def save(self, checkpoint: str) -> None:
        """Log that a checkpoint is complete. A run that resumes from it expects all values until then."""

    def end(self, ending: Ending) -> None:
        """Log how the run has ended, after its last values."""


def require_package(module: str, package: str, field: str) -> None:
    """Raise an error if this environment lacks a package that a field of job.yaml needs.

    Raises:
        JobError: the module cannot be imported.
    """
    found = importlib.util.find_spec(module)
    # A folder of this name without code, such as that of its own files, is found, too.
    if found is None or found.origin is None:
        raise JobError(
            f"{field} needs the package {package}, which this environment lacks: add {package} to "
            f"code.requirements (locally: pip install {package}), or remove {field}"
        )


def describe_error(error: Exception) -> str:
    """Return an exception's type and message in one line, without secrets."""
    return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def digest(training: Mapping[str, Any]) -> str:
    """Return a short digest of a training's identity."""
    text = dump_json(encode_floats(dict(training)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings as text, by dotted name, without secrets."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flatten(part, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, redact(value if isinstance(value, str) else repr(value))


@dataclass(frozen=True)
class PlanFacts:
    """What a run's plan.json says to people who look at the run in a service."""

    document: Mapping[str, Any]
    model: str
    commit: str = ""
    branch: str = ""


def read_plan(uri: str, run: str) -> PlanFacts:
    """Read the plan of a run.

    Raises:
        OSError, S3Error, KeyError, ValueError: it cannot be read, or is none.
    """
    plan = load_json(read_file(uri) or b"")
    output = plan["request"]["OutputDataConfig"]["S3OutputPath"]
    source = plan.get("source") or {}
    model = "output/model.tar.gz" if output.startswith("s3:") else "model"
    return PlanFacts(
        document=plan,
        model=f"{output}/{run}/{model}",
        commit=source.get("commit") or "",
        branch=source.get("branch") or "",
    )


def read_file(uri: str) -> bytes | None:
    """Return the content of a file or object; None if it does not exist."""
    folder, _, name = uri.rpartition("/")
    if uri.startswith("s3://"):
        return S3Objects(folder).read(name)
    path = path_of(uri)
    return path.read_bytes() if path.exists() else None


def write_file(uri: str, content: bytes) -> None:
    """Write a file or object in one piece: a reader finds the former content or all of this one."""
    folder, _, name = uri.rpartition("/")
    if uri.startswith("s3://"):
        S3Objects(folder).put(name, content)
        return
    path = path_of(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{path}.part")
    part.write_bytes(content)
    part.replace(path)
