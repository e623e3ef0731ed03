"""Comparison of runs: the settings in which they differ, and the values of their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from cloudtrain.errors import CloudError, UserError
from cloudtrain.runs.evaluations import Evaluation
from cloudtrain.runs.history import SPEED_METRICS, MetricHistory, read_history
from cloudtrain.runs.main_metric import is_higher_better, is_lower_better, main_metric
from cloudtrain.runs.run import Run
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_JSON: Final = ("runs", "settings", "metrics")
_NAMED: Final = 3
"""Most values that a sentence names."""


@dataclass(frozen=True)
class ComparedSetting:
    """A setting in which runs differ.

    Attributes:
        path: Its path in job.yaml, such as `train.learning_rate`, or one of `code.digest`, `code.commit`.
        values: Its value in each run, in their order; None where a run does not have it.
    """

    path: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class ComparedMetric:
    """The values of a metric in several runs.

    Attributes:
        metric: Name such as `validation/loss`.
        last: Last value of each run; None where a run has none, or it is not finite.
        best: Best value of each run, by the metric's direction; equal to `last` where the direction is unknown.
        winner: Index of the run with the best value; None if the direction is unknown, fewer than two runs have one, or
            the runs have other data.
    """

    metric: str
    last: tuple[float | None, ...]
    best: tuple[float | None, ...]
    winner: int | None


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    A metric has a winner only among runs of the same data, because a loss of other data is another quantity. No run
    records a digest of all that it has read, so data are the same where nothing shows that they differ:

    - The channels of the job (`data` in job.yaml) have the same names and places.
    - The same Task or script builds the samples: the code may load or make data of its own. Its version may differ, so
      that a changed model can be compared with the one before.
    - Arguments of the code that name a place, such as `s3://bucket/prefix` or `/data/tokens`, are equal.
    - The split that the metric is about has the same number of samples in all runs that report one.

    A run without a plan.json, which something else has submitted, has unknown data.

    Attributes:
        runs: Reference of each run, such as `local:digits-261120-101500-1a2b3c`.
        settings: Settings that differ, by path.
        metrics: Metrics of any run, without those of the training's speed.
        common: Settings that are the same in all runs, by path.
        no_winner: By metric, a sentence that says in what the data of its runs differ.
    """

    runs: tuple[str, ...]
    settings: tuple[ComparedSetting, ...]
    metrics: tuple[ComparedMetric, ...]
    common: tuple[ComparedSetting, ...] = ()
    no_winner: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        runs: Iterable[str],
        plans: Sequence[Mapping[str, Any]],
        histories: Sequence[MetricHistory],
        evaluations: Sequence[Sequence[Evaluation]] = (),
    ) -> Comparison:
        """Return the comparison of runs from their plan.json, which may be empty, histories and evaluations."""
        reported = compare_metrics(histories)
        why = {each.metric: _other_data(each, plans, histories) for each in reported}
        metrics = [replace(each, winner=None) if why[each.metric] else each for each in reported]
        metrics += compare_evaluations(evaluations)
        settings = _all_settings(plans)
        return cls(
            runs=tuple(runs),
            settings=tuple(each for each in settings if not _is_common(each)),
            metrics=tuple(metrics),
            common=tuple(each for each in settings if _is_common(each)),
            no_winner={name: text for name, text in why.items() if text},
        )

    @property
    def note(self) -> str:
        """Why no run is the best, in one sentence; an empty string where metrics have winners."""
        if not self.no_winner:
            return ""
        reasons = list(dict.fromkeys(self.no_winner.values()))
        return f"No run is the best of all: {'; '.join(reasons)}."

    def to_json(self) -> dict[str, Any]:
        """Return the object that `compare --json` prints."""
        # As text and back, so that tuples become lists.
        content: dict[str, Any] = load_json(dump_json(asdict(self)))
        return {name: content[name] for name in _JSON}

    def to_page(self) -> dict[str, Any]:
        """Return what a page shows: that of `compare --json`, the common settings, and what is known of each metric."""
        content: dict[str, Any] = load_json(dump_json(asdict(self)))
        for metric in content["metrics"]:
            metric["direction"] = direction_of(metric["metric"])
            metric["why"] = self.no_winner.get(metric["metric"], "")
        # What tells runs apart comes first.
        content["metrics"].sort(key=lambda each: each["direction"] is None)
        main = main_metric(each.metric for each in self.metrics)
        return {**content, "note": self.note, "main": main, "speed": sorted(SPEED_METRICS)}


def compare_runs(runs: Iterable[Run]) -> Comparison:
    """Compare runs: the settings in which they differ, and the values of their metrics.

    Args:
        runs: At least two.

    Raises:
        UserError: There are fewer than two runs.
        CloudError: AWS refused or cannot be reached.
    """
    handles = list({run.reference: run for run in runs}.values())
    if len(handles) < 2:  # noqa: PLR2004 (a comparison needs two)
        raise UserError(
            "a comparison needs two different runs", "for example: cloudtrain compare RUN RUN"
        )
    return Comparison.of(
        [run.reference for run in handles],
        [read_plan(run) for run in handles],
        [read_history(run) for run in handles],
        [known_evaluations(run) for run in handles],
    )


def known_evaluations(run: Run) -> tuple[Evaluation, ...]:
    """Return the evaluations that are kept with a run, newest first; none where they cannot be read."""
    try:
        return run.evaluations()
    except (CloudError, UserError):
        # A policy may not allow to list the folder.
        return ()


def read_plan(run: Run) -> Mapping[str, Any]:
    """Return a run's plan.json; an empty one where there is none, because something else submitted the job."""
    try:
        return run.plan_document()
    except UserError:
        return {}


def differing_settings(plans: Sequence[Mapping[str, Any]]) -> tuple[ComparedSetting, ...]:
    """Return the settings in which plans differ.

    Args:
        plans: Contents of plan.json; an empty one for a run without a plan.
    """
    return tuple(each for each in _all_settings(plans) if not _is_common(each))


def _all_settings(plans: Sequence[Mapping[str, Any]]) -> list[ComparedSetting]:
    flat = [settings_of(plan) for plan in plans]
    paths = dict.fromkeys(path for settings in flat for path in settings)
    return [ComparedSetting(path, tuple(settings.get(path) for settings in flat)) for path in paths]


def _is_common(setting: ComparedSetting) -> bool:
    return all(value == setting.values[0] for value in setting.values)


def settings_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a plan.json by path: those of the job, digest and commit of the code, and the batch."""
    settings = dict(_flatten(plan.get("job", {}), ""))
    settings["code.digest"] = (plan.get("bundle") or {}).get("digest")
    settings["code.commit"] = (plan.get("source") or {}).get("commit")
    settings["global batch"] = (plan.get("batch") or {}).get("global")
    settings["ranks"] = (plan.get("cluster") or {}).get("world_size")
    return {path: value for path, value in settings.items() if value is not None}


def compare_metrics(histories: Sequence[MetricHistory]) -> tuple[ComparedMetric, ...]:
    """Return the last and best values of the metrics of training and evaluation in several runs."""
    names = dict.fromkeys(
        name for history in histories for name in history.metrics if name not in SPEED_METRICS
    )
    return tuple(_compare_metric(name, histories) for name in names)


def compare_evaluations(evaluations: Sequence[Sequence[Evaluation]]) -> tuple[ComparedMetric, ...]:
    """Return the metrics of the newest evaluation of each split in several runs, as `evaluated test/accuracy`.

    Evaluations of the weights that a run started with do not count. A metric has no winner where the runs were
    evaluated on other data, or on another number of samples.

    Args:
        evaluations: The evaluations of each run, newest first.
    """
    newest = [
        {name: each for each in reversed(found) if not each.is_initial for name in each.metrics}
        for found in evaluations
    ]
    names = dict.fromkeys(name for found in newest for name in found)
    return tuple(_compare_evaluated(name, [found.get(name) for found in newest]) for name in names)


def _compare_evaluated(name: str, evaluations: Sequence[Evaluation | None]) -> ComparedMetric:
    values = [None if each is None else each.metrics[name].value for each in evaluations]
    split = name.partition("/")[0]
    inputs = [
        (dict(each.data), each.splits[split].samples) for each in evaluations if each is not None
    ]
    compared = _choose_winner(f"evaluated {name}", values, values)
    if any(each != inputs[0] for each in inputs):
        # Values of different data cannot be compared.
        return replace(compared, winner=None)
    return compared


def _compare_metric(name: str, histories: Sequence[MetricHistory]) -> ComparedMetric:
    values = [[each.value for each in history.metrics.get(name, ())] for history in histories]
    last = [of_run[-1] if of_run else None for of_run in values]
    choose = _choice_of(name)
    if choose is None:
        return _choose_winner(name, last, last)
    best = [
        choose((each for each in of_run if each is not None), default=None) for of_run in values
    ]
    return _choose_winner(name, last, best)


def _choose_winner(
    name: str, last: Sequence[float | None], best: Sequence[float | None]
) -> ComparedMetric:
    choose = _choice_of(name)
    known = [(value, index) for index, value in enumerate(best) if value is not None]
    winner = None
    if len(known) > 1 and choose is not None:
        _, winner = choose(known, key=lambda pair: pair[0])
    return ComparedMetric(name, tuple(last), tuple(best), winner)


def _choice_of(metric: str) -> Any:
    """Return the function that chooses the best value of a metric: `max`, `min`, or None if it is unknown."""
    return {"max": max, "min": min, None: None}[direction_of(metric)]


def direction_of(metric: str) -> str | None:
    """Return `max` where a higher value of a metric is better, `min` where a lower one is, None if it is unknown."""
    higher = is_higher_better(metric)
    if higher == is_lower_better(metric):
        return None
    return "max" if higher else "min"


def _other_data(
    metric: ComparedMetric,
    plans: Sequence[Mapping[str, Any]],
    histories: Sequence[MetricHistory],
) -> str:
    """Return in what the data differ of the runs that have a metric; an empty string where nothing shows it."""
    if _choice_of(metric.metric) is None:
        return ""
    having = [index for index, value in enumerate(metric.best) if value is not None]
    if len(having) < 2:  # noqa: PLR2004 (one run has nothing to win against)
        return ""
    if not all(plans[index] for index in having):
        return "the data of a run without a plan are unknown"
    sources = [_sources_of(plans[index]) for index in having]
    for name in dict.fromkeys(name for source in sources for name in source):
        values = list(dict.fromkeys(source.get(name, "none") for source in sources))
        if len(values) > 1:
            return f"the runs differ in their {name} ({_some_of(values)})"
    split = metric.metric.rpartition("/")[0] or "train"
    known = [histories[index].samples.get(split) for index in having]
    counts = dict.fromkeys(f"{count:,}" for count in known if count is not None)
    if len(counts) > 1:
        return f"the {split} data have different numbers of samples ({_some_of(list(counts))})"
    return ""


def _sources_of(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return by name where a run's data come from: its channels, the code that builds the samples, and its arguments."""
    job = plan.get("job", {})
    code = job.get("code") or {}
    sources = {"code": str(code.get("task") or code.get("script") or "")}
    for name, channel in (job.get("data") or {}).items():
        place = channel if isinstance(channel, Mapping) else {"uri": channel}
        # How a channel is read changes none of its samples.
        parts = [str(place[key]) for key in ("uri", "fsx", "efs", "path") if place.get(key)]
        sources[f"data {name}"] = " ".join(parts)
    args = code.get("args") or {}
    for name, value in args.items() if isinstance(args, Mapping) else enumerate(args, 1):
        if isinstance(value, str) and ("://" in value or value.startswith("/")):
            sources[f"argument {name}"] = value
    return sources


def _some_of(values: Sequence[str]) -> str:
    shown = [value or "none" for value in values[:_NAMED]]
    return ", ".join(shown if len(values) <= _NAMED else [*shown, "and others"])


def _flatten(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from _flatten(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, content
