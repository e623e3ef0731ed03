"""What a run has come to, in a few words: its key metrics, or why it has failed. One rule for every screen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from cloudtrain.runs.main_metric import TRAINING_LOSS, is_higher_better, main_metric
from cloudtrain.runs.shown_metrics import describe_metric, plain_metrics
from cloudtrain.runs.status import State, Status, describe_progress, shown_reason

_PLACES = (
    re.compile(r"^(?:AlgorithmError|ClientError|InternalServerError): "),
    re.compile(r"^rank \d+(?: on \S+)?(?: \(local rank \d+\))? (?:failed: )?"),
    re.compile(r"^error: "),
)
"""What stands before the message in a reason, and is the same for every failure of a kind."""


def key_metrics(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the metric of each evaluated split that tells best how good a run is; without any, its training loss.

    Args:
        metrics: Names such as `validation/accuracy`. Of a split, one whose higher values are better is preferred: a
            loss alone says little to somebody who does not know the job.
    """
    splits: dict[str, list[str]] = {}
    for name in plain_metrics(dict.fromkeys(metrics)):
        splits.setdefault(name.rpartition("/")[0], []).append(name)
    training = splits.pop("train", [])
    found = [_of_split(names) for _, names in sorted(splits.items(), key=_split_order)]
    if found:
        return tuple(found)
    main = main_metric(training)
    if main is not None:
        return (main,)
    return tuple(training[:1])


def _of_split(names: list[str]) -> str:
    good = sorted(name for name in names if is_higher_better(name))
    return good[0] if good else main_metric(names) or min(names)


def _split_order(item: tuple[str, list[str]]) -> tuple[int, str]:
    return {"test": 0, "validation": 1}.get(item[0], 2), item[0]


def describe_result(status: Status, now: float) -> str:
    """Return the key metric of a run that has succeeded, the error of one that has failed, and else its progress."""
    if status.state is State.SUCCEEDED:
        words = list(_metric_words(status.progress.metrics))[:1]
        return words[0] if words else describe_progress(status, now)
    if status.state is State.FAILED:
        return short_reason(status)
    return shown_reason(status) or describe_progress(status, now)


def _metric_words(metrics: Mapping[str, float | None]) -> Iterator[str]:
    for name in key_metrics(metrics):
        short = name if name == TRAINING_LOSS else name.rpartition("/")[2]
        yield f"{short} {describe_metric(metrics[name])}"


def short_reason(status: Status) -> str:
    """Return the reason without the rank, the host and the service's word that stand before it."""
    text = shown_reason(status)
    for place in _PLACES:
        text = place.sub("", text, count=1)
    return text
