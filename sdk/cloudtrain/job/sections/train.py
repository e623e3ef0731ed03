"""The `train` section of job.yaml: how the shared entrypoint trains a Task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Every, FiniteFloat, Integer, MegaBytes, Section, s3_uri_error
from cloudtrain.support.run_id import is_run_id


class EarlyStopping(Section):
    """Stop when a validation metric stops improving."""

    metric: str = "validation/loss"
    """Metric of the validation split, as split/name."""
    patience: Integer = Field(default=5, ge=1)
    """Evaluations without improvement before the run ends."""
    min_delta: FiniteFloat = Field(default=0.0, ge=0.0)
    """Smallest change that counts as improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        split, slash, name = self.metric.partition("/")
        if split != "validation" or not slash or not name:
            suggestion = f"validation/{name or split}"
            message = f'expected a metric of the validation split, as validation/name, got "{self.metric}"'
            yield Diagnostic(message, ("metric",), f'did you mean "{suggestion}"?')


class Evaluate(Section):
    """When the validation split is evaluated."""

    every: Every = Field(examples=["200 steps"])
    """Optimizer steps between evaluations, such as 200 steps; default: after each epoch."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if self.every.steps is None:
            message = "expected a number of steps such as 200 steps"
            yield Diagnostic(message, ("every",), "all ranks must evaluate after the same step")


class Parallel(Section):
    """How the model is distributed over the ranks."""

    data: Literal["ddp", "fsdp"] = "ddp"
    """Replicate the model on every rank (ddp) or shard it (fsdp)."""
    tensor: Integer = Field(default=1, ge=1)
    """Tensor-parallel degree."""
    pipeline: Integer = Field(default=1, ge=1)
    """Pipeline-parallel degree: ranks that each hold some of the layers; accumulate is the number of micro-batches."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the pipeline's micro-batches (with pipeline only)."""
    shard: Annotated[Integer, Field(ge=1)] | None = Field(None, examples=[8])
    """Data ranks that hold one copy of the model together, such as those of one instance (with fsdp; default: all)."""
    reshard: bool = True
    """Gather parameters again for the backward pass: less memory, more traffic (with fsdp)."""
    offload: bool = False
    """Keep shards, gradients and optimizer state in host memory: for models larger than the GPUs (with fsdp)."""
    static_graph: bool = False
    """Promise DDP that each step uses the same parameters in the same order (with ddp, without tensor)."""
    find_unused: bool = False
    """Let DDP look in each step for parameters that the loss does not depend on (with ddp, without tensor)."""
    compress: Literal["none", "bf16"] = "none"
    """Send gradients as bf16, which halves the traffic (with ddp, without tensor)."""
    bucket: Annotated[MegaBytes, Field(ge=1)] | None = Field(None, examples=["25MB"])
    """Size of DDP's gradient buckets (with ddp, without tensor; default: PyTorch's own choice)."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        for name in self.model_fields_set - {"data", "tensor", "pipeline", "schedule"}:
            required = "fsdp" if name in ("shard", "reshard", "offload") else "ddp"
            if self.data != required:
                message = f"has an effect with data: {required} only"
                yield Diagnostic(message, (name,), f"remove it, or use data: {required}")
            elif required == "ddp" and self.tensor > 1:
                message = "is an option of DDP, which does not support layers that tensor splits"
                yield Diagnostic(message, (name,), "remove it, or tensor")
        if self.find_unused and self.static_graph:
            message = (
                "contradicts static_graph, which promises that each step uses the same parameters"
            )
            yield Diagnostic(message, ("find_unused",), "remove one of them")
        if "schedule" in self.model_fields_set and self.pipeline == 1:
            message = "has an effect with a pipeline only"
            yield Diagnostic(message, ("schedule",), "remove it, or use pipeline: 2 or more")

    @property
    def is_plain(self) -> bool:
        """Whether every rank holds all of the model."""
        return self.data == "ddp" and self.group_size == 1

    @property
    def group_size(self) -> int:
        """Number of ranks that process the same samples."""
        return self.tensor * self.pipeline

    @property
    def methods(self) -> Mapping[str, tuple[str, ...]]:
        """The methods that a Task must have for this, each with the path of the field that requires it."""
        required = (("parallelize", "tensor"), ("pipeline", "pipeline"))
        return {
            method: ("train", "parallel", field)
            for method, field in required
            if getattr(self, field) > 1
        }


class Profile(Section):
    """Which steps torch.profiler records."""

    at: Integer = Field(ge=1, examples=[100])
    """First step to record."""
    steps: Integer = Field(default=5, ge=1)
    """Number of steps to record."""


class Train(Section):
    """How the shared entrypoint trains a Task."""

    epochs: Annotated[Integer, Field(ge=1)] | None = Field(None, examples=[3])
    """Passes over the training data (exactly one of epochs and steps)."""
    steps: Annotated[Integer, Field(ge=1)] | None = Field(None, examples=[1000])
    """Optimizer steps."""
    batch_size: Integer = Field(default=32, ge=1)
    """Samples per rank and micro-step."""
    accumulate: Integer = Field(default=1, ge=1)
    """Micro-steps per optimizer step; gradients are synchronised in the last one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute precision; bf16 and fp16 use autocast, fp16 a gradient scaler."""
    parallel: Parallel = Field(default_factory=Parallel.model_construct)
    """Data, tensor and pipeline parallelism."""
    compile: bool = False
    """Compile the model with torch.compile."""
    clip_grad_norm: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Upper bound of the global gradient norm."""
    learning_rate: FiniteFloat = Field(default=1e-3, gt=0)
    """Learning rate of the default optimizer, AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate decays to zero after the warm-up, unless the Task has its own schedule."""
    warmup: Every | None = Field(None, examples=["100 steps"])
    """Optimizer steps in which the learning rate rises from zero, unless the Task has its own schedule."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward pass: less memory, a third more time."""
    deterministic: bool = False
    """Use deterministic algorithms only; the run fails at an operation that has none."""
    skip_nonfinite: Annotated[Integer, Field(ge=0)] | None = Field(None, examples=[3])
    """Skip steps whose gradient is not finite, at most this many in a row; then fail the run and save the batch."""
    export: Literal["last", "best"] = "last"
    """Weights that the model folder gets: the last, or the best by the metric of early stopping."""
    export_nonfinite: bool = False
    """Export the model, and succeed, though the last losses or the weights are not finite; by default the run fails."""
    workers: Annotated[Integer, Field(ge=0)] | None = Field(None, examples=[4])
    """Processes per rank that load data; default: up to 8 with a GPU, none on a CPU."""
    drop_last: bool = False
    """Leave out an epoch's last samples where they do not fill a step, so that each rank has equally many in it."""
    init_from: str | None = Field(None, examples=["s3://bucket/model.pt"])
    """Weights that a new run starts with: a run id, or the uri or path of a checkpoint or model file."""
    seed: Integer = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of initial weights, sample order and dropout."""
    evaluate: Evaluate | None = None
    """When the validation split is evaluated; default: after each epoch."""
    early_stopping: EarlyStopping | None = None
    """Stop when a validation metric stops improving."""
    profile: Profile | None = None
    """Which steps torch.profiler records."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if (self.epochs is None) == (self.steps is None):
            fields = (("epochs",), ("steps",))
            yield Diagnostic(
                "give exactly one of epochs and steps", (), "for example epochs: 3", fields
            )
        yield from self._check_init_from()
        if self.warmup is not None and self.warmup.steps is None:
            message = "expected a number of steps such as 100 steps"
            yield Diagnostic(message, ("warmup",), "the schedule counts steps")
        if (
            self.steps is not None
            and self.warmup is not None
            and (self.warmup.steps or 0) >= self.steps
        ):
            fields = (("warmup",), ("steps",))
            message = f"the run ends after step {self.steps}, before the warm-up ends"
            yield Diagnostic(message, ("warmup",), f"use at most {self.steps - 1} steps", fields)
        if self.profile is not None and self.steps is not None:
            latest = self.steps - self.profile.steps + 1
            if self.profile.at > latest:
                fields = (("profile",), ("steps",))
                message = f"the run ends after step {self.steps}"
                yield Diagnostic(
                    message, ("profile", "at"), f"use at most {max(latest, 1)}", fields
                )

    def _check_init_from(self) -> Iterator[Diagnostic]:
        source = self.init_from
        if source is None or is_run_id(source.rpartition(":")[2]):
            return
        if message := s3_uri_error(source):
            yield Diagnostic(message, ("init_from",), "for example s3://my-bucket/model.pt")
        elif not source or (source.startswith("file:") and not source.startswith("file:///")):
            hint = "use a run id, s3://bucket/model.pt or a path"
            yield Diagnostic(
                f'expected where the weights are, got "{source}"', ("init_from",), hint
            )
