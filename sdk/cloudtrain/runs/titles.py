"""Titles and units of what runs report: one table for the terminal, the pages and reports.

A test names every metric, event, class of failure, kind of time, section of job.yaml and field of an environment that
has no title here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cloudtrain.runs.step_parts import describe_seconds
from cloudtrain.support.units import format_number, format_size
from cloudtrain_runtime.contract.metric_values import STEP_PARTS


class Unit(enum.StrEnum):
    """Unit of a value, as it is written behind the number."""

    NONE = ""
    BYTES = "bytes"
    SECONDS = "s"
    SHARE = "%"
    SAMPLES = "samples/s"
    TOKENS = "tokens/s"
    GBITS = "Gbit/s"


@dataclass(frozen=True)
class Title:
    """What something is called.

    Attributes:
        text: Its name in a sentence: lowercase, unless it is a name.
        unit: Unit of its values.
        hint: A sentence that says more; may be empty.
    """

    text: str
    unit: Unit = Unit.NONE
    hint: str = ""


class Level(enum.StrEnum):
    """How much a line of the log or an event matters."""

    PLAIN = ""
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class EventTitle:
    """What a kind of event is called.

    Attributes:
        text: One of them.
        many: Several of them.
        level: How much it matters.
        is_marked: Whether a timeline has a lane of marks for it.
    """

    text: str
    many: str
    level: Level = Level.PLAIN
    is_marked: bool = False


METRICS: Final[Mapping[str, Title]] = {
    "loss": Title("loss"),
    "accuracy": Title("accuracy"),
    "perplexity": Title("perplexity"),
    "learning_rate": Title("learning rate"),
    "grad_norm": Title("gradient norm", hint="Before clipping, over all parameters."),
    "samples_per_second": Title("throughput", Unit.SAMPLES, "Samples of all ranks together."),
    "tokens_per_second": Title("tokens", Unit.TOKENS, "Tokens of all ranks together."),
    "data_wait": Title("waiting for data", Unit.SHARE, "Share of a step that waits for data."),
    "mfu": Title(
        "MFU",
        Unit.SHARE,
        "Model FLOPs utilization: share of the device's peak that the model uses.",
    ),
    "memory_bytes": Title("peak memory", Unit.BYTES, "Of rank 0: its GPU's, else its process's."),
    "data_seconds": Title("data", Unit.SECONDS, "Time of a step that waits for data."),
    "forward_seconds": Title("forward", Unit.SECONDS, "Time of a step's forward pass."),
    "backward_seconds": Title("backward", Unit.SECONDS, "Time of a step's backward pass."),
    "optimizer_seconds": Title("optimizer", Unit.SECONDS, "Time of a step's update of weights."),
    "checkpoint_seconds": Title("checkpoint", Unit.SECONDS, "Time that a step waits for a save."),
}
"""Metrics by the last part of their name."""

STEP_PARTS_TITLE: Final = Title(
    "parts of a step", Unit.SECONDS, "What the time of a step is spent on."
)

SPLITS: Final[Mapping[str, str]] = {
    "train": "training",
    "validation": "validation",
    "test": "test",
}

_OF_TRAINING: Final = frozenset(METRICS) - {"loss", "accuracy", "perplexity"}
"""Metrics that only a training has, so that their titles need no split."""

ENVIRONMENT: Final[Mapping[str, Title]] = {
    "host": Title("host"),
    "gpus": Title("GPUs"),
    "memory_bytes": Title("memory", Unit.BYTES),
    "shm_bytes": Title("shared memory", Unit.BYTES, "Size of /dev/shm."),
    "disk_free_bytes": Title("free disk", Unit.BYTES, "Of the disk of /opt/ml, at the start."),
    "efa": Title("EFA devices"),
    "efa_provider": Title("EFA provider", hint="Provider that libfabric finds for the devices."),
    "driver": Title("NVIDIA driver"),
    "cuda": Title("CUDA", hint="Version that the installed torch was built for."),
    "cuda_compat": Title("CUDA compatibility", hint="The image's own driver libraries."),
    "python": Title("Python"),
    "packages": Title("packages"),
    "warnings": Title("warnings"),
}
"""Fields of the event `environment`."""

TRAINING: Final[Mapping[str, Title]] = {
    "world_size": Title("ranks"),
    "hosts": Title("hosts"),
    "device": Title("device"),
    "backend": Title("communication"),
    "parameters": Title("parameters"),
    "train_samples": Title("training samples"),
    "global_batch": Title("samples per step"),
    "total_steps": Title("steps"),
    "resumed_from": Title("resumed from"),
    "continues": Title("continues run"),
}
"""Fields of the event `started` that a reader looks for."""

EVENTS: Final[Mapping[str, EventTitle]] = {
    "environment": EventTitle("environment", "environments"),
    "attempt": EventTitle("start of the ranks", "starts of the ranks"),
    "started": EventTitle("start of the training", "starts of the training"),
    "step": EventTitle("step", "steps"),
    "evaluation": EventTitle("evaluation", "evaluations", is_marked=True),
    "best": EventTitle("best value", "best values"),
    "skipped": EventTitle("skipped step", "skipped steps", Level.WARNING, is_marked=True),
    "checkpoint": EventTitle("checkpoint", "checkpoints", is_marked=True),
    "checkpoint_missed": EventTitle(
        "missed checkpoint", "missed checkpoints", Level.WARNING, is_marked=True
    ),
    "checkpoint_damaged": EventTitle(
        "damaged checkpoint", "damaged checkpoints", Level.ERROR, is_marked=True
    ),
    "straggler": EventTitle("slow rank", "slow ranks", Level.WARNING, is_marked=True),
    "bandwidth": EventTitle("bandwidth", "bandwidths"),
    "pipeline": EventTitle("pipeline", "pipelines"),
    "tracking": EventTitle("tracker", "trackers"),
    "profile": EventTitle("profile", "profiles", is_marked=True),
    "failed": EventTitle("failure", "failures", Level.ERROR, is_marked=True),
    "left": EventTitle("end of ranks", "ends of ranks"),
    "hang": EventTitle("hang", "hangs", Level.ERROR, is_marked=True),
    "outputs": EventTitle("outputs", "outputs"),
    "fresh_start": EventTitle("start from zero", "starts from zero", Level.WARNING),
    "patterns": EventTitle("unread metric", "unread metrics", Level.WARNING),
    "ranks": EventTitle("ranks", "ranks"),
    "analysis": EventTitle("analysis", "analyses"),
    "leaving": EventTitle("wait at the end", "waits at the end"),
    "stopped": EventTitle("stop", "stops", Level.WARNING, is_marked=True),
    "finished": EventTitle("end of the training", "ends of the training"),
}
"""Events by kind."""

FAILURES: Final[Mapping[str, str]] = {
    "user_code": "an error in the job's code",
    "out_of_memory": "out of GPU memory",
    "host_memory": "out of host memory",
    "killed": "a process was killed from outside",
    "nccl": "a network error between ranks",
    "hang": "a rank did not join a collective",
    "data": "an error in the data",
    "s3_access": "no access to S3",
    "image_pull": "a fault of the container image",
    "capacity": "no capacity for this instance type",
    "quota": "the account's quota is too small",
    "iam": "a permission is missing",
    "spot": "AWS took the spot capacity away, or had none",
    "time_limit": "the time limit was reached",
    "dependency_install": "a Python package is missing or broken",
    "disk_full": "the disk is full",
    "checkpoint": "a checkpoint cannot be used",
    "service": "a fault of SageMaker or its hardware",
    "machine": "this machine ended the run's supervisor",
    "unknown": "unknown",
}
"""Causes of failures by class."""

TIMES: Final[Mapping[str, Title]] = {
    "waiting": Title("waiting", hint="In a queue, or for capacity: not paid."),
    "start": Title("start", hint="Download, image, installation, and all until the first step."),
    "training": Title("training", hint="Steps whose work was kept."),
    "evaluation": Title("evaluation", hint="Evaluations during the training and at its end."),
    "checkpoint": Title("checkpoint", hint="The training waited for a save."),
    "repeated": Title("repeated", hint="Work after the last checkpoint: done again, or lost."),
    "restart": Title("restart", hint="From an interruption until the next first step."),
    "idle": Title("idle", hint="After the work until the end, and hangs."),
    "upload": Title("upload", hint="Model and outputs were stored."),
}
"""Kinds of time in a ledger."""

SETTINGS: Final[Mapping[str, str]] = {
    "name": "Job",
    "code": "Code",
    "cluster": "Cluster",
    "data": "Data",
    "train": "Training",
    "checkpoint": "Checkpoints",
    "limits": "Limits",
    "slurm": "Slurm",
    "metrics": "Metrics",
    "tracking": "Tracking",
    "output": "Output",
    "notify": "Notifications",
    "tags": "Tags",
    "report": "Report",
    "request": "Request",
}
"""Sections of job.yaml, in the order in which they are shown."""


def metric_part(name: str) -> str:
    """Return the last part of a metric's name: `loss` for `validation/loss`."""
    return name.rpartition("/")[2]


def title_of_metric(name: str) -> Title:
    """Return the title of a metric without its split. A metric of a job is called as the job calls it."""
    part = metric_part(name)
    return METRICS.get(part) or Title(part.replace("_", " "))


def split_title(name: str) -> str:
    """Return the split of a metric: `validation`; `training` for one without a split."""
    split = name.rpartition("/")[0] or "train"
    return SPLITS.get(split) or split.replace("_", " ")


def metric_title(name: str) -> str:
    """Return the title of a metric with its split, for a place where it is alone: `validation loss`."""
    text = title_of_metric(name).text
    part = metric_part(name)
    is_clear = part in _OF_TRAINING or (part not in METRICS and split_title(name) == "training")
    return text if is_clear else f"{split_title(name)} {text}"


def describe_value(value: float | None, unit: Unit) -> str:
    """Return a value with its unit, in at most four significant digits: `25.3 GB`, `120 ms`, `41.2%`."""
    if value is None:
        return "not finite"
    if unit is Unit.BYTES:
        return format_size(value)
    if unit is Unit.SECONDS:
        return describe_seconds(value)
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    return f"{format_number(value)} {unit}".rstrip()


def describe_metric_value(name: str, value: float | None) -> str:
    """Return the value of a metric with its unit."""
    return describe_value(value, title_of_metric(name).unit)


def event_title(kind: str) -> EventTitle:
    """Return what a kind of event is called; one of another version is called as it is written."""
    return EVENTS.get(kind) or EventTitle(kind.replace("_", " "), kind.replace("_", " "))


def heading(text: str) -> str:
    """Return a title as the first words of a line: `Peak memory`."""
    return text[:1].upper() + text[1:]


def is_step_part(name: str) -> bool:
    """Return whether a metric is the time of a part of a step."""
    part = metric_part(name)
    return part.endswith("_seconds") and part.removesuffix("_seconds") in STEP_PARTS


def section_title(path: str) -> str:
    """Return the title of the section of a setting; that of `cluster.instances` is `Cluster`."""
    return SETTINGS.get(path.partition(".")[0], "Job")


def environment_value(event: Mapping[str, Any], name: str) -> str:
    """Return a field of the event `environment` as text; an empty string for one without a value."""
    value = event.get(name)
    if value is None or value in ("", [], {}):
        return ""
    if ENVIRONMENT[name].unit is Unit.BYTES:
        return format_size(value)
    return str(value)
