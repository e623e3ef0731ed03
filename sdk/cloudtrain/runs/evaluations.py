"""Results of `evaluate`, which are kept with the evaluated run, and their ranking."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import UserError, did_you_mean
from cloudtrain.runs.file_transfer import open_source
from cloudtrain.runs.main_metric import is_higher_better, main_metric
from cloudtrain.runs.shown_metrics import describe_metric
from cloudtrain_runtime.contract.events import CLASSES
from cloudtrain_runtime.contract.json_checks import (
    ObjectSchema,
    array,
    count,
    mapping,
    measurement,
    normalise,
    nullable,
    number,
    text,
    timestamp,
)
from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from cloudtrain.runs.downloads import RunStorage

EVALUATION_SUFFIX = "-evaluation"
"""End of the job's name of every evaluation."""
INITIAL_STEP = 0
"""Step of the weights that a run started with. No checkpoint has it."""

_FOLDER = "evaluations"
_SPLITS = ("test", "validation", "train")
_MEASURED = ObjectSchema(optional=dict.fromkeys(("value", "low", "high"), nullable(number)))
_CONFUSED = ObjectSchema({"true": text, "predicted": text, "count": count})
_PARTS = {
    "classification": ObjectSchema(
        optional={"classes": CLASSES, "most_confused": array(_CONFUSED), "step": nullable(count)}
    ),
    "calibration": ObjectSchema({"expected_error": number}),
    "residuals": ObjectSchema(dict.fromkeys(("mean", "mean_absolute"), measurement)),
    "own": ObjectSchema(),
}
"""Schemas of the analyses of a split: the fields that cloudtrain reads."""

_RESULT = ObjectSchema(
    {
        "run": text,
        "evaluated": text,
        "created": timestamp,
        "splits": mapping(
            ObjectSchema(
                {"samples": count, "metrics": mapping(_MEASURED)},
                {name: nullable(schema) for name, schema in _PARTS.items()},
            )
        ),
    },
    {"version": count, "weights": nullable(text), "step": nullable(count), "data": mapping(text)},
)


@dataclass(frozen=True)
class Measurement:
    """A metric with its 95 % confidence interval.

    Attributes:
        value: The value; None if it is not finite.
        low: Lower bound; None where it is unknown.
        high: Upper bound; None where it is unknown.
    """

    value: float | None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        shown = describe_metric(self.value)
        if self.low is None or self.high is None:
            return shown
        return f"{shown} ({describe_metric(self.low)} to {describe_metric(self.high)})"


@dataclass(frozen=True)
class EvaluatedSplit:
    """The evaluation of one split.

    Attributes:
        samples: Number of samples.
        metrics: Metrics by name, such as `accuracy`.
        analyses: Analyses by name, as in `analysis.json`: `classification`, `calibration`, `residuals`, `own`.
    """

    samples: int
    metrics: Mapping[str, Measurement]
    analyses: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation of a run's weights.

    Attributes:
        run: Id of the run that evaluated.
        evaluated: Reference of the evaluated run.
        created: When it was stored.
        splits: The evaluated splits.
        step: Step of the weights, 0 for those that the run started with, or None if it is unknown.
        weights: Uri of the weights; None where they are those of the Task's `model()`.
        data: Uri by channel.
    """

    run: str
    evaluated: str
    created: datetime
    splits: Mapping[str, EvaluatedSplit]
    step: int | None = None
    weights: str | None = None
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_initial(self) -> bool:
        """Whether the weights are those that the run started with, and not the result of its training."""
        return self.step == INITIAL_STEP

    @property
    def metrics(self) -> dict[str, Measurement]:
        """All metrics by `split/name`."""
        return {
            f"{split}/{name}": each
            for split, found in self.splits.items()
            for name, each in found.metrics.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return its entry in `evaluate --json`."""
        return {
            "run": self.run,
            "evaluated": self.evaluated,
            "created": self.created.isoformat(),
            "step": self.step,
            "weights": self.weights,
            "data": dict(self.data),
            "splits": {
                name: {
                    "samples": split.samples,
                    "metrics": {metric: vars(each) for metric, each in split.metrics.items()},
                    **split.analyses,
                }
                for name, split in self.splits.items()
            },
        }


@dataclass(frozen=True)
class Ranking:
    """Evaluations of several runs, the best first.

    Attributes:
        metric: Metric that they are ranked by, such as `test/accuracy`; None if they have none in common.
        evaluations: The evaluations.
        warnings: Why they may not be comparable, one sentence each.
    """

    metric: str | None
    evaluations: tuple[Evaluation, ...]
    warnings: tuple[str, ...] = ()


def evaluated_by(plan: Mapping[str, Any]) -> str:
    """Return the reference of the run that a run evaluates; an empty text for a run that trains."""
    return str(((plan.get("config") or {}).get("evaluation") or {}).get("run") or "")


def evaluations_folder(storage: RunStorage) -> str:
    """Return the uri of the folder with the evaluations of a run."""
    parent = storage.output.rstrip("/").rpartition("/")[0]
    if "://" not in parent:
        parent = Path(parent).as_uri()
    return f"{parent}/{_FOLDER}"


def read_evaluations(storage: RunStorage) -> tuple[Evaluation, ...]:
    """Return the evaluations that are kept with a run, newest first. Damaged files are left out.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    source = open_source(evaluations_folder(storage), storage.make_s3)
    names = [
        name for name, _, _ in source.files() if name.endswith(".json") and not name.startswith(".")
    ]
    found = (parse_evaluation(source.read(name)) for name in names)
    intact = [each for each in found if each is not None]
    return tuple(sorted(intact, key=lambda each: each.created, reverse=True))


def parse_evaluation(content: bytes) -> Evaluation | None:
    """Return the evaluation in a file; None if the file is damaged."""
    with contextlib.suppress(ValueError):
        fields = _RESULT(normalise(load_json(content)))
        splits = {
            name: EvaluatedSplit(
                split["samples"],
                {
                    metric: Measurement(*(each.get(part) for part in ("value", "low", "high")))
                    for metric, each in split["metrics"].items()
                },
                {part: split[part] for part in _PARTS if split.get(part) is not None},
            )
            for name, split in fields["splits"].items()
        }
        return Evaluation(
            run=fields["run"],
            evaluated=fields["evaluated"],
            created=datetime.fromtimestamp(fields["created"], UTC),
            splits=splits,
            step=fields.get("step"),
            weights=fields.get("weights"),
            data=fields.get("data", {}),
        )
    return None


def rank_evaluations(evaluations: Iterable[Evaluation], metric: str | None = None) -> Ranking:
    """Rank evaluations by a metric, the best first.

    Args:
        evaluations: The evaluations, usually of several runs on the same data.
        metric: Metric such as `test/accuracy`; by default the main metric of the test split, else of another split.

    Raises:
        UserError: The evaluations do not have this metric.
    """
    found = list(evaluations)
    common = [
        name
        for name in (found[0].metrics if found else {})
        if all(name in each.metrics for each in found)
    ]
    if metric is not None and metric not in common:
        raise UserError(
            f"the evaluations have no common metric {metric!r}", did_you_mean(metric, common)
        )
    chosen = metric or _choose(common)
    if chosen is None:
        return Ranking(None, tuple(found), _differences(found, None))
    sign = -1 if is_higher_better(chosen) else 1

    def order(each: Evaluation) -> tuple[bool, float]:
        value = each.metrics[chosen].value
        return value is None, sign * (value or 0.0)

    return Ranking(chosen, tuple(sorted(found, key=order)), _differences(found, chosen))


def _choose(metrics: Sequence[str]) -> str | None:
    """Return the metric to rank by: that of a quality before a loss, of the test split before others."""
    for split in _SPLITS:
        names = [name for name in metrics if name.startswith(f"{split}/")]
        quality = [name for name in names if is_higher_better(name)]
        main = main_metric(quality) or main_metric(names) or next(iter(quality or names), None)
        if main is not None:
            return main
    return None


def _differences(found: Sequence[Evaluation], metric: str | None) -> tuple[str, ...]:
    notes = []
    if metric is None:
        notes.append("the evaluations have no metric in common, so they are not ranked")
    if len({tuple(sorted(each.data.items())) for each in found}) > 1:
        notes.append("the evaluations read different data, so their values are not comparable")
    split = (metric or "").partition("/")[0]
    sizes = {each.splits[split].samples for each in found if split in each.splits}
    if len(sizes) > 1:
        notes.append(
            f"the {split} splits have different numbers of samples: {', '.join(map(str, sorted(sizes)))}"
        )
    return tuple(notes)
