"""A run's progress, folded from its events."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.runs.host_reports import HostFiles, HostRanks, read_host_files, read_host_ranks


@dataclass(frozen=True)
class LastCheckpoint:
    """The newest complete checkpoint. `time` is in seconds since the epoch."""

    uri: str
    step: int
    time: float


@dataclass(frozen=True)
class MissedCheckpoint:
    """A checkpoint that was due and did not come.

    Attributes:
        step: Of which step.
        reason: `late`, `failed` or `stalled`.
        detail: What went wrong.
        count: How many in a row.
        alarm: Whether these are too many.
    """

    step: int
    reason: str
    detail: str
    count: int
    alarm: bool


@dataclass(frozen=True)
class Progress:
    """What the event lines of a run say so far.

    Attributes:
        first_step: Step that the run started from: 0, or that of the checkpoint it resumed.
        checkpoint: The newest complete checkpoint that is not known to be damaged.
        checkpoints_before: The last few before it.
        missed: The newest of the checkpoints that did not come since then.
        damaged: What was found damaged since then, one sentence each.
        metrics: Latest value by `split/name`; None for one that is not finite.
        failures: Failure events, one per host that reported one.
        slow_ranks: By rank, what is told of one that keeps the others waiting.
        bandwidth_gbps: What an all-reduce over all ranks achieved at the start, in Gbit/s.
        slow_network: What is wrong with that, or None.
        host_ranks: By host, what it reported last of a script's ranks.
        host_files: By host, what it reported of the job's files when its ranks had ended.
        marks: Times (seconds since the epoch) and steps of the last minutes, since the workers started last; the newest
            is last.
    """

    last_step: int | None = None
    first_step: int | None = None
    last_epoch: int | None = None
    total_steps: int | None = None
    world_size: int | None = None
    device: str | None = None
    checkpoint: LastCheckpoint | None = None
    checkpoints_before: tuple[LastCheckpoint, ...] = ()
    missed: MissedCheckpoint | None = None
    damaged: tuple[str, ...] = ()
    resumed_from: str | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    failures: tuple[Mapping[str, Any], ...] = ()
    slow_ranks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    bandwidth_gbps: float | None = None
    slow_network: str | None = None
    host_ranks: Mapping[str, HostRanks] = dataclasses.field(default_factory=dict)
    host_files: Mapping[str, HostFiles] = dataclasses.field(default_factory=dict)
    marks: tuple[tuple[float, int], ...] = ()

    def seconds_left(self, now: float) -> float | None:
        """Return how long the steps that are left will take at the rate of the last minutes; None when that is unknown.

        Evaluations and checkpoints are in the rate. When no step has come for much longer than usual, the rate falls.
        """
        if self.total_steps is None or len(self.marks) < 2:  # noqa: PLR2004 (a rate has two ends)
            return None
        (began, first), (newest, last) = self.marks[0], self.marks[-1]
        span, idle = newest - began, max(0.0, now - newest)
        if span <= 0 or last <= first:
            return None
        steps, usual = max(0, self.total_steps - last), span / (len(self.marks) - 1)
        if idle > _STALLS_AFTER * usual or idle > steps * span / (last - first):
            span, idle = span + idle, 0.0
        return steps * span / (last - first) - idle


_RATE_SECONDS = 600.0
"""How far back the rate of steps looks."""

_MARK_SECONDS = 10.0
"""Least time between two marks, so that a fast run has not many of them."""

_LEAST_MARKS = 5
_CHECKPOINTS_BEFORE = 4
"""How many checkpoints may turn out to be damaged, one after the other, and there still is one to tell of."""

_STALLS_AFTER = 3.0
"""A run is behind its rate when the next step takes this many times as long as steps usually do."""


def fold_events(events: Iterable[Mapping[str, Any]], progress: Progress = Progress()) -> Progress:
    """Return the progress that a run's events report, in their order.

    Args:
        events: Events as `parse_event` and `check_event` return them: their fields have the types of the schema.
        progress: What the events before them reported.
    """
    for kind, group in itertools.groupby(events, key=lambda event: event["event"]):
        if kind == "step":
            progress = _fold_steps(progress, group)
        elif (fold := _FOLDS.get(kind)) is not None:
            progress = functools.reduce(fold, group, progress)
    return progress


def _fold_started(progress: Progress, event: Mapping[str, Any]) -> Progress:
    # After a restart the same events come again; metrics of the earlier attempt stay until new ones arrive.
    return dataclasses.replace(
        progress,
        total_steps=event.get("total_steps"),
        world_size=event.get("world_size"),
        device=event.get("device"),
        first_step=event.get("step", 0),
        last_step=event.get("step", 0),
        resumed_from=event.get("resumed_from"),
        failures=(),
        slow_ranks={},
        marks=(),
    )


def _fold_step(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return _fold_steps(progress, (event,))


def _fold_steps(progress: Progress, events: Iterable[Mapping[str, Any]]) -> Progress:
    """Fold events of steps, of which there are many: one new record for all of them."""
    metrics, marks = dict(progress.metrics), progress.marks
    last_step, last_epoch = progress.last_step, progress.last_epoch
    for event in events:
        last_step, last_epoch = event.get("step", last_step), event.get("epoch", last_epoch)
        marks = _add_mark(marks, event)
        for name in _STEP_METRICS:
            value = event.get(name)
            if value is not None or (name in event and name in _ALWAYS_KNOWN):
                metrics[f"train/{name}"] = value
        split = event.get("split", {})
        metrics |= {f"train/{part}_seconds": split[part] for part in STEP_PARTS if split.get(part) is not None}
    return dataclasses.replace(progress, last_step=last_step, last_epoch=last_epoch, metrics=metrics, marks=marks)


_STEP_METRICS = (
    "loss",
    "samples_per_second",
    "tokens_per_second",
    "grad_norm",
    "data_wait",
    "mfu",
    "memory_bytes",
)
_ALWAYS_KNOWN = ("loss", "grad_norm")
"""Metrics of a step that are null only where they are not finite. Others are null where they are not known."""

STEP_PARTS = ("data", "forward", "backward", "optimizer", "checkpoint")
"""What the time of a step goes to; `train/<part>_seconds` are the metrics."""


def _add_mark(marks: tuple[tuple[float, int], ...], event: Mapping[str, Any]) -> tuple[tuple[float, int], ...]:
    time_, step = event.get("time"), event.get("step")
    if time_ is None or step is None:
        return marks
    kept = marks[:-1] if len(marks) > 1 and marks[-1][0] - marks[-2][0] < _MARK_SECONDS else marks
    oldest = time_ - _RATE_SECONDS
    first = next((index for index in range(len(kept)) if kept[index][0] >= oldest), len(kept))
    return (*kept[max(0, min(first, len(kept) + 1 - _LEAST_MARKS)) :], (time_, step))


def _fold_evaluation(progress: Progress, event: Mapping[str, Any]) -> Progress:
    split = event.get("split", "validation")
    values = {f"{split}/{name}": value for name, value in event.items() if name not in EVALUATION_FIELDS}
    return dataclasses.replace(progress, metrics={**progress.metrics, **values})


EVALUATION_FIELDS = frozenset({"event", "split", "step", "epoch", "time", "samples", "host", "rank"})
"""Fields of an evaluation that are no metrics."""


def _fold_checkpoint(progress: Progress, event: Mapping[str, Any]) -> Progress:
    checkpoint = LastCheckpoint(event["uri"], event["step"], event["time"])
    before = (*progress.checkpoints_before, *([progress.checkpoint] if progress.checkpoint else []))
    return dataclasses.replace(
        progress,
        checkpoint=checkpoint,
        checkpoints_before=before[-_CHECKPOINTS_BEFORE:],
        missed=None,
        damaged=(),
        last_step=max(event["step"], progress.last_step or 0),
    )


def _fold_missed(progress: Progress, event: Mapping[str, Any]) -> Progress:
    missed = MissedCheckpoint(
        step=event["step"],
        reason=event.get("reason", ""),
        detail=event.get("detail") or "",
        count=event.get("missed", 1),
        alarm=event.get("alarm", False),
    )
    return dataclasses.replace(progress, missed=missed)


def _fold_damaged(progress: Progress, event: Mapping[str, Any]) -> Progress:
    uri = event["uri"]
    told = f"the checkpoint of step {event['step']:,} is damaged and set aside, at {uri}: {event.get('detail') or '?'}"
    damaged = (*(text for text in progress.damaged if text != told), told)
    whole = [each for each in (*progress.checkpoints_before, progress.checkpoint) if each and each.uri != uri]
    return dataclasses.replace(
        progress,
        checkpoint=whole[-1] if whole else None,
        checkpoints_before=tuple(whole[:-1]),
        damaged=damaged,
    )


def _fold_straggler(progress: Progress, event: Mapping[str, Any]) -> Progress:
    rank = event["rank"]
    others = {other: text for other, text in progress.slow_ranks.items() if other != rank}
    told = f"rank {rank} on {event['host']} takes {event['ratio']:.2f} x the median of all ranks, most of it in "
    mine = {} if event.get("is_over") else {rank: told + event["part"]}
    return dataclasses.replace(progress, slow_ranks={**others, **mine})


def _fold_bandwidth(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(progress, bandwidth_gbps=event["gbps"], slow_network=event.get("warning"))


def _fold_finished(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(
        _fold_step(progress, event),
        last_epoch=event.get("epochs", progress.last_epoch),
    )


def _fold_failed(progress: Progress, event: Mapping[str, Any]) -> Progress:
    return dataclasses.replace(progress, failures=(*progress.failures, event))


def _fold_outputs(progress: Progress, event: Mapping[str, Any]) -> Progress:
    report = read_host_files(event)
    return dataclasses.replace(progress, host_files={**progress.host_files, report.host: report})


def _fold_ranks(progress: Progress, event: Mapping[str, Any]) -> Progress:
    report = read_host_ranks(event)
    return dataclasses.replace(progress, host_ranks={**progress.host_ranks, report.host: report})


_FOLDS: dict[str, Callable[[Progress, Mapping[str, Any]], Progress]] = {
    "started": _fold_started,
    "step": _fold_step,
    "evaluation": _fold_evaluation,
    "checkpoint": _fold_checkpoint,
    "checkpoint_missed": _fold_missed,
    "checkpoint_damaged": _fold_damaged,
    "straggler": _fold_straggler,
    "bandwidth": _fold_bandwidth,
    "finished": _fold_finished,
    "stopped": _fold_step,
    "failed": _fold_failed,
    "outputs": _fold_outputs,
    "ranks": _fold_ranks,
}
