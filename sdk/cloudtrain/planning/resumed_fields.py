"""What a resumed run does with each field of its job: use it, refuse a change, or keep what the checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Final

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.sections.train import Train
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import decision, warning
from cloudtrain.planning.storage_layout import ResumeSource

CHANGE_PREFIX: Final = "resume: "
"""Start of the decision about a field that a resumed run changes."""

_SHOWN_CHARACTERS = 60


class Effect(StrEnum):
    """What a resume does with a changed field."""

    USED = "used"
    REFUSED = "refused"
    CHECKPOINT = "the checkpoint counts"


_FIRST_STEP = "from the first step on"
_SCHEDULE = "from the first step on, as a run from its start would have it there; a schedule() of the Task counts instead"
_FROM_HERE = "from the next evaluation on"
_SAME_CODE = "the code is the bundle of the earlier run"
_AS_ASKED = "as in any other run"

RESUMED_FIELDS: Final[Mapping[str, tuple[Effect, str]]] = {
    "train.learning_rate": (
        Effect.USED,
        "from the first step on, by the default optimizer and by an optimizer() that reads it",
    ),
    **dict.fromkeys(("train.schedule", "train.warmup"), (Effect.USED, _SCHEDULE)),
    **dict.fromkeys(
        ("train.epochs", "train.steps"),
        (Effect.USED, "the run's length from its start; a decaying schedule ends with it"),
    ),
    **dict.fromkeys(
        ("train.batch_size", "train.accumulate"),
        (Effect.USED, "the global batch is the one that the job asks for from the first step on"),
    ),
    **{
        f"train.{name}": (Effect.USED, _FIRST_STEP)
        for name in (
            "precision",
            "compile",
            "clip_grad_norm",
            "activation_checkpointing",
            "deterministic",
            "skip_nonfinite",
            "workers",
            "drop_last",
            *(
                f"parallel.{each}"
                for each in (
                    "data",
                    "tensor",
                    "pipeline",
                    "schedule",
                    "shard",
                    "reshard",
                    "offload",
                    "static_graph",
                    "find_unused",
                    "compress",
                    "bucket",
                )
            ),
        )
    },
    **{
        f"train.{name}": (Effect.USED, _FROM_HERE)
        for name in ("evaluate.every", "early_stopping.patience", "early_stopping.min_delta")
    },
    **dict.fromkeys(
        ("train.early_stopping.metric", "train.early_stopping.mode"),
        (Effect.USED, "early stopping and the best weights count anew from the next evaluation on"),
    ),
    "train.export": (
        Effect.USED,
        "with best, evaluations before the resume count only where that run exported its best weights, too",
    ),
    **dict.fromkeys(
        ("train.profile.at", "train.profile.steps"),
        (Effect.USED, "for steps that are not done yet"),
    ),
    "train.export_nonfinite": (Effect.USED, "at the end"),
    "train.seed": (
        Effect.CHECKPOINT,
        "weights and random states are the checkpoint's; the seed orders samples from the next epoch on",
    ),
    "train.init_from": (Effect.CHECKPOINT, "a resumed run has the checkpoint's weights"),
    "code.args": (
        Effect.USED,
        (
            "a Task is built with them, and its optimizer() and schedule() count where their settings change; of a script "
            "the state that it loads from its checkpoint may count"
        ),
    ),
    **dict.fromkeys(
        ("code.directory", "code.task", "code.script", "code.module", "code.requirements"),
        (Effect.REFUSED, _SAME_CODE),
    ),
    "code.include": (Effect.REFUSED, _SAME_CODE),
    **dict.fromkeys(
        ("code.command", "code.env", "code.launcher", "code.outputs"), (Effect.USED, _AS_ASKED)
    ),
    **dict.fromkeys(
        ("cluster.instances", "cluster.processes_per_instance"),
        (
            Effect.USED,
            "the global batch and the optimizer's settings stay, so that steps stay the same",
        ),
    ),
    **{
        f"cluster.{name}": (Effect.USED, _AS_ASKED)
        for name in (
            "instance_type",
            "prefer",
            "training_plan",
            "distribution",
            "spot",
            "framework",
            "image",
            "volume",
            "keep_alive",
            "max_pending",
            "queue",
            "remote_debug",
            "health_check",
            "network",
        )
    },
    **{
        f"checkpoint.{name}": (Effect.USED, _AS_ASKED)
        for name in ("uri", "every", "keep", "size", "resume")
    },
    "data": (
        Effect.USED,
        "in the middle of an epoch only with the same number of samples; otherwise the run ends with an error",
    ),
    **dict.fromkeys(
        (
            "name",
            "limits",
            "slurm",
            "metrics",
            "tracking",
            "output",
            "notify",
            "tags",
            "report",
            "request",
        ),
        (Effect.USED, _AS_ASKED),
    ),
}
"""Effect of each field, and when. A section whose fields are not named has one line."""

REFUSED_FIELDS: Final = tuple(
    name for name, (effect, _) in RESUMED_FIELDS.items() if effect is Effect.REFUSED
)


def describe_changes(spec: JobSpec, resumed: ResumeSource | None) -> Iterator[Diagnostic]:
    """Yield what becomes of each change of `train` and `code.args` in a run that resumes another one."""
    if resumed is None or not resumed.job:
        return
    defaults = {"train": Train(epochs=1).model_dump(mode="json") | {"epochs": None}}
    before = resumed.job
    now = spec.to_document()
    for path, (effect, text) in RESUMED_FIELDS.items():
        section = path.partition(".")[0]
        if section != "train" and path != "code.args":
            continue
        default = _find(defaults, path)
        old = _find(before, path, default)
        new = _find(now, path, default)
        if old == new:
            continue
        change = f"{path} was {_show(old)} and is {_show(new)}"
        if effect is Effect.CHECKPOINT:
            yield warning(f"{change}: {text}")
        elif path == "code.args":
            yield from _describe_arguments(spec, change)
        else:
            yield decision(f"{CHANGE_PREFIX}{change}: used {text}")


def _describe_arguments(spec: JobSpec, change: str) -> Iterator[Diagnostic]:
    if spec.code.task is not None:
        yield decision(
            f"{CHANGE_PREFIX}{change}: the Task is built with them, and new settings of its optimizer() and schedule() "
            "are used from the first step on"
        )
        return
    yield warning(
        f"{change}: {spec.code.entry} gets the new ones, but what it loads from its checkpoint counts, such as the "
        "learning rate in the state of an optimizer and of a scheduler: set it again after loading"
    )


def _find(document: Any, path: str, default: Any = None) -> Any:
    for name in path.split("."):
        if not isinstance(document, Mapping) or document.get(name) is None:
            return default
        document = document[name]
    return document


def _show(value: Any) -> str:
    text = "not set" if value is None else str(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}..."
