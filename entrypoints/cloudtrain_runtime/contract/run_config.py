"""`run.json`: the part of a plan that the container reads.

The classes are frozen data with a JSON form. `VERSION` changes when the form changes incompatibly.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

from cloudtrain_runtime.contract.format_version import check_not_newer
from cloudtrain_runtime.contract.strict_json import (
    decode_floats,
    dump_json,
    encode_floats,
    load_json,
)

VERSION: Final = 1
"""Version of `run.json`. A container rejects other versions."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when `metric` has not improved by `min_delta` for `patience` evaluations in a row."""

    metric: str
    patience: int
    min_delta: float = 0.0
    mode: str = "min"


@dataclass(frozen=True)
class ParallelConfig:
    """How a model and its batches are distributed over the ranks: pipeline x data x tensor = world size.

    Attributes:
        data: `ddp` replicates the model (or stage) on every data rank, `fsdp` shards it over them.
        tensor: Ranks that share each layer.
        pipeline: Ranks that hold consecutive parts of the layers (stages).
        schedule: Order of the pipeline's micro-batches: `gpipe`, `1f1b`, `interleaved` or `zero_bubble`.
        shard: Data ranks over which one copy of the model is sharded (hybrid sharding); None means all of them.
        reshard: Whether parameters are freed after the forward pass and gathered again for the backward pass.
        offload: Whether shards of parameters, their gradients and the optimizer's state are kept in host memory.
        static_graph: Whether DDP may assume that each step uses the same parameters in the same order.
        find_unused: Whether DDP looks in each step for parameters that the loss does not depend on.
        compress: `bf16` halves the bytes of gradients that DDP sends, `none` sends them unchanged.
        bucket_bytes: Size of DDP's gradient buckets in bytes; None means DDP's default.
    """

    data: str = "ddp"
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    shard: int | None = None
    reshard: bool = True
    offload: bool = False
    static_graph: bool = False
    find_unused: bool = False
    compress: str = "none"
    bucket_bytes: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds a full replica of the model."""
        return self.data == "ddp" and self.group_size == 1

    @property
    def group_size(self) -> int:
        """Number of ranks that process the same samples."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class TrainConfig:
    """How the shared entrypoint trains a Task. Exactly one of `epochs` and `steps` is set.

    Attributes:
        batch_size: Samples per rank and micro-step.
        accumulate: Micro-steps per optimizer step.
        learning_rate: Of the default optimizer.
        clip_grad_norm: Upper bound of the global gradient norm; None does not clip.
        evaluate_every_steps: Optimizer steps between evaluations; None evaluates after each epoch.
        parallel: How the model is distributed over the ranks.
        activation_checkpointing: Whether the backward pass recomputes the activations of each block.
        schedule: Of the learning rate, where the Task has none: `constant`, `linear` or `cosine` down to zero.
        warmup_steps: Optimizer steps in which the learning rate rises from zero, where the Task has no schedule.
        deterministic: Whether only deterministic algorithms are used.
        skip_nonfinite: Consecutive steps with a gradient that is not finite to skip before the run ends; None does not
            check each step.
        export_nonfinite: Whether a run exports its model and succeeds although losses or weights are not finite.
        export: Which weights are exported: `last`, or `best` by the metric of early stopping.
        workers: Data-loader processes per rank; None lets the runtime choose.
        profile_at: First step that torch.profiler records, or None.
        profile_steps: Steps that it records.
        tensorboard: Whether scalars are written for TensorBoard.
        init_from: Uri of the weights that a new run starts with, or None. Omitted from `run.json` when None.
        drop_last: Whether every rank gets equally many samples in each step, and an epoch's last ones are left out.
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
    drop_last: bool = False
    init_from: str | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often checkpoints are written, and what to resume from.

    Attributes:
        uri: Folder (`file:///...`) or `s3://bucket/prefix` of this run's checkpoints.
        every_seconds: Seconds between checkpoints, or None.
        every_steps: Optimizer steps between checkpoints, or None.
        keep: Complete checkpoints to keep; at least 1.
        resume: `auto` (newest complete one under `uri`), `never`, or the uri of another run's checkpoints or of one
            of them (`.../step-00000500`).
        resume_run: Run whose checkpoint is loaded where `resume` is a folder that several runs share; an empty string
            means any run.
    """

    uri: str
    every_seconds: float | None
    every_steps: int | None
    keep: int
    resume: str
    resume_run: str = ""


@dataclass(frozen=True)
class SecretConfig:
    """Where the container finds the value of a secret environment variable. It never holds the value.

    Attributes:
        secret: Name or ARN in AWS Secrets Manager.
        key: Key of a secret that is a JSON object, or None for all of it.
        stage: Staging label of the version, or None for the current one.
    """

    secret: str
    key: str | None = None
    stage: str | None = None


@dataclass(frozen=True)
class TrackingConfig:
    """Where a run's parameters and metrics go besides the events.

    Attributes:
        mlflow: Tracking uri of MLflow; empty without it.
        plan: Uri of the run's plan.json, which describes the run there.
        wandb: Mode of Weights & Biases: `online` or `offline`; empty without it.
        files: Uri of the folder of its offline files: one for all runs of a training. Empty if it is online.
    """

    mlflow: str = ""
    plan: str = ""
    wandb: str = ""
    files: str = ""


@dataclass(frozen=True)
class SearchedValue:
    """A value that each trial of a tuning job receives as a hyperparameter.

    Attributes:
        kind: `float`, `int`, `bool` or `text`.
        default: Default of the field in job.yaml, which the training's identity omits; None for an argument.
    """

    kind: str
    default: Any = None


@dataclass(frozen=True)
class EvaluationConfig:
    """What a run evaluates instead of training. Its weights are those of `train.init_from`.

    Attributes:
        run: Reference of the evaluated run.
        place: Uri of the folder, of that run, in which the result is stored.
        step: Step of the weights, or None if it is unknown.
        splits: Splits to evaluate; empty for validation and test as far as they exist, else train.
        data: Uri of each channel.
    """

    run: str
    place: str
    step: int | None = None
    splits: list[str] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)


_PARTS: Final = {
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "evaluation": EvaluationConfig,
}
_PARTS_BY_NAME: Final = {"secrets": SecretConfig, "searched": SearchedValue}


@dataclass(frozen=True)
class RunConfig:
    """The part of a plan that the container reads, as `run.json`.

    Attributes:
        task: `module:Class` of a Task, or None.
        script: Path of a script below the code folder, or None (exactly one of task, script, module and command).
        args: Keyword arguments of the Task (a JSON object) or argv of the script or module (a list of strings).
        processes_per_instance: Ranks per host; None means one per GPU, or 2 on a host without GPUs.
        max_restarts: How often torchrun restarts the workers after one of them has failed.
        code: Digest of the bundle.
        request: Identity of the plan.
        hang_seconds: The run counts as hung, and is ended, when a step takes this much longer than the slowest one
            so far; None never ends it.
        network_gbps: Rated network bandwidth of one instance in Gbit/s; None where it is unknown or irrelevant: on one
            instance, in local runs, or for a type that the catalog does not have.
        local_rank_option: Command-line option through which the script receives its local rank, or None.
        secrets: Environment variables of the ranks whose values each host's launcher fetches from Secrets Manager, by
            name. Omitted from `run.json` when empty.
        bucket_owners: Account that must own a bucket, by bucket name, where it is known.
        outputs: Files and folders (these end with `/`) that a script writes into its code folder and that are kept.
            Omitted from `run.json` when empty.
        starts_ranks: Whether the script's source starts ranks itself. Omitted from `run.json` when false.
        metrics: Regular expression by metric, whose group matches its values in a script's output on the first host.
            Omitted from `run.json` when empty.
        module: Module that is run as `python -m` would, or None. Omitted from `run.json` when None.
        command: Program and arguments that each rank executes, with placeholders. Omitted from `run.json` when empty.
        cuda_on_cpu: Devices of CUDA per instance that a stand-in on the CPU shows to the ranks of a local run, or 0.
            Omitted from `run.json` when 0.
        training: Identity of the training (see training_identity.py). Omitted from `run.json` when unknown.
        tracking: Where a Task is tracked. Omitted from `run.json` when None.
        searched: What the trials of a tuning job search, by path in job.yaml (see trial.py). Omitted from `run.json`
            when empty.
        key: With it, the hosts recognise each other. Random, and not part of a plan: set when `run.json` is uploaded.
            Omitted from `run.json` when empty.
        evaluation: What a run evaluates instead of training. Omitted from `run.json` when None.
        launcher: `own` for a command that starts its own ranks, and so does not get the variables of torchrun's.
            Omitted from `run.json` when empty.
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
    metrics: dict[str, str] = field(default_factory=dict)
    module: str | None = None
    command: list[str] = field(default_factory=list)
    cuda_on_cpu: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    tracking: TrackingConfig | None = None
    searched: dict[str, SearchedValue] = field(default_factory=dict)
    evaluation: EvaluationConfig | None = None
    key: str = ""
    launcher: str = ""
    version: int = VERSION

    @property
    def entry(self) -> str:
        """What each rank runs: the Task, script, module or command."""
        return self.task or self.script or self.module or " ".join(self.command)

    def to_json(self) -> str:
        """Return the text of `run.json`: sorted keys, one trailing newline, identical for equal plans."""
        fields = dataclasses.asdict(self)
        # A Task receives NaN where its job file has .nan.
        fields["args"] = encode_floats(fields["args"])
        fields["training"] = encode_floats(fields["training"])
        if self.train is not None and self.train.init_from is None:
            del fields["train"]["init_from"]
        if self.tracking is not None:
            # Without what it does not use, so that the runtime of an earlier version reads it.
            fields["tracking"] = {
                name: value for name, value in fields["tracking"].items() if value
            }
        optional = (
            "secrets",
            "outputs",
            "starts_ranks",
            "metrics",
            "module",
            "command",
            "cuda_on_cpu",
            "training",
            "tracking",
            "searched",
            "evaluation",
            "key",
            "launcher",
        )
        for name in optional:
            if not fields[name]:
                del fields[name]
        return dump_json(fields, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Parse `run.json`.

        Raises:
            ValueError: the text is not a run.json of this version.
        """
        fields = load_json(text)
        check_not_newer("run.json", fields, VERSION)
        if not isinstance(fields, dict) or fields.get("version") != VERSION:
            found = fields.get("version") if isinstance(fields, dict) else type(fields).__name__
            raise ValueError(
                f"run.json has version {found!r}; this runtime reads version {VERSION}"
            )
        try:
            return cls._of_fields(fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"run.json lacks a field or has a wrong one: {error}") from None

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> RunConfig:
        if (train := fields["train"]) is not None:
            early = train["early_stopping"]
            train["early_stopping"] = EarlyStopping(**early) if early else None
            train["parallel"] = ParallelConfig(**train["parallel"])
            fields["train"] = TrainConfig(**train)
        fields |= {name: kind(**fields[name]) for name, kind in _PARTS.items() if name in fields}
        for name, kind in _PARTS_BY_NAME.items():
            fields[name] = {key: kind(**part) for key, part in fields.get(name, {}).items()}
        for name in ("args", "training"):
            if name in fields:
                fields[name] = decode_floats(fields[name])
        return cls(**fields)
