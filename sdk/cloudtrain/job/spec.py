"""`JobSpec`: what the user wrote in job.yaml, validated and frozen.

The docstring below a field is its one description: unit, range and default stand there.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    PrivateAttr,
    Tag,
    ValidationError,
    field_serializer,
)

from cloudtrain.errors import Problem, SpecError, UserError
from cloudtrain.job.arguments import check_script_arguments, to_document
from cloudtrain.job.document import (
    Document,
    Place,
    parse_scalar,
    read_document,
)
from cloudtrain.job.fields import (
    Dollars,
    Duration,
    Every,
    GigaBytes,
    MegaBytes,
    Real,
    Section,
    Text,
    Whole,
    broken_rules,
    matching,
    s3_problem,
    switch,
)
from cloudtrain.job.problems import (
    COLLECTING,
    Finding,
    fail,
    findings_of,
    place_finding,
)
from cloudtrain.job.references import References
from cloudtrain.support.field_path import FieldPath
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.units import Cadence, format_duration
from cloudtrain_runtime.contract import CODE_CHANNEL, CONFIG_CHANNEL, SecretConfig
from cloudtrain_runtime.contract.strict_json import dump_json

NAME_CHARACTERS = 42
"""Longest `name`: SageMaker allows 63 characters and the run id adds `-yymmdd-hhmmss-xxxxxx`."""
LONGEST_RUNTIME_SECONDS = 28 * 86400
"""Source: AWS's reference of StoppingCondition, "maximum 28 days"; botocore's model does not hold it."""
OWN_TAGS = "cloudtrain:"
"""How the keys of the tags begin that cloudtrain sets itself."""

JOB_TAG = f"{OWN_TAGS}job"
REQUEST_TAG = f"{OWN_TAGS}request"
"""Holds the identity of a plan: what two submits of the same request and code have in common."""
"""Tag by which cloudtrain finds a job's runs."""
RESERVED_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CLOUDTRAIN_ML_ROOT", "CLOUDTRAIN_GPUS", "CLOUDTRAIN_HOSTS_HERE", "CLOUDTRAIN_HOST_ADDRESSES"),
    *("CLOUDTRAIN_RENDEZVOUS_PORT", "TRAINING_JOB_NAME"),
)
"""Variables by which ranks find each other and their folders: the launcher sets them, and all that begin with SM_."""
_OF_THE_SHELL = ("BASH_ENV", "SHELLOPTS", "PS4")
"""Bash, which starts the container, runs commands that stand in them (bash(1), "Invocation")."""

_NAME = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,511}")
"""Source: botocore's model of TrainingEnvironmentKey."""
# Source: API reference of CreateSecret, 2026-11; an ARN ends with six characters that AWS adds.
_SECRET = re.compile(r"(?:arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:)?[A-Za-z0-9/_+=.@-]{1,512}")
_TASK_FORM = matching(
    re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"),
    "module:Class, such as gpt:GPT",
    "for gpt.py and its class GPT write gpt:GPT",
)
_INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+")
_MLFLOW_FORM = matching(
    re.compile(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:mlflow-[a-zA-Z-]*/.+|https?://[^\s]+"),
    "the ARN of a SageMaker MLflow resource, or https://host",
    "see it by: aws sagemaker list-mlflow-tracking-servers",
)
# Names and shares: API reference of CreateJobQueue and ShareAttributes, 2026-11; botocore's model has plain text there.
_QUEUE = re.compile(r"(?:arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_STAND_IN_TYPE = "ml.p4d.24xlarge"
"""Takes part where a job names no type, or a wrong one: everything that cloudtrain does works on it."""
_ROUNDS = 20
"""How often a job with wrong values is read again, to find what the wrong ones hid."""


def _instance_type(value: object) -> object:
    if isinstance(value, str) and not _INSTANCE_TYPE.fullmatch(value):
        bare = re.fullmatch(r"[a-z0-9-]+\.[a-z0-9]+", value)
        hint = f'did you mean "ml.{value}"?' if bare else "for example ml.p4d.24xlarge"
        raise fail(f'expected a SageMaker instance type such as ml.p4d.24xlarge, got "{value}"', hint=hint)
    return value


InstanceType = Annotated[str, BeforeValidator(_instance_type)]


class Secret(Section):
    """Environment variable whose value lies in AWS Secrets Manager and is read when the run starts, by its role."""

    secret: str = Field(examples=["team/wandb"])
    """Name or ARN of a secret, in the job's region unless the ARN says another."""
    key: str | None = Field(None, examples=["api_key"])
    """Key of a secret that is a JSON object; default: the whole text."""
    stage: str | None = Field(None, examples=["AWSPREVIOUS"])
    """Staging label of the version to take; default: the current one."""

    def _rules(self) -> Iterator[Finding]:
        if not _SECRET.fullmatch(self.secret):
            hint = "see them by: aws secretsmanager list-secrets"
            yield Finding(f'expected the name or ARN of a secret, got "{self.secret}"', ("secret",), hint)
        for name in ("key", "stage"):
            if getattr(self, name) == "":
                yield Finding("expected a name, got nothing", (name,), "leave it out")


def _is_secret(value: object) -> str:
    return "Secret" if isinstance(value, Mapping | Secret) else "text"


Variable = Annotated[Annotated[Secret, Tag("Secret")] | Annotated[Text, Tag("text")], Discriminator(_is_secret)]


class Code(Section):
    """What travels and what is started."""

    directory: str = "."
    """Folder that travels, relative to the job file; .gitignore and .cloudtrainignore are honoured."""
    task: Annotated[str, _TASK_FORM] | None = Field(None, examples=["gpt:GPT"])
    """A Task for the shared entrypoint, as module:Class below the directory (exactly one of task and script)."""
    script: str | None = Field(None, examples=["train.py"])
    """A Python script that torchrun can start, unchanged, relative to the directory."""
    args: dict[str, Any] | tuple[Any, ...] = Field(default_factory=dict, examples=[{"layers": 4}])
    """Keyword arguments of the Task, or argv of the script (a list, or a mapping: --key value, true a bare --key)."""
    requirements: str | None = Field(None, examples=["requirements.txt"])
    """Requirements file below the directory, installed in the container before the start."""
    env: dict[str, Variable] = Field(default_factory=dict, examples=[{"OMP_NUM_THREADS": "8"}])
    """Environment variables of every process of the run; a key or token is named by {secret: name}, not written."""
    outputs: tuple[str, ...] = Field((), examples=[["out/", "snapshot.pt"]])
    """Files, and folders that end with `/`, that a script writes below the directory; kept with its checkpoints."""

    def _rules(self) -> Iterator[Finding]:
        if (self.task is None) == (self.script is None):
            both = (("task",), ("script",))
            yield Finding("give exactly one of task and script", (), "task: module:Class, or script: train.py", both)
        if self.task is not None and not isinstance(self.args, dict):
            yield Finding("a Task takes keyword arguments: write a mapping", ("args",), "args: {layers: 4}")
        for name in ("script", "requirements"):
            path = getattr(self, name)
            if path is not None and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
                hint = "give it relative to code.directory; only what lies there travels"
                yield Finding(f'expected a path below the directory, got "{path}"', (name,), hint)
        for name in self.env:
            if name in RESERVED_VARIABLES or name.startswith("SM_"):
                message = "the launcher sets this variable for each rank"
                yield Finding(message, ("env", name), "remove it", is_key=True)
            if name in _OF_THE_SHELL:
                message = "the shell that starts the container acts on it"
                yield Finding(message, ("env", name), "set it in the script, for what needs it", is_key=True)
        for name in self.secrets:
            if not _VARIABLE.fullmatch(name):
                message = "expected the name of a variable: letters, digits and underscores"
                yield Finding(message, ("env", name), "rename it", is_key=True)
        yield from self._argument_rules()
        yield from self._output_rules()

    def _output_rules(self) -> Iterator[Finding]:
        if self.outputs and self.script is None:
            message = "the runtime keeps a Task's model and checkpoints; outputs are a script's"
            yield Finding(message, ("outputs",), "have the Task write to context().output_dir", is_key=True)
        for index, name in enumerate(self.outputs):
            path = PurePosixPath(name)
            others = [PurePosixPath(other) for other in self.outputs[:index]]
            if path.is_absolute() or ".." in path.parts or not path.parts:
                message = f'expected a path below the directory, got "{name}"'
                yield Finding(message, ("outputs", index), "for example out/ for a folder, snapshot.pt for a file")
            elif re.search(r"[*?\[]", name):
                message = f'patterns are not supported, got "{name}"'
                yield Finding(message, ("outputs", index), "name the folder (out/) or each file")
            elif any(path.is_relative_to(other) or other.is_relative_to(path) for other in others):
                yield Finding(f'"{name}" overlaps another output', ("outputs", index), "remove one of the two")

    @field_serializer("args", when_used="json")
    def _spelled_args(self, args: dict[str, Any] | tuple[Any, ...]) -> Any:
        return args if self.script is None else to_document(args)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that stand in the job file."""
        return {name: value for name, value in self.env.items() if isinstance(value, str)}

    @property
    def secrets(self) -> dict[str, SecretConfig]:
        """Those whose values lie elsewhere."""
        return {
            name: SecretConfig(value.secret, value.key, value.stage)
            for name, value in self.env.items()
            if isinstance(value, Secret)
        }

    def _argument_rules(self) -> Iterator[Finding]:
        """Check that arguments reach the other side as they were meant: argv is text, a Task's are JSON."""
        if self.script is not None:
            yield from check_script_arguments(self.args)
            return
        try:
            dump_json(self.args)
        except (TypeError, ValueError) as error:
            yield Finding(f"arguments travel as JSON: {error}", ("args",), "use text, numbers, lists and mappings")


class Network(Section):
    """Where the instances sit. Subnets and groups left empty come from the settings."""

    subnets: tuple[str, ...] = Field((), examples=[["subnet-0123456789abcdef0"]])
    """Subnet ids for the instances; empty takes the settings' subnets."""
    security_groups: tuple[str, ...] = Field((), examples=[["sg-0123456789abcdef0"]])
    """Security group ids; for EFA the group must allow all traffic to itself."""
    isolation: bool = False
    """Cut the containers off from every network but each other (no S3 from the job's code)."""
    encrypt_traffic: bool = False
    """Encrypt traffic between instances; slows collectives."""

    def _rules(self) -> Iterator[Finding]:
        if bool(self.subnets) != bool(self.security_groups):
            missing = "security_groups" if self.subnets else "subnets"
            both = (("subnets",), ("security_groups",))
            yield Finding("subnets and security_groups go together", (), f"give {missing}, too", both)


class Spot(Section):
    """Managed spot training."""

    max_wait: Duration | None = None
    """Longest time from submit to end, waiting included; default: twice limits.runtime."""


def _spot(value: object) -> object:
    value = switch(value)
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, str | int | float):
        shown = getattr(value, "text", value)
        raise fail(
            f'expected true, false or a mapping with max_wait, got "{shown}"', hint="write spot: {max_wait: 36h}"
        )
    return value


class Queue(Section):
    """AWS Batch job queue that the job waits in; a name alone is short for {name: ...}."""

    name: str = Field(examples=["ml-training"])
    """Name or ARN of a job queue of type SAGEMAKER_TRAINING, in the job's region."""
    priority: Annotated[Whole, Field(ge=0, le=9999)] | None = Field(None, examples=[100])
    """Jobs of a higher priority go first among those of one share, 0 to 9999; not in a first-in-first-out queue."""
    share: str | None = Field(None, examples=["research"])
    """Fair-share identifier: needed by a queue with a fair-share policy, refused by one without."""

    def _rules(self) -> Iterator[Finding]:
        if not _QUEUE.fullmatch(self.name):
            hint = "see them by: aws batch describe-job-queues"
            yield Finding(f'expected the name or ARN of a job queue, got "{self.name}"', ("name",), hint)
        if self.share is not None and not _SHARE.fullmatch(self.share):
            message = f'expected 1 to 255 letters and digits, got "{self.share}"'
            yield Finding(message, ("share",), "see: aws batch describe-scheduling-policies")


def _queue(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Distribution = Literal["auto", "torch_distributed", "pytorchddp", "smdistributed"]


def _wrong_digest(image: str) -> str | None:
    """Return what is wrong with the digest in an image's uri, or None where there is none or nothing."""
    _, has_digest, digest = image.partition("@")
    if not has_digest or _DIGEST.fullmatch(digest):
        return None
    algorithm, _, digits = digest.partition(":")
    if algorithm != "sha256":
        return f'the digest must begin with "sha256:", got "{digest}"'
    if re.fullmatch("[0-9a-f]*", digits):
        return f"a sha256 digest has 64 hexadecimal digits, got {len(digits)}"
    return f'a sha256 digest has 64 digits of 0-9 and a-f, got "{digits}"'


class Cluster(Section):
    """What the job runs on."""

    instance_type: InstanceType | None = Field(None, examples=["ml.p4d.24xlarge"])
    """SageMaker instance type, such as ml.p4d.24xlarge (exactly one of instance_type and prefer)."""
    prefer: tuple[InstanceType, ...] = Field((), examples=[["ml.p4d.24xlarge", "ml.p4de.24xlarge"]])
    """Instance types in order of preference, at most 5; the first with capacity is used (not with spot)."""
    instances: Whole = Field(default=1, ge=1, examples=[2])
    """Number of instances."""
    distribution: Distribution = "auto"
    """How ranks are started and joined; auto takes torch_distributed, the others need AWS's SMDDP."""
    processes_per_instance: Annotated[Whole, Field(ge=1)] | Literal["auto"] = "auto"
    """Ranks per instance; auto is one per GPU, or 2 on a machine without GPUs."""
    spot: Annotated[Spot | None, BeforeValidator(_spot)] = None
    """true, false or {max_wait: 36h}: spare capacity at a discount, with interruptions."""
    framework: Text | None = Field(None, examples=["2.13"])
    """PyTorch version of the AWS container, such as "2.13"; default: the newest that the distribution works with."""
    image: str | None = Field(None, examples=["123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1"])
    """Container image uri instead of framework; `@sha256:...` at its end pins what is pulled."""
    volume: Annotated[GigaBytes, Field(ge=1)] = 30
    """Storage volume of each instance (ignored by AWS on types with local NVMe)."""
    keep_alive: Duration | None = None
    """Keep the cluster warm, and paid for, for the next job for this long after the end, at most 6h."""
    max_pending: Duration | None = None
    """Give up when there is no capacity for this long: 30m to 28d."""
    queue: Annotated[Queue | None, BeforeValidator(_queue)] = None
    """AWS Batch job queue to wait in: a name or ARN, or {name, priority, share}; default: no queue."""
    network: Network = Field(default_factory=Network.model_construct)
    """Subnets, security groups, isolation and traffic encryption."""

    def _rules(self) -> Iterator[Finding]:
        types = (("instance_type",), ("prefer",))
        if (self.instance_type is None) == (not self.prefer):
            yield Finding("give exactly one of instance_type and prefer", (), "instance_type: ml.p4d.24xlarge", types)
        if len(set(self.prefer)) < len(self.prefer):
            yield Finding("a type is given twice", ("prefer",), "name each type once")
        if self.spot is not None and self.prefer:
            about = (("prefer",), ("spot",))
            yield Finding("SageMaker takes no instance preferences with spot", ("prefer",), "use instance_type", about)
        if self.spot is not None and self.keep_alive:
            about = (("keep_alive",), ("spot",))
            yield Finding("SageMaker keeps no spot cluster warm", ("keep_alive",), "remove keep_alive or spot", about)
        if self.image is not None and self.framework is not None:
            about = (("framework",), ("image",))
            yield Finding("give framework or image, not both", ("framework",), "remove one of them", about)
        if self.image is not None and (wrong := _wrong_digest(self.image)) is not None:
            yield Finding(wrong, ("image",), "write it as docker push shows it: repository@sha256:0123...")

    @property
    def first_choice(self) -> str:
        """The instance type, or the first of the preferences."""
        return self.types[0]

    @property
    def types(self) -> tuple[str, ...]:
        """Every instance type that may be chosen, the preferred first."""
        return (self.instance_type,) if self.instance_type is not None else self.prefer


class Channel(Section):
    """One input channel."""

    uri: str = Field(examples=["s3://bucket/prefix"])
    """s3://bucket/prefix, or a local path relative to the job file."""
    mode: Literal["File", "FastFile", "Pipe"] = "File"
    """File downloads before the start; FastFile streams on read; Pipe is a FIFO."""
    sharded: bool = False
    """Give each instance its own share of the objects instead of a full copy."""

    def _rules(self) -> Iterator[Finding]:
        problem = s3_problem(self.uri)
        if not self.uri.strip():
            problem = "expected s3://bucket/prefix or a path, got nothing"
        elif self.uri.startswith("file:"):
            problem = f'expected a path, got the uri "{self.uri}"'
        elif self.uri.startswith(("arn:aws:s3", "s3:", "s3/")) and not self.uri.startswith("s3://"):
            problem = f'expected s3://bucket/prefix, got "{self.uri}"'
        if problem:
            yield Finding(problem, ("uri",), "for example s3://my-bucket/train, or a path on this machine")

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
    patience: Whole = Field(default=5, ge=1)
    """Evaluations without improvement before the run ends."""
    min_delta: Real = Field(default=0.0, ge=0.0)
    """Smallest change that counts as improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""

    def _rules(self) -> Iterator[Finding]:
        split, slash, name = self.metric.partition("/")
        if split != "validation" or not slash or not name:
            meant = f"validation/{name or split}"
            message = f'expected a metric of the validation split, as validation/name, got "{self.metric}"'
            yield Finding(message, ("metric",), f'did you mean "{meant}"?')


class Evaluate(Section):
    """When the validation split is evaluated."""

    every: Every = Field(examples=["200 steps"])
    """Optimizer steps between evaluations, such as 200 steps; default: after each epoch."""

    def _rules(self) -> Iterator[Finding]:
        if self.every.steps is None:
            yield Finding("expected a number of steps such as 200 steps", ("every",), "every rank must count alike")


class Parallel(Section):
    """How the model is spread over the ranks."""

    data: Literal["ddp", "fsdp"] = "ddp"
    """Replicate the model on every rank (ddp) or shard it (fsdp)."""
    tensor: Whole = Field(default=1, ge=1)
    """Tensor-parallel degree."""
    pipeline: Whole = Field(default=1, ge=1)
    """Ranks that hold the model's layers one after the other; accumulate is the number of micro-batches under way."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the pipeline's micro-batches (with pipeline only)."""
    shard: Annotated[Whole, Field(ge=1)] | None = Field(None, examples=[8])
    """Data ranks that hold one copy of the model together, such as those of one instance (with fsdp; default: all)."""
    reshard: bool = True
    """Gather parameters again for the backward pass: less memory, more traffic (with fsdp)."""
    static_graph: bool = False
    """Tell DDP that each step uses the same parameters in the same order (with ddp, without tensor)."""
    compress: Literal["none", "bf16"] = "none"
    """Send gradients as bf16, which halves the traffic (with ddp, without tensor)."""
    bucket: Annotated[MegaBytes, Field(ge=1)] | None = Field(None, examples=["25MB"])
    """Gradients that are sent at once (with ddp, without tensor; default: PyTorch's own choice)."""

    def _rules(self) -> Iterator[Finding]:
        for name in self.model_fields_set - {"data", "tensor", "pipeline", "schedule"}:
            wants = "fsdp" if name in ("shard", "reshard") else "ddp"
            if self.data != wants:
                yield Finding(f"it counts with data: {wants} only", (name,), f"remove it, or use data: {wants}")
            elif wants == "ddp" and self.tensor > 1:
                message = "it is DDP's, which cannot hold layers that tensor splits"
                yield Finding(message, (name,), "remove it, or tensor")
        if "schedule" in self.model_fields_set and self.pipeline == 1:
            yield Finding("it counts with a pipeline only", ("schedule",), "remove it, or use pipeline: 2 or more")

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.data == "ddp" and self.tensor == self.pipeline == 1

    @property
    def methods(self) -> Mapping[str, tuple[str, ...]]:
        """Methods that a Task must have for this, with the field that needs it."""
        needed = (("parallelize", "tensor"), ("pipeline", "pipeline"))
        return {method: ("train", "parallel", field) for method, field in needed if getattr(self, field) > 1}


class Profile(Section):
    """Which steps torch.profiler records."""

    at: Whole = Field(ge=1, examples=[100])
    """First step to record."""
    steps: Whole = Field(default=5, ge=1)
    """Number of steps to record."""


class Tracking(Section):
    """Where metrics go besides the event lines."""

    tensorboard: bool = False
    """Write a Task's curves for TensorBoard, and copy /opt/ml/output/tensorboard to S3 while the job runs."""
    mlflow: Annotated[str, _MLFLOW_FORM] | None = None
    """ARN of a SageMaker MLflow tracking server or app, or the uri of a tracking server."""


class Train(Section):
    """How the shared entrypoint trains a Task."""

    epochs: Annotated[Whole, Field(ge=1)] | None = Field(None, examples=[3])
    """Passes over the training data (exactly one of epochs and steps)."""
    steps: Annotated[Whole, Field(ge=1)] | None = Field(None, examples=[1000])
    """Optimizer steps."""
    batch_size: Whole = Field(default=32, ge=1)
    """Samples per rank and micro-step."""
    accumulate: Whole = Field(default=1, ge=1)
    """Micro-steps per optimizer step; gradients are synchronised in the last one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute precision; bf16 and fp16 use autocast, fp16 a gradient scaler."""
    parallel: Parallel = Field(default_factory=Parallel.model_construct)
    """Data, tensor and pipeline parallelism."""
    compile: bool = False
    """Compile the model with torch.compile."""
    clip_grad_norm: Annotated[Real, Field(gt=0)] | None = None
    """Upper bound of the global gradient norm."""
    learning_rate: Real = Field(default=1e-3, gt=0)
    """Learning rate of the default optimizer, AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to zero after the warm-up, where the Task has no schedule of its own."""
    warmup: Every | None = Field(None, examples=["100 steps"])
    """Optimizer steps in which the learning rate rises from zero, where the Task has no schedule of its own."""
    activation_checkpointing: bool = False
    """Compute the activations of each block again in the backward pass: less memory, a third more time."""
    deterministic: bool = False
    """Use only algorithms that give the same bits each time; one that has none such ends the run."""
    skip_nonfinite: Annotated[Whole, Field(ge=0)] | None = Field(None, examples=[3])
    """Leave out steps whose gradient is not finite, at most so many in a row, then end the run and keep the batch."""
    export: Literal["last", "best"] = "last"
    """Weights that the model folder gets: the last, or the best by the metric of early stopping."""
    export_nonfinite: bool = False
    """Export the model, and succeed, though the last losses or the weights are not finite; by default the run fails."""
    workers: Annotated[Whole, Field(ge=0)] | None = Field(None, examples=[4])
    """Processes per rank that load data; default: up to 8 beside a GPU, none on a CPU."""
    seed: Whole = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of initial weights, sample order and dropout."""
    evaluate: Evaluate | None = None
    """When the validation split is evaluated; default: after each epoch."""
    early_stopping: EarlyStopping | None = None
    """Stop when a validation metric stops improving."""
    profile: Profile | None = None
    """Which steps torch.profiler records."""

    def _rules(self) -> Iterator[Finding]:
        if (self.epochs is None) == (self.steps is None):
            both = (("epochs",), ("steps",))
            yield Finding("give exactly one of epochs and steps", (), "for example epochs: 3", both)
        if self.warmup is not None and self.warmup.steps is None:
            yield Finding("expected a number of steps such as 100 steps", ("warmup",), "the schedule counts steps")
        if self.steps is not None and self.warmup is not None and (self.warmup.steps or 0) >= self.steps:
            about = (("warmup",), ("steps",))
            message = f"the run ends after step {self.steps}, in the middle of the warm-up"
            yield Finding(message, ("warmup",), f"use at most {self.steps - 1} steps", about)
        if self.profile is not None and self.steps is not None:
            latest = self.steps - self.profile.steps + 1
            if self.profile.at > latest:
                about = (("profile",), ("steps",))
                message = f"the run ends after step {self.steps}"
                yield Finding(message, ("profile", "at"), f"use at most {max(latest, 1)}", about)


class Checkpoint(Section):
    """Where and how often the run is saved."""

    uri: str | None = Field(None, examples=["s3://bucket/prefix"])
    """s3://bucket/prefix, or a local folder for local runs; default: a folder of the run's own."""
    every: Every = Cadence(seconds=600)
    """A duration such as 10m or a count such as 500 steps."""
    keep: Whole = Field(default=3, ge=1)
    """Complete checkpoints to keep."""
    size: Annotated[GigaBytes, Field(ge=1)] | None = Field(None, examples=["48GB"])
    """Expected size of one checkpoint; with it the plan tells when the last one will not fit into a stop notice."""
    resume: str = Field("auto", examples=["auto"])
    """auto (newest under uri), never, a run id, or the uri or absolute path of another run's checkpoints."""

    def _rules(self) -> Iterator[Finding]:
        for name in ("uri", "resume"):
            problem = s3_problem(getattr(self, name) or "")
            if getattr(self, name) is not None and not getattr(self, name).strip():
                problem = "expected s3://bucket/prefix, got nothing"
            if problem:
                yield Finding(problem, (name,), "for example s3://my-bucket/checkpoints")
        is_place = "/" in self.resume or is_run_id(self.resume.rpartition(":")[2])
        if self.resume not in ("auto", "never") and not is_place:
            hint = "use auto, never, a run id, s3://bucket/prefix or an absolute path"
            yield Finding(f'expected where to resume from, got "{self.resume}"', ("resume",), hint)
        elif is_place and ":/" not in self.resume and "/" in self.resume and not self.resume.startswith("/"):
            yield Finding(f'expected an absolute path, got "{self.resume}"', ("resume",), f"write /.../{self.resume}")


def _runtime(seconds: int) -> int:
    if not 60 <= seconds <= LONGEST_RUNTIME_SECONDS:  # noqa: PLR2004 (a minute)
        raise fail(f"expected 1m to 28d, got {format_duration(seconds)}", hint="use 1m to 28d")
    return seconds


LEAST_HANG_SECONDS = 10
"""Shorter than that, a busy disk looks like a hang."""


def _hang(value: int) -> int:
    if not LEAST_HANG_SECONDS <= value <= LONGEST_RUNTIME_SECONDS:
        message = f"expected {LEAST_HANG_SECONDS}s to 28d, got {format_duration(value)}"
        raise fail(message, hint="use 10s to 28d, or off to let a run hang")
    return value


def _off(value: object) -> object:
    return None if switch(value) is False else value


Hang = Annotated[
    Annotated[Duration, AfterValidator(_hang)] | None,
    BeforeValidator(_off),
    # Written as a word: in a job file null stands for a field that is not given.
    PlainSerializer(lambda value: "off" if value is None else f"{value}s", return_type=str, when_used="json"),
]


class Limits(Section):
    """What the run may cost at most."""

    runtime: Annotated[Duration, AfterValidator(_runtime)] = 86400
    """Longest training time, 1m to 28d; the run is stopped after it."""
    cost: Annotated[Dollars, Field(gt=0)] | None = None
    """Limit of the estimated cost: shortens the default runtime, and refuses a runtime or max_wait that costs more."""
    retries: Whole = Field(default=0, ge=0, examples=[3])
    """How often workers that fail are started again from the last checkpoint, at most 30."""
    hang: Hang = 600
    """End a run that has no step for so long beyond its slowest one so far, 10s to 28d; off never ends it."""


def _name_fits(value: object) -> object:
    if isinstance(value, str):
        if not _NAME.fullmatch(value):
            legal = re.sub(r"[^a-zA-Z0-9]+", "-", value).strip("-")[:NAME_CHARACTERS].strip("-")
            raise fail(
                "expected letters, digits and single hyphens between them",
                hint=f'did you mean "{legal}"?' if legal else "for example gpt-stdlib",
            )
        if len(value) > NAME_CHARACTERS:
            raise fail(f"{len(value)} characters; at most {NAME_CHARACTERS}", hint="the run id adds date and suffix")
    return value


class JobSpec(Section):
    """One training job, as job.yaml describes it.

    Raises:
        SpecError: a field is unknown, missing or wrong; every problem is listed.
    """

    name: Annotated[Text, BeforeValidator(_name_fits)] = Field(examples=["gpt-stdlib"])
    """Start of every run id; at most 42 letters, digits and hyphens."""
    code: Code = Field(examples=[{"script": "train.py"}])
    """What travels and what is started."""
    cluster: Cluster = Field(examples=[{"instance_type": "ml.p4d.24xlarge"}])
    """What the job runs on."""
    data: dict[str, Annotated[Channel, BeforeValidator(_channel)]] = Field(default_factory=dict)
    """Input channels by name."""
    train: Train | None = None
    """How the shared entrypoint trains a Task (with code.task only)."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint.model_construct)
    """Where and how often the run is saved."""
    limits: Limits = Field(default_factory=Limits.model_construct)
    """What the run may cost at most."""
    tracking: Tracking = Field(default_factory=Tracking.model_construct)
    """Where metrics go besides the event lines."""
    tags: dict[str, Text] = Field(default_factory=dict)
    """AWS tags of the job."""

    _base: Path = PrivateAttr(default_factory=Path.cwd)
    _document: Document | None = PrivateAttr(default=None)

    def _rules(self) -> Iterator[Finding]:
        train = ("train",)
        entries = (("code", "task"), ("code", "script"))
        if self.code.task is not None and self.train is None:
            yield Finding("a Task needs this section", train, "train: {epochs: 1}", (*entries, train))
        if self.code.script is not None and self.code.task is None and self.train is not None:
            message = "only a Task is trained by these; a script has its own loop"
            yield Finding(message, train, "pass them to the script by code.args", entries)
        for key in self.tags:
            is_own = key.lower().startswith(OWN_TAGS)
            if is_own or key.lower().startswith("aws:"):
                whose = "cloudtrain sets this tag itself" if is_own else "AWS keeps tags with aws: for itself"
                yield Finding(whose, ("tags", key), "rename it", is_key=True)
        if self.cluster.network.isolation and self.code.requirements is not None:
            about = (("cluster", "network"), ("code", "requirements"))
            hint = "bring the packages in an image of your own (cluster.image), or set isolation: false"
            yield Finding("an isolated container cannot download packages", ("code", "requirements"), hint, about)
        for name in self.code.secrets if self.cluster.network.isolation else ():
            about = (("cluster", "network"), ("code", "env"))
            message = "an isolated container has no way to Secrets Manager, and no credentials"
            yield Finding(message, ("code", "env", name), "set cluster.network.isolation: false", about)
        yield from self._spot_rules()
        yield from self._channel_rules()

    def _spot_rules(self) -> Iterator[Finding]:
        wait = self.cluster.spot.max_wait if self.cluster.spot else None
        # A runtime that nobody asked for gives way.
        if wait is not None and wait < self.limits.runtime and "runtime" in self.limits.model_fields_set:
            message = f"shorter than limits.runtime, {format_duration(self.limits.runtime)}"
            hint = f"it counts waiting and training together: use {format_duration(2 * self.limits.runtime)}"
            about = (("cluster", "spot"), ("limits", "runtime"))
            yield Finding(message, ("cluster", "spot", "max_wait"), hint, about)

    def _channel_rules(self) -> Iterator[Finding]:
        places = {name: channel.uri.rstrip("/") for name, channel in self.data.items() if channel.is_s3}
        saved = (self.checkpoint.uri or "").rstrip("/")
        for name, uri in places.items():
            if saved.startswith("s3://") and f"{saved}/".startswith(f"{uri}/"):
                about = (("checkpoint", "uri"), ("data", name))
                message = f"checkpoints would lie in the data of channel {name}"
                yield Finding(message, ("checkpoint", "uri"), "give them a place of their own", about)
        for name in self.data:
            if name in (".", ".."):
                message = "a channel is a folder, and this is no name of one"
                yield Finding(message, ("data", name), "rename it", is_key=True)
            if name in (CODE_CHANNEL, CONFIG_CHANNEL):
                message = "cloudtrain uses a channel of this name itself"
                yield Finding(message, ("data", name), "rename it", is_key=True)
            twins = [other for other in self.data if other != name and other.lower() == name.lower()]
            if twins and name > twins[0]:
                message = f"differs from {twins[0]} by case only, and both would be SM_CHANNEL_{name.upper()}"
                yield Finding(message, ("data", name), "rename one of them", is_key=True)

    def problem(self, path: str, message: str, hint: str = "") -> Problem:
        """Return a problem of a field, found after validation, with the place where the field was written."""
        return self.problem_of(Finding(message, tuple(path.split(".")), hint))

    def problem_of(self, finding: Finding) -> Problem:
        """Return the problem that a finding is, with the place where its value was written."""
        document = self._document
        if document is None:
            return place_finding(finding, lambda _at, _key: Place(f"{type(self).__name__}(...)"))
        # `train: s3://...` is short for `train: {uri: s3://...}`: the field that was written is named.
        is_short = (
            (finding.at[-1:] == ("uri",) or finding.at[-2:] == ("queue", "name"))
            and finding.at not in document.values
            and finding.at[:-1] in document.values
        )
        finding = replace(finding, at=finding.at[:-1]) if is_short else finding
        return place_finding(finding, lambda at, key: document.place_of(at, key=key))

    def to_document(self) -> dict[str, Any]:
        """Return the job as a job file holds it: what was given, values with their units."""
        document: dict[str, Any] = self.model_dump(mode="json", exclude_unset=True)
        return document

    @property
    def base(self) -> Path:
        """Folder that relative paths start from: the job file's, or the working folder."""
        return self._base

    @property
    def code_directory(self) -> Path:
        """Absolute path of the folder that travels."""
        return Path(os.path.normpath(self._base / self.code.directory))

    @property
    def references(self) -> References:
        """What the job names on this machine."""
        return References(
            directory=self.code_directory,
            base=self._base,
            task=self.code.task,
            script=self.code.script,
            requirements=self.code.requirements,
            args=self.code.args,
            data={name: channel.uri for name, channel in self.data.items()},
            sharded=frozenset(name for name, channel in self.data.items() if channel.sharded),
            instances=self.cluster.instances,
            methods=self.train.parallel.methods if self.train is not None else {},
        )

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
        reading = read_job(path, overrides, instances=instances)
        if reading.spec is None or reading.problems:
            raise SpecError(reading.problems)
        return reading.spec


@dataclass(frozen=True)
class Reading:
    """A job file as far as it could be read.

    Attributes:
        spec: The job, with legal values in the places of wrong ones, or None when there is too little.
        problems: Everything that is wrong with it.
        wrong: Paths of the values that were replaced: what is said about these says nothing.
    """

    spec: JobSpec | None
    problems: tuple[Problem, ...]
    wrong: frozenset[FieldPath]

    def is_about_wrong(self, path: str) -> bool:
        """Return whether a field is one that was replaced, lies in one, or holds one."""
        return Finding("", tuple(path.split("."))).concerns(self.wrong)


def read_job(path: str | Path, overrides: Iterable[str] = (), *, instances: int | None = None) -> Reading:
    """Read a job file and find everything that is wrong with it.

    Raises:
        UserError: the file cannot be read, or an override is malformed.
        SpecError: the file is not YAML.
    """
    document = read_document(Path(path))
    apply_overrides(document, overrides, instances=instances)
    spec, problems, wrong = _validate(document)
    problems = [*document.problems, *problems]
    if spec is not None:
        spec._base = Path(path).resolve().parent  # noqa: SLF001 (its own module)
        spec._document = document  # noqa: SLF001
        findings = [*broken_rules(spec), *spec.references.check()]
        problems += [spec.problem_of(finding) for finding in findings if not finding.concerns(wrong)]
        if not spec.cluster.types:
            cluster = spec.cluster.model_copy(update={"instance_type": _STAND_IN_TYPE})
            spec = spec.model_copy(update={"cluster": cluster})
            wrong.add(("cluster", "instance_type"))
    return Reading(spec, tuple(problems), frozenset(wrong))


def read_document_again(
    data: Mapping[str, Any], name: str, overrides: Iterable[str] = (), *, instances: int | None = None
) -> JobSpec:
    """Validate a job that `JobSpec.to_document` has written; what it names on a machine may be gone.

    Args:
        data: The document.
        name: What to call it in messages.
        overrides: `path=value` as the `--set` option takes them.
        instances: Replaces `cluster.instances`.

    Raises:
        UserError: an override is malformed.
        SpecError: the job does not validate; every problem is listed.
    """
    document = Document(name, copy.deepcopy(dict(data)))
    apply_overrides(document, overrides, instances=instances)
    spec, problems, wrong = _validate(document)
    if spec is not None:
        spec._document = document  # noqa: SLF001 (its own module)
        problems += [spec.problem_of(each) for each in broken_rules(spec) if not each.concerns(wrong)]
    if spec is None or problems:
        raise SpecError(problems)
    return spec


def _validate(document: Document) -> tuple[JobSpec | None, list[Problem], set[FieldPath]]:
    """Validate a document; put legal values in the places of wrong ones until all have been read."""
    problems: dict[tuple[FieldPath, str], Problem] = {}
    wrong: set[FieldPath] = set()
    data = copy.deepcopy(document.data)
    _drop_empty(data, JobSpec)
    for _ in range(_ROUNDS):
        try:
            return JobSpec.model_validate(data, context=COLLECTING), list(problems.values()), wrong
        except ValidationError as error:
            for finding in findings_of(JobSpec, error):
                if not finding.concerns(wrong):
                    problem = place_finding(finding, lambda at, key: document.place_of(at, key=key))
                    problems[finding.at, finding.message] = problem
                if not finding.is_key:
                    wrong.add(finding.at)
                _replace(data, finding.at)
    return None, list(problems.values()), wrong


def _drop_empty(data: Any, section: type[Section]) -> None:
    """Remove fields with nothing behind them, such as a section of which every line is commented out."""
    for name, field in section.model_fields.items():
        value = data.get(name) if isinstance(data, dict) else None
        if value is None and isinstance(data, dict):
            data.pop(name, None)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Section):
                _drop_empty(value, kind)


def _replace(data: Any, path: FieldPath) -> None:
    """Remove the value at a path, or where the field is required put its example there."""
    for depth in range(len(path)):
        if not isinstance(data, dict):
            return
        if depth == len(path) - 1 or not isinstance(data.get(path[depth]), dict):
            data.pop(path[depth], None)
            example = _REQUIRED.get(path[: depth + 1]) or _REQUIRED.get(path[depth : depth + 1])
            if example is not None:
                data[path[depth]] = copy.deepcopy(example)
            return
        data = data[path[depth]]


_REQUIRED: dict[FieldPath, Any] = {
    (name,): field.examples[0]
    for section in (JobSpec, Channel, Evaluate, Profile, Secret)
    for name, field in section.model_fields.items()
    if field.is_required() and field.examples
}
"""Examples of required fields by name. Of a queue's name the job's example is as good."""


def apply_overrides(document: Document, overrides: Iterable[str], *, instances: int | None = None) -> None:
    """Apply `--set path=value` texts to a document, and `--instances` after them.

    Raises:
        UserError: a text is not `path=value`.
    """
    for text in overrides:
        name, equals, value = text.partition("=")
        path: FieldPath = tuple(name.strip().split("."))
        if not equals or not all(path):
            raise UserError(f"--set {text}: expected path=value", "for example --set cluster.spot=true")
        document.override(path, parse_scalar(value, f"--set {text}"), f"--set {text}")
    if instances is not None:
        document.override(("cluster", "instances"), instances, f"--instances {instances}")
