"""What the SDK and the container agree on.

Standard library only: the SDK imports this module on a laptop without torch, the launcher imports it in any image
with Python 3.11. Everything in here is frozen data and its JSON form; `VERSION` changes when the form does.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloudtrain_runtime.contract.events import EVENT_PREFIX as EVENT_PREFIX
from cloudtrain_runtime.contract.events import check_event as check_event
from cloudtrain_runtime.contract.events import format_event as format_event
from cloudtrain_runtime.contract.events import parse_event as parse_event
from cloudtrain_runtime.contract.strict_json import decode_floats, dump_json, encode_floats

VERSION: Final = 1
"""Version of `run.json`. A container refuses a version that it does not know."""

CONFIG_CHANNEL: Final = "cloudtrain"
"""Input channel that brings `run.json` (one small object per run)."""

CODE_CHANNEL: Final = "code"
"""Input channel that brings the bundle (one object per content digest, shared between runs)."""

CONFIG_FILE: Final = "run.json"
BUNDLE_FILE: Final = "sourcedir.tar.gz"
"""Name that AWS's training toolkit expects in `sagemaker_submit_directory`."""

WORKER_SCRIPT: Final = "cloudtrain_worker.py"
"""Root script that every launcher starts once per rank: AWS's toolkit refuses a package as entry point."""

ML_ROOT_VARIABLE: Final = "CLOUDTRAIN_ML_ROOT"
"""Where `/opt/ml` lies. Unset in a SageMaker container; local runs point it at one folder per instance."""

ADDRESSES_VARIABLE: Final = "CLOUDTRAIN_HOST_ADDRESSES"
"""JSON object from host name to address, for hosts whose names do not resolve (local runs)."""

PORT_VARIABLE: Final = "CLOUDTRAIN_RENDEZVOUS_PORT"
GRACE_VARIABLE: Final = "CLOUDTRAIN_STOP_GRACE_SECONDS"
GPUS_VARIABLE: Final = "CLOUDTRAIN_GPUS"
"""Number of GPUs that this host may use, when the launcher should not count them itself."""

MOST_PROCESSES_VARIABLE: Final = "CLOUDTRAIN_MOST_PROCESSES"
"""Most ranks that a host may have, whatever was asked for: a sandbox stands in for instances of 8 GPUs with 2 ranks."""

HOSTS_HERE_VARIABLE: Final = "CLOUDTRAIN_HOSTS_HERE"
"""Number of the job's hosts that share this machine's CPUs (local runs)."""

ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
"""File in which torchrun looks for a worker's exception, as JSON."""

DEFAULT_RENDEZVOUS_PORT: Final = 7777
STOP_GRACE_SECONDS: Final = 120
"""Seconds between SIGTERM and SIGKILL. Source: SageMaker's StopTrainingJob documentation, 2026."""

OUTPUTS_FOLDER: Final = "outputs"
"""Folder beside a script's checkpoints that holds the files and folders of `code.outputs`."""

FAILURE_CHARACTERS: Final = 1024
"""SageMaker shows this many characters of /opt/ml/output/failure as FailureReason."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when `metric` has not improved by `min_delta` for `patience` evaluations in a row."""

    metric: str
    patience: int
    min_delta: float = 0.0
    mode: str = "min"


@dataclass(frozen=True)
class ParallelConfig:
    """How a model and its batches are spread over the ranks: pipeline x data x tensor = world size.

    Attributes:
        data: `ddp` holds the whole model (or stage) on every data rank, `fsdp` shards it over them.
        tensor: Ranks that share each layer.
        pipeline: Ranks that hold the layers one after the other.
        schedule: Order of the pipeline's micro-batches: `gpipe`, `1f1b`, `interleaved` or `zero_bubble`.
        shard: Data ranks that hold one copy of the model together (hybrid sharding); None means all of them.
        reshard: Whether parameters are gathered again for the backward pass instead of kept since the forward pass.
        static_graph: Tell DDP that each step uses the same parameters in the same order.
        compress: `bf16` halves what DDP sends of gradients, `none` sends them as they are.
        bucket_bytes: Gradients that DDP sends at once; None means its own choice.
    """

    data: str = "ddp"
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    shard: int | None = None
    reshard: bool = True
    static_graph: bool = False
    compress: str = "none"
    bucket_bytes: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.data == "ddp" and self.group_size == 1

    @property
    def group_size(self) -> int:
        """Ranks that see the same samples."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class TrainConfig:
    """How the shared entrypoint trains a Task. Exactly one of `epochs` and `steps` is set.

    Attributes:
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        learning_rate: Of the default optimizer.
        clip_grad_norm: Upper bound of the global gradient norm; None leaves gradients alone.
        evaluate_every_steps: Optimizer steps between evaluations; None evaluates after each epoch.
        parallel: How the model is spread over the ranks.
        activation_checkpointing: Whether the backward pass computes the activations of each block again.
        schedule: Of the learning rate, where the Task has none: `constant`, `linear` or `cosine` down to zero.
        warmup_steps: Optimizer steps in which the learning rate rises from zero, where the Task has no schedule.
        deterministic: Whether only algorithms are used that give the same bits each time.
        skip_nonfinite: Steps in a row without a finite gradient that are left out before the run ends; None does not
            look at each step.
        export_nonfinite: Whether a run exports its model, and succeeds, though losses or weights are not finite.
        export: Weights that the model folder gets: `last`, or `best` by the metric of early stopping.
        workers: Processes per rank that load data; None lets the runtime choose.
        profile_at: First step that torch.profiler records, or None.
        profile_steps: Steps that it records.
        tensorboard: Whether scalars are written for TensorBoard.
    """

    epochs: int | None
    steps: int | None
    batch_size: int
    accumulate: int
    precision: str
    compile: bool
    clip_grad_norm: float | None
    learning_rate: float
    seed: int
    evaluate_every_steps: int | None
    early_stopping: EarlyStopping | None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activation_checkpointing: bool = False
    schedule: str = "constant"
    warmup_steps: int = 0
    deterministic: bool = False
    skip_nonfinite: int | None = None
    export: str = "last"
    workers: int | None = None
    profile_at: int | None = None
    profile_steps: int = 0
    tensorboard: bool = False
    export_nonfinite: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often checkpoints are written, and what to start from.

    Attributes:
        uri: Folder (`file:///...`) or `s3://bucket/prefix` of this run's checkpoints.
        every_seconds: Seconds between checkpoints, or None.
        every_steps: Optimizer steps between checkpoints, or None.
        keep: Complete checkpoints to keep; at least 1.
        resume: `auto` (newest complete one under `uri`), `never`, or the uri of another run's checkpoints or of one
            of them (`.../step-00000500`).
        resume_run: Run whose checkpoints are meant where `resume` is a folder that several runs share, or an empty
            string for any.
    """

    uri: str
    every_seconds: float | None
    every_steps: int | None
    keep: int
    resume: str
    resume_run: str = ""


@dataclass(frozen=True)
class SecretConfig:
    """Where the container finds the value of an environment variable; never the value.

    Attributes:
        secret: Name or ARN in AWS Secrets Manager.
        key: Key of a secret that is a JSON object, or None for all of it.
        stage: Staging label of the version, or None for the current one.
    """

    secret: str
    key: str | None = None
    stage: str | None = None


@dataclass(frozen=True)
class RunConfig:
    """The part of a plan that the container reads, as `run.json`.

    Attributes:
        task: `module:Class` of a Task, or None.
        script: Path of a script below the code folder, or None (exactly one of the two).
        args: Keyword arguments of the Task (a JSON object) or argv of the script (a list of strings).
        processes_per_instance: Ranks per host; None means one per GPU, or 2 on a host without GPUs.
        max_restarts: How often torchrun starts the workers again after one of them failed.
        code: Digest of the bundle.
        request: Identity of the plan.
        hang_seconds: Without a step for so long beyond the slowest one so far, the run counts as hung and is ended;
            None never ends it.
        network_gbps: Rating of one instance's network in Gbit/s; None where there is none to hold a measurement
            against: on one instance, locally, or for a type that the catalog does not know.
        local_rank_option: Option by which the script takes its local rank, as it spells it, or None.
        secrets: Environment variables of the ranks that the launcher of each host asks Secrets Manager for, by name.
            Left out of `run.json` where there are none.
        bucket_owners: Account that must own a bucket, by its name, for those of which it is known.
        outputs: Files and folders (these end with `/`) that a script writes into its code folder and that are kept.
            Left out of `run.json` where there are none.
        starts_ranks: Whether the script starts ranks of its own, as its text shows. Left out of `run.json` where not.
        training: Identity of the training (see training.py). Left out of `run.json` where it is not known.
    """

    run: str
    task: str | None
    script: str | None
    args: dict[str, Any] | list[str]
    requirements: str | None
    processes_per_instance: int | None
    distribution: str
    max_restarts: int
    train: TrainConfig | None
    checkpoint: CheckpointConfig
    code: str = ""
    request: str = ""
    hang_seconds: float | None = 600.0
    network_gbps: float | None = None
    local_rank_option: str | None = None
    secrets: dict[str, SecretConfig] = field(default_factory=dict)
    bucket_owners: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    starts_ranks: bool = False
    training: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """Return the text of `run.json`: sorted keys, one trailing newline, equal for equal plans."""
        fields = dataclasses.asdict(self)
        fields["args"] = encode_floats(fields["args"])  # a Task gets NaN where its job file has .nan
        fields["training"] = encode_floats(fields["training"])
        for name in ("secrets", "outputs", "starts_ranks", "training"):
            if not fields[name]:
                del fields[name]
        return dump_json(fields, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Read `run.json`.

        Raises:
            ValueError: the text is not a run.json of this version.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            found = fields.get("version") if isinstance(fields, dict) else type(fields).__name__
            raise ValueError(f"run.json has version {found!r}; this runtime reads version {VERSION}")
        train = fields.pop("train")
        if train is not None:
            early = train.pop("early_stopping")
            spread = ParallelConfig(**train.pop("parallel"))
            train = TrainConfig(**train, early_stopping=EarlyStopping(**early) if early else None, parallel=spread)
        secrets = {name: SecretConfig(**reference) for name, reference in fields.pop("secrets", {}).items()}
        saved = CheckpointConfig(**fields["checkpoint"])
        args = decode_floats(fields["args"])
        fields["training"] = decode_floats(fields.get("training", {}))
        return cls(**{**fields, "args": args, "train": train, "checkpoint": saved, "secrets": secrets})


# ---------------------------------------------------------------- the container's folders


@dataclass(frozen=True)
class MlTree:
    """The folders that SageMaker mounts at `/opt/ml`."""

    root: Path

    @property
    def config(self) -> Path:
        """Folder of hyperparameters.json, inputdataconfig.json and resourceconfig.json."""
        return self.root / "input" / "config"

    @property
    def data(self) -> Path:
        """Folder with one folder per input channel."""
        return self.root / "input" / "data"

    @property
    def code(self) -> Path:
        """Where the bundle is unpacked."""
        return self.root / "code"

    @property
    def model(self) -> Path:
        """What is packed to model.tar.gz at the end."""
        return self.root / "model"

    @property
    def tensorboard(self) -> Path:
        """What is copied to S3 while the job runs, where the request asks for it (TensorBoardOutputConfig)."""
        return self.root / "output" / "tensorboard"

    @property
    def output_data(self) -> Path:
        """What is packed to output.tar.gz at the end."""
        return self.root / "output" / "data"

    @property
    def failure(self) -> Path:
        """File whose first 1024 characters become FailureReason."""
        return self.root / "output" / "failure"

    @property
    def checkpoints(self) -> Path:
        """Folder that SageMaker keeps in step with CheckpointConfig.S3Uri."""
        return self.root / "checkpoints"

    @property
    def outputs(self) -> Path:
        """Folder in which the files and folders of `code.outputs` are kept."""
        return self.checkpoints / OUTPUTS_FOLDER

    @property
    def run_config(self) -> Path:
        """The run.json of this run."""
        return self.data / CONFIG_CHANNEL / CONFIG_FILE

    @property
    def stop_notice(self) -> Path:
        """File that the launcher writes when the host was told to stop."""
        return self.root / "output" / "stop-notice"

    @property
    def in_training_loop(self) -> Path:
        """File that exists while the workers would act on a stop notice."""
        return self.root / "output" / "in-training-loop"

    @property
    def watch(self) -> Path:
        """Folder of the ranks' pulses; it exists while the launcher watches them."""
        return self.root / "output" / "watch"

    @property
    def joins(self) -> Path:
        """Folder of the ranks' notes on whether they have joined a process group."""
        return self.root / "output" / "joins"

    @property
    def hang(self) -> Path:
        """What is known of a hang; part of output.tar.gz."""
        return self.output_data / "hang"


def sort_hosts(hosts: list[str]) -> list[str]:
    """Return hosts in SageMaker's order: as text, so `algo-10` comes before `algo-2`. The first is the master."""
    return sorted(hosts)


def describe_exit(exit_code: int) -> str:
    """Return `exit code 1` or, for a process ended by a signal, `SIGKILL`."""
    if exit_code < 0:
        try:
            return signal.Signals(-exit_code).name
        except ValueError:
            return f"signal {-exit_code}"
    return f"exit code {exit_code}"
