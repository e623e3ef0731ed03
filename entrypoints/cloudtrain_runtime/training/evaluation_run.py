"""A run that evaluates a Task's weights, without training: metrics with intervals, and analyses of the predictions."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from cloudtrain_runtime.contract import SPLITS, EvaluationConfig
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.process import heartbeat
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.s3.objects import S3Objects
from cloudtrain_runtime.task import overrides
from cloudtrain_runtime.training.bootstrap import Measured
from cloudtrain_runtime.training.classification import ClassificationAnalysis
from cloudtrain_runtime.training.sample_values import SampleValues
from cloudtrain_runtime.training.trainer import Trainer

VERSION: Final = 1
"""Version of a stored result."""

_PERPLEXITY = "perplexity"


def run_evaluation(trainer: Trainer, evaluation: EvaluationConfig) -> None:
    """Evaluate the initial weights of a trainer, and store the result with the evaluated run. All ranks call this.

    Raises:
        JobError: the Task has no split of a wanted name, or the result cannot be stored.
        TaskError: the Task's analysis is no mapping of JSON values.
    """
    context = trainer.context
    step = evaluation.step or 0
    splits = _splits(trainer, evaluation)
    began = time.monotonic()
    trainer.emit_started(step, None)
    if context.is_main:
        log_line(f"evaluates {', '.join(splits)} of {evaluation.run}, without training")
    found = {split: _evaluate_split(trainer, split, step) for split in splits}
    if not context.is_main:
        return
    result = {
        "version": VERSION,
        "run": context.run,
        "evaluated": evaluation.run,
        "weights": trainer.train.init_from,
        "step": evaluation.step,
        "created": time.time(),
        "data": evaluation.data,
        "splits": {split: each.to_json() for split, each in found.items()},
    }
    text = dump_json(result, indent=1) + "\n"
    # A slow disk is no hang.
    with heartbeat.exempt():
        folder = context.model_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "analysis.json").write_text(text, encoding="utf-8")
        _store(evaluation.place, f"{context.run}.json", text)
    emit("finished", step=step, epochs=0, seconds=time.monotonic() - began, samples_per_second=None)


@dataclass
class _SplitResult:
    """Metrics and analyses of a split."""

    split: str
    samples: int
    metrics: Mapping[str, Measured]
    classes: ClassificationAnalysis | None = None
    calibration: dict[str, Any] | None = None
    residuals: dict[str, Any] | None = None
    own: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return its entry in the stored result."""
        return {
            "samples": self.samples,
            "metrics": {name: asdict(each) for name, each in self.metrics.items()},
            "classification": None if self.classes is None else self.classes.to_json(),
            "calibration": self.calibration,
            "residuals": self.residuals,
            "own": self.own,
        }


def _splits(trainer: Trainer, evaluation: EvaluationConfig) -> Sequence[str]:
    known = list(trainer.datasets)
    if unknown := [split for split in evaluation.splits if split not in known]:
        raise JobError(f"--split {unknown[0]}: datasets() has {', '.join(known)}")
    others = [split for split in SPLITS if split in known and split != "train"]
    return evaluation.splits or others or ["train"]


def _evaluate_split(trainer: Trainer, split: str, step: int) -> _SplitResult:
    task = trainer.task
    context = trainer.context
    values = SampleValues()
    result = trainer.evaluator.evaluate(
        split, with_classes=overrides(task, "predict"), on_batch=values.add
    )
    values.gather(context)
    own = _own_analysis(trainer, split)
    metrics: dict[str, Measured] = {}
    if context.is_main:
        metrics = values.measure(result.means, trainer.train.seed)
    if task.tokens_per_sample and _PERPLEXITY not in metrics and "loss" in metrics:
        metrics[_PERPLEXITY] = metrics["loss"].map(_exp)
    found = _SplitResult(split, result.samples, metrics)
    if not context.is_main:
        return found
    shown = {name: each.value for name, each in metrics.items()}
    emit("evaluation", split=split, step=step, epoch=0, samples=result.samples, **shown)
    for name, each in metrics.items():
        low, high = _bounds(each)
        interval = f"  (95 %: {low} to {high})" if low else ""
        log_line(f"{split}/{name}  {each.value:.6g}{interval}")
    if result.confusion:
        found.classes = ClassificationAnalysis(
            result.confusion, task.classes, split=split, step=step, metrics={split: shown}
        )
        emit("analysis", **found.classes.to_event())
    found.calibration = values.calibration()
    found.residuals = values.residuals()
    found.own = own
    return found


def _own_analysis(trainer: Trainer, split: str) -> dict[str, Any] | None:
    """Return what the Task's `analyze` returns on this rank."""
    task = trainer.task
    if not overrides(task, "analyze"):
        return None
    trainer.model.eval()
    with torch.no_grad(), heartbeat.exempt():
        found: Any = task.analyze(trainer.model, split)
    if found is None:
        return None
    try:
        if isinstance(found, Mapping):
            dump_json(dict(found))
            return dict(found)
    except (TypeError, ValueError) as error:
        raise TaskError(f"analyze() must return JSON values by name: {error}") from None
    raise TaskError(
        f"analyze() must return a mapping of JSON values by name; it returned a {type(found).__name__}"
    )


def _store(place: str, name: str, text: str) -> None:
    """Write a file into a folder of this machine or of S3.

    Raises:
        JobError: it cannot be written.
    """
    try:
        if place.startswith("s3://"):
            S3Objects(place).put(name, text.encode())
            return
        folder = path_of(place)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{name}.{os.getpid()}"
        part.write_text(text, encoding="utf-8")
        part.replace(Path(folder, name))
    except OSError as error:
        raise JobError(f"the result cannot be stored in {place}: {error}") from None


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # noqa: PLR2004 (above it overflows)


def _bounds(measured: Measured) -> tuple[str, str]:
    low, high = ("" if each is None else f"{each:.6g}" for each in (measured.low, measured.high))
    return low, high
