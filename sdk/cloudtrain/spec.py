"""`JobSpec`: what the user wrote in job.yaml, validated and frozen.

The docstring below a field is its one description: unit, range and default stand there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from cloudtrain.document import Document, FieldPath, Place, dotted, parse_scalar, read_document
from cloudtrain.entry import check_task, find_module
from cloudtrain.errors import Problem, SpecError, UserError, nearest
from cloudtrain.problems import explain, fail
from cloudtrain.units import Cadence, parse_cadence, parse_duration, parse_money, parse_size
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL

NAME_CHARACTERS = 42
"""Longest `name`: SageMaker allows 63 characters and the run id adds `-yymmdd-hhmmss-xxxxxx`."""

_NAME = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*")
_CHANNEL = re.compile(r"[A-Za-z0-9._-]{1,64}")  # botocore's model of CreateTrainingJob, ChannelName
_TASK = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_S3_URI = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/.*)?")
_S3_EXPECTED = "expected s3://bucket/prefix, with a bucket name of 3 to 63 small letters, digits, dots or hyphens"
_INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+")


def _unit(parse: Callable[[object], Any]) -> BeforeValidator:
    def validate(value: object) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise fail(str(error)) from None

    return BeforeValidator(validate)


def _matching(pattern: re.Pattern[str], expected: str) -> BeforeValidator:
    def validate(value: object) -> object:
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise fail(f'expected {expected}, got "{value}"')
        return value

    return BeforeValidator(validate)


Duration = Annotated[int, _unit(parse_duration)]
"""Seconds, written `10m`, `36h`, `1h30m`."""
GigaBytes = Annotated[int, _unit(lambda value: -(-parse_size(value) // 10**9))]
"""Whole gigabytes, written `200GB`."""
Dollars = Annotated[float, _unit(parse_money)]
"""US dollars, written `500 USD`."""
Every = Annotated[Cadence, _unit(parse_cadence)]
"""A duration or a number of optimizer steps, written `10m` or `500 steps`."""
S3Uri = Annotated[str, _matching(_S3_URI, "an S3 uri such as s3://bucket/prefix")]
InstanceType = Annotated[str, _matching(_INSTANCE_TYPE, "a SageMaker instance type such as ml.p4d.24xlarge")]


def _text(value: object) -> object:
    """Accept numbers and booleans where text is meant, as environments and tags need."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_text)]


class Section(BaseModel):
    """Strict base of every section: unknown fields are errors, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    if not TYPE_CHECKING:

        def __init__(self, /, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise SpecError(explain(type(self), error, _constructor_places(type(self)))) from None

        # Says to pydantic that nested sections need not go through this constructor (as its own RootModel does).
        __init__.__pydantic_base_init__ = True


def _constructor_places(model: type[BaseModel]) -> Callable[[FieldPath, bool], Place]:
    return lambda _path, _key: Place(f"{model.__name__}(...)")


class Code(Section):
    """What travels and what is started."""

    directory: str = "."
    """Folder that travels, relative to the job file; .gitignore and .cloudtrainignore are honoured."""
    task: Annotated[str, _matching(_TASK, "module:Class, such as gpt:GPT")] | None = None
    """A Task for the shared entrypoint, as module:Class below the directory (exactly one of task and script)."""
    script: str | None = None
    """A Python script that torchrun can start, unchanged, relative to the directory."""
    args: dict[str, Any] | tuple[Any, ...] = Field(default_factory=dict)
    """Keyword arguments of the Task, or argv of the script (a list, or a mapping that becomes --key value)."""
    requirements: str | None = None
    """Requirements file below the directory, installed in the container before the start."""
    env: dict[str, Text] = Field(default_factory=dict)
    """Environment variables of every process of the run."""

    @model_validator(mode="after")
    def _one_entry(self) -> Self:
        if (self.task is None) == (self.script is None):
            raise fail("give exactly one of task and script", hint="task: module:Class, or script: train.py")
        if self.task is not None and not isinstance(self.args, dict):
            raise fail("a Task takes keyword arguments: write a mapping", at=("args",))
        for name in ("script", "requirements"):
            path = getattr(self, name)
            if path is not None and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
                raise fail(f'expected a path below the directory, got "{path}"', at=(name,))
        return self


class Network(Section):
    """Where the instances sit. Subnets and groups left empty come from the settings."""

    subnets: tuple[str, ...] = ()
    """Subnet ids for the instances; empty takes the settings' subnets."""
    security_groups: tuple[str, ...] = ()
    """Security group ids; for EFA the group must allow all traffic to itself."""
    isolation: bool = False
    """Cut the containers off from every network but each other (no S3 from the job's code)."""
    encrypt_traffic: bool = False
    """Encrypt traffic between instances; slows collectives."""


class Spot(Section):
    """Managed spot training."""

    max_wait: Duration | None = None
    """Longest time from submit to end, waiting included; default: twice limits.runtime."""


def _spot(value: object) -> object:
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, str):
        raise fail(f'expected true, false or a mapping with max_wait, got "{value}"', hint="spot: {max_wait: 36h}")
    return value


Distribution = Literal["auto", "torch_distributed", "pytorchddp", "smdistributed"]


class Cluster(Section):
    """What the job runs on."""

    instance_type: InstanceType | None = None
    """SageMaker instance type, such as ml.p4d.24xlarge (exactly one of instance_type and prefer)."""
    prefer: tuple[InstanceType, ...] = Field(default=(), max_length=5)
    """Instance types in order of preference, at most 5; the first with capacity is used (not with spot)."""
    instances: int = Field(default=1, ge=1)
    """Number of instances."""
    distribution: Distribution = "auto"
    """How ranks are started and joined; auto takes torch_distributed."""
    processes_per_instance: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Ranks per instance; auto is one per GPU, or 2 on a machine without GPUs."""
    spot: Annotated[Spot | None, BeforeValidator(_spot)] = None
    """true, false or {max_wait: 36h}: spare capacity at a discount, with interruptions."""
    framework: Text | None = None
    """PyTorch version of the AWS container, such as "2.13"; default: the newest that the distribution works with."""
    image: str | None = None
    """Container image uri instead of framework."""
    volume: GigaBytes = Field(default=30, ge=1)
    """Storage volume of each instance (ignored by AWS on types with local NVMe)."""
    keep_alive: Annotated[Duration, Field(ge=0, le=21600)] | None = None
    """Keep the cluster warm for the next job for this long after the end, at most 6h."""
    max_pending: Annotated[Duration, Field(ge=1800, le=2419200)] | None = None
    """Give up when there is no capacity for this long: 30m to 28d."""
    network: Network = Network()
    """Subnets, security groups, isolation and traffic encryption."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.instance_type is None) == (not self.prefer):
            raise fail("give exactly one of instance_type and prefer", hint="instance_type: ml.p4d.24xlarge")
        if self.spot is not None and self.prefer:
            raise fail("SageMaker takes no instance preferences with spot", at=("prefer",), hint="use instance_type")
        if self.spot is not None and self.keep_alive:
            raise fail("SageMaker keeps no spot cluster warm", at=("keep_alive",), hint="remove keep_alive or spot")
        if self.image is not None and self.framework is not None:
            raise fail("give framework or image, not both", at=("framework",))
        if bool(self.network.subnets) != bool(self.network.security_groups):
            raise fail("subnets and security_groups go together", at=("network",))
        return self

    @property
    def first_choice(self) -> str:
        """The instance type, or the first of the preferences."""
        return self.instance_type or self.prefer[0]


class Channel(Section):
    """One input channel."""

    uri: str
    """s3://bucket/prefix, or a local path relative to the job file."""
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    """File downloads before the start; FastFile streams on read; Pipe is a FIFO."""
    sharded: bool = False
    """Give each instance its own share of the objects instead of a full copy."""

    @property
    def is_s3(self) -> bool:
        """Whether the data lies in S3."""
        return self.uri.startswith("s3://")


def _channel(value: object) -> object:
    return {"uri": value} if isinstance(value, str) else value


class EarlyStopping(Section):
    """Stop when a validation metric stops improving."""

    metric: str = "validation/loss"
    """Metric of the validation split, as split/name."""
    patience: int = Field(default=5, ge=1)
    """Evaluations without improvement before the run ends."""
    min_delta: float = Field(default=0.0, ge=0.0)
    """Smallest change that counts as improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""


class Evaluate(Section):
    """When the validation split is evaluated."""

    every: Every
    """Optimizer steps between evaluations, such as 200 steps; default: after each epoch."""

    @model_validator(mode="after")
    def _in_steps(self) -> Self:
        if self.every.steps is None:
            raise fail("expected a number of steps such as 200 steps", at=("every",))
        return self


class Parallel(Section):
    """How the model is spread over the ranks."""

    data: Literal["ddp", "fsdp"] = "ddp"
    """Replicate the model on every rank (ddp) or shard it (fsdp)."""
    tensor: int = Field(default=1, ge=1)
    """Tensor-parallel degree."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages."""

    @model_validator(mode="after")
    def _available(self) -> Self:
        # Refused instead of ignored: a run that silently replicated the model would pay for memory it does not have.
        if self.data == "fsdp":
            raise fail("this version trains with ddp only", at=("data",), hint="use ddp")
        for name in ("tensor", "pipeline"):
            if getattr(self, name) != 1:
                raise fail("this version trains with ddp only", at=(name,), hint="use 1")
        return self


class Profile(Section):
    """Which steps torch.profiler records."""

    at: int = Field(ge=1)
    """First step to record."""
    steps: int = Field(default=5, ge=1)
    """Number of steps to record."""

    @model_validator(mode="after")
    def _available(self) -> Self:
        raise fail("this version does not profile", hint="remove it")


class Tracking(Section):
    """Where metrics go besides the event lines."""

    tensorboard: bool = False
    """Write TensorBoard scalars."""
    mlflow: str | None = None
    """Tracking server uri or ARN."""

    @model_validator(mode="after")
    def _available(self) -> Self:
        for name in ("tensorboard", "mlflow"):
            if getattr(self, name):
                raise fail("this version tracks by event lines only", at=(name,), hint="remove it")
        return self


class Train(Section):
    """How the shared entrypoint trains a Task."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the training data (exactly one of epochs and steps)."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps."""
    batch_size: int = Field(default=32, ge=1)
    """Samples per rank and micro-step."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-steps per optimizer step; gradients are synchronised in the last one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute precision; bf16 and fp16 use autocast, fp16 a gradient scaler."""
    parallel: Parallel = Parallel()
    """Data, tensor and pipeline parallelism."""
    compile: bool = False
    """Compile the model with torch.compile."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of the global gradient norm."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the default optimizer, AdamW."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, sample order and dropout."""
    evaluate: Evaluate | None = None
    """When the validation split is evaluated; default: after each epoch."""
    early_stopping: EarlyStopping | None = None
    """Stop when a validation metric stops improving."""
    profile: Profile | None = None
    """Which steps torch.profiler records."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise fail("give exactly one of epochs and steps", hint="for example epochs: 3")
        return self


class Checkpoint(Section):
    """Where and how often the run is saved."""

    uri: str | None = None
    """s3://bucket/prefix, or a local folder for local runs; default: a folder of the run's own."""
    every: Every = Cadence(seconds=600)
    """A duration such as 10m or a count such as 500 steps."""
    keep: int = Field(default=3, ge=1)
    """Complete checkpoints to keep."""
    resume: str = "auto"
    """auto (newest under uri), never, a run id, or the uri of another run's checkpoints."""


class Limits(Section):
    """What the run may cost at most."""

    runtime: Annotated[Duration, Field(ge=60, le=2419200)] = 86400
    """Longest training time, 1m to 28d; the run is stopped after it."""
    cost: Annotated[Dollars, Field(gt=0)] | None = None
    """Most that the run may cost; shortens the runtime so that it holds."""
    retries: int = Field(default=0, ge=0, le=30)
    """How often workers that fail are started again from the last checkpoint, at most 30."""


def _name_fits(value: object) -> object:
    if isinstance(value, str):
        if not _NAME.fullmatch(value):
            legal = re.sub(r"[^a-zA-Z0-9]+", "-", value).strip("-")[:NAME_CHARACTERS].strip("-")
            raise fail(
                "expected letters, digits and single hyphens between them",
                hint=f'did you mean "{legal}"?' if legal else "",
            )
        if len(value) > NAME_CHARACTERS:
            raise fail(f"{len(value)} characters; at most {NAME_CHARACTERS}", hint="the run id adds date and suffix")
    return value


class JobSpec(Section):
    """One training job, as job.yaml describes it.

    Raises:
        SpecError: a field is unknown, missing or wrong; every problem is listed.
    """

    name: Annotated[str, BeforeValidator(_text), BeforeValidator(_name_fits)]
    """Start of every run id; at most 42 letters, digits and hyphens."""
    code: Code
    """What travels and what is started."""
    cluster: Cluster
    """What the job runs on."""
    data: dict[str, Annotated[Channel, BeforeValidator(_channel)]] = Field(default_factory=dict)
    """Input channels by name."""
    train: Train | None = None
    """How the shared entrypoint trains a Task (with code.task only)."""
    checkpoint: Checkpoint = Checkpoint()
    """Where and how often the run is saved."""
    limits: Limits = Limits()
    """What the run may cost at most."""
    tracking: Tracking = Tracking()
    """Where metrics go besides the event lines."""
    tags: dict[str, Text] = Field(default_factory=dict)
    """AWS tags of the job."""

    _base: Path = PrivateAttr(default_factory=Path.cwd)
    _document: Document | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.code.task is not None and self.train is None:
            raise fail("a Task needs this section", at=("train",), hint="train: {epochs: 1}")
        if self.code.script is not None and self.train is not None:
            raise fail(
                "only a Task is trained by these; a script has its own loop", at=("train",), hint="use code.args"
            )
        if self.cluster.spot and self.cluster.spot.max_wait and self.cluster.spot.max_wait < self.limits.runtime:
            raise fail(
                "shorter than limits.runtime",
                at=("cluster", "spot", "max_wait"),
                hint="waiting is counted on top of it",
            )
        if (self.checkpoint.uri or "").startswith("s3://") and not _S3_URI.fullmatch(self.checkpoint.uri or ""):
            raise fail(_S3_EXPECTED, at=("checkpoint", "uri"))
        for name, channel in self.data.items():
            if name in (CODE_CHANNEL, CONFIG_CHANNEL):
                raise fail("cloudtrain uses a channel of this name itself", at=("data", name), hint="rename it")
            if not _CHANNEL.fullmatch(name):
                raise fail("expected at most 64 letters, digits, . _ or -", at=("data", name))
            if channel.is_s3 and not _S3_URI.fullmatch(channel.uri):
                raise fail(_S3_EXPECTED, at=("data", name, "uri"))
        return self

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        """Return a problem of a field, found after validation, with the place where the field was written."""
        if self._document is None:
            return Problem(f"{type(self).__name__}(...)", None, None, path, message, hint)
        place = self._document.place_of(tuple(path.split(".")))
        return Problem(place.file, place.line, place.column, path, message, hint)

    @property
    def base(self) -> Path:
        """Folder that relative paths start from: the job file's, or the working folder."""
        return self._base

    @property
    def code_directory(self) -> Path:
        """Absolute path of the folder that travels."""
        return Path(os.path.normpath(self._base / self.code.directory))

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Iterable[str] = (), *, instances: int | None = None) -> JobSpec:
        """Read and validate a job file.

        Args:
            path: The job file.
            overrides: `path=value` as the `--set` option takes them.
            instances: Replaces `cluster.instances`.

        Raises:
            UserError: the file cannot be read.
            SpecError: the job does not validate; every problem has its line and column.
        """
        document = read_document(Path(path))
        apply_overrides(document, overrides)
        if instances is not None:
            document.override(("cluster", "instances"), instances, f"--instances {instances}")
        try:
            spec = cls.model_validate(document.data)
        except ValidationError as error:
            raise SpecError(explain(cls, error, lambda at, key: document.place_of(at, key=key))) from None
        spec._base = Path(path).resolve().parent  # noqa: SLF001 (its own class)
        spec._document = document  # noqa: SLF001
        missing = _missing_files(spec, document)
        if missing:
            raise SpecError(missing)
        return spec


def apply_overrides(document: Document, overrides: Iterable[str]) -> None:
    """Apply `--set path=value` texts to a document.

    Raises:
        UserError: a text is not `path=value`.
    """
    for text in overrides:
        name, equals, value = text.partition("=")
        path: FieldPath = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise UserError(f"--set {text}: expected path=value", "for example --set cluster.spot=true")
        document.override(path, parse_scalar(value), f"--set {text}")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file system takes
        return False


def _missing_files(spec: JobSpec, document: Document) -> list[Problem]:
    """Return problems of what the job names and this machine does not have: folders, files, the Task's class."""
    wanted: list[tuple[FieldPath, Path, str]] = []
    problems: list[Problem] = []
    if _is_there(spec.code_directory) and not spec.code_directory.is_dir():
        problems.append(spec.problem("code.directory", f"expected a folder, and {spec.code_directory} is a file"))
    elif not _is_there(spec.code_directory):
        wanted.append((("code", "directory"), spec.code_directory, "folder"))
    else:
        if spec.code.script is not None:
            wanted.append((("code", "script"), spec.code_directory / spec.code.script, "file"))
        if spec.code.requirements is not None:
            wanted.append((("code", "requirements"), spec.code_directory / spec.code.requirements, "file"))
        if spec.code.task is not None:
            module, _, class_name = spec.code.task.partition(":")
            found = find_module(spec.code_directory, module)
            if found is None:
                expected = spec.code_directory / (module.replace(".", "/") + ".py")
                wanted.append((("code", "task"), expected, "file"))
            elif isinstance(spec.code.args, dict):
                problems += [
                    spec.problem(".".join(at), *told) for at, *told in check_task(found, class_name, spec.code.args)
                ]
    wanted += [
        (("data", name, "uri") if ("data", name, "uri") in document.values else ("data", name), path, "file or folder")
        for name, channel in spec.data.items()
        if not channel.is_s3 and not _is_there(path := spec.base / channel.uri)
    ]
    for at, path, kind in wanted:
        if _is_there(path):
            continue
        place = document.place_of(at)
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if _is_there(path.parent) else None
        hint = f'did you mean "{near}"?' if near else ""
        problems.append(Problem(place.file, place.line, place.column, dotted(at), f"no such {kind}: {path}", hint))
    return problems
