"""A run's progress, folded from its events."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from cloudtrain.runs.stretches import FOLDED_KINDS, StepWalk, Stretches, fold_stretches
from cloudtrain.support.web_links import web_link
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.metric_values import metric_values, step_values


@dataclass(frozen=True)
class LastCheckpoint:
    """A complete checkpoint.

    Attributes:
        uri: Where it is.
        step: Its step.
        time: When it was complete, in seconds since the epoch.
        seconds: How long the save took, or None.
    """

    uri: str
    step: int
    time: float
    seconds: float | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a run, from its events so far.

    Attributes:
        last_step: Newest step, or None.
        first_step: Step that the run started from: 0, or that of the resumed checkpoint.
        last_epoch: Newest epoch, or None.
        total_steps: Number of planned steps, or None.
        world_size: Number of ranks, or None.
        device: Type of the device, or None.
        checkpoint: The newest complete checkpoint that is not known to be damaged.
        checkpoints_before: A few complete checkpoints before it.
        missed: Event of the newest checkpoint since then that was due but not written, or None.
        damaged: Damaged checkpoints since then, one sentence each.
        resumed_from: URI of the resumed checkpoint, or None.
        metrics: Latest value by `split/name`; None if it is not finite.
        failures: Failure events, one per failed host.
        stopped: Event of ranks or hosts that have ended before the last step because of a stop notice, or None.
        slow_ranks: Message by rank, for ranks that slow down the others.
        bandwidth_gbps: Bandwidth of an all-reduce over all ranks at the start, in Gbit/s.
        slow_network: Warning about the bandwidth, or None.
        host_environments: Latest event `environment` by host, about its driver, devices and packages.
        untracked: What was not logged, or why, by tracker.
        tracked: Where it is logged, by tracker: the address of a page, or the folder of offline files.
        host_ranks: Latest event `ranks` by host, about the ranks of a script.
        host_files: Event `outputs` by host, about the job's files at the end.
        finished_at: When a Task has done its work (seconds since the epoch), in its present attempt, or None.
        held: Event `leaving` by rank, of ranks that threads or children have held after their work was done.
        unmatched: Metrics whose patterns have found no value in the output, known at the end.
        attempt_step: Newest step of a script's present attempt, or None.
        has_attempts: Whether an event begins each attempt of the script.
        falls: How often a script's step was smaller than the last one of the same attempt.
        unread_metrics: Patterns for values that the output has and no pattern of the job reads; known at the end.
        hidden_failure: The error that the output ends with (see hidden_failure.py), or None; known at the end.
        marks: Times (seconds since the epoch) and steps of the last minutes, oldest first.
        fresh_start: Event of a trainer that has left out a checkpoint in its folder, or None.
        prepared_at: When the first host was ready to start its ranks (seconds since the epoch), or None.
        began_at: When a Task began to train for the first time (seconds since the epoch), or None.
        stretches: What the ranks have done from each start to their end.
    """

    last_step: int | None = None
    first_step: int | None = None
    last_epoch: int | None = None
    total_steps: int | None = None
    world_size: int | None = None
    device: str | None = None
    checkpoint: LastCheckpoint | None = None
    checkpoints_before: tuple[LastCheckpoint, ...] = ()
    missed: Event | None = None
    damaged: tuple[str, ...] = ()
    resumed_from: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    failures: tuple[Event, ...] = ()
    stopped: Event | None = None
    slow_ranks: Mapping[int, str] = field(default_factory=dict)
    bandwidth_gbps: float | None = None
    slow_network: str | None = None
    host_environments: Mapping[str, Event] = field(default_factory=dict)
    untracked: Mapping[str, str] = field(default_factory=dict)
    tracked: Mapping[str, str] = field(default_factory=dict)
    host_ranks: Mapping[str, Event] = field(default_factory=dict)
    host_files: Mapping[str, Event] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    finished_at: float | None = None
    held: Mapping[int, Event] = field(default_factory=dict)
    attempt_step: int | None = None
    has_attempts: bool = False
    falls: int = 0
    hidden_failure: str | None = None
    unread_metrics: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[tuple[float, int], ...] = ()
    fresh_start: Event | None = None
    prepared_at: float | None = None
    began_at: float | None = None
    stretches: Stretches = ()

    def seconds_left(self, now: float) -> float | None:
        """Return the time for the remaining steps at the rate of the last minutes; None if it is unknown.

        The rate includes evaluations and checkpoints. It falls if the next step takes much longer than usual.
        """
        if self.finished_at is not None:
            return 0.0
        if self.total_steps is None or len(self.marks) < 2:  # noqa: PLR2004 (a rate needs two points)
            return None
        began, first = self.marks[0]
        newest, last = self.marks[-1]
        span = newest - began
        if span <= 0 or last <= first:
            return None
        steps = max(0, self.total_steps - last)
        idle = max(0.0, now - newest)
        usual = span / (len(self.marks) - 1)
        if idle > _STALL_FACTOR * usual or idle > steps * span / (last - first):
            # The next step takes long, so the time since the newest one counts for the rate.
            span += idle
            idle = 0.0
        return steps * span / (last - first) - idle


_RATE_SECONDS = 600.0
"""Period of the rate."""

_MARK_SECONDS = 10.0
"""Minimum time between two marks, which limits their number."""

_LEAST_MARKS = 5
_CHECKPOINTS_BEFORE = 4
"""Number of earlier checkpoints that are kept in case newer ones turn out to be damaged."""

_STALL_FACTOR = 3.0
"""The rate falls if the next step takes this many times the usual time."""


_Fold = Callable[[Progress, Event], Progress]


def fold_events(events: Iterable[Event], progress: Progress = Progress()) -> Progress:
    """Return the progress after a run's events, in their order.

    Args:
        events: Events from `parse_event` or `check_event`, whose fields have the types of the schema.
        progress: Progress before these events.
    """
    for kind, group in itertools.groupby(events, key=lambda event: event["event"]):
        if kind == "step":
            progress = _fold_steps(progress, group)
        elif (fold := _FOLDS.get(kind)) is not None:
            if kind in FOLDED_KINDS:
                fold = _with_stretches(fold)
            progress = functools.reduce(fold, group, progress)
    return progress


def join_progress(earlier: Progress, newest: Progress) -> Progress:
    """Return the progress of a run after that of the attempt that it continues, which is a run of its own."""
    newer_or_older = {
        name: getattr(earlier if getattr(newest, name) is None else newest, name)
        for name in ("last_step", "last_epoch", "total_steps", "world_size", "device", "checkpoint")
    }
    first = earlier if earlier.prepared_at is not None else newest
    began = earlier if earlier.began_at is not None else newest
    return replace(
        newest,
        **newer_or_older,
        metrics={**earlier.metrics, **newest.metrics},
        tracked={**earlier.tracked, **newest.tracked},
        has_attempts=earlier.has_attempts or newest.has_attempts,
        prepared_at=first.prepared_at,
        began_at=began.began_at,
        stretches=(*earlier.stretches, *newest.stretches),
    )


def _with_stretches(fold: _Fold) -> _Fold:
    def both(progress: Progress, event: Event) -> Progress:
        found = fold(progress, event)
        return replace(found, stretches=fold_stretches(found.stretches, event))

    return both


def _fold_started(progress: Progress, event: Event) -> Progress:
    # After a restart, metrics of the earlier attempt stay until new ones arrive.
    return replace(
        progress,
        total_steps=event.get("total_steps"),
        world_size=event.get("world_size"),
        device=event.get("device"),
        first_step=event.get("step", 0),
        last_step=event.get("step", 0),
        resumed_from=event.get("resumed_from"),
        failures=(),
        stopped=None,
        finished_at=None,
        slow_ranks={},
        marks=(),
        began_at=event.get("time") if progress.began_at is None else progress.began_at,
    )


def _fold_tracking(progress: Progress, event: Event) -> Progress:
    """Fold an event of a tracker. One without a detail means that it answers."""
    name = event.get("tracker") or "mlflow"
    untracked = {each: text for each, text in progress.untracked.items() if each != name}
    if event.get("detail"):
        untracked[name] = event["detail"]
    # A script can print such an event, too.
    place = web_link(event.get("url", "")) or event.get("files", "")
    if not place:
        return replace(progress, untracked=untracked)
    return replace(progress, untracked=untracked, tracked={**progress.tracked, name: place})


def _fold_steps(progress: Progress, events: Iterable[Event]) -> Progress:
    """Fold consecutive step events into one new record, because there are many of them."""
    metrics = dict(progress.metrics)
    marks = progress.marks
    last_step = progress.last_step
    last_epoch = progress.last_epoch
    total_steps = progress.total_steps
    attempt_step = progress.attempt_step
    falls = progress.falls
    walk = StepWalk(progress.stretches)
    for event in events:
        if event["event"] == "step":
            walk.add(event)
        if progress.has_attempts and event["event"] == "step":
            falls += attempt_step is not None and event["step"] < attempt_step
            attempt_step = event["step"]
        last_step = event.get("step", last_step)
        last_epoch = event.get("epoch", last_epoch)
        total_steps = event.get("total_steps", total_steps)
        marks = _add_mark(marks, event)
        # Only histories contain the learning rate of a Task.
        metrics |= step_values({**event, "learning_rate": None})
    return replace(
        progress,
        last_step=last_step,
        last_epoch=last_epoch,
        total_steps=total_steps,
        metrics=metrics,
        attempt_step=attempt_step,
        falls=falls,
        marks=marks,
        stretches=walk.stretches,
    )


def _add_mark(marks: tuple[tuple[float, int], ...], event: Event) -> tuple[tuple[float, int], ...]:
    time_ = event.get("time")
    step = event.get("step")
    if time_ is None or step is None:
        return marks
    kept = marks
    if len(marks) > 1 and marks[-1][0] - marks[-2][0] < _MARK_SECONDS:
        # The last mark is too close to the one before it: the new one replaces it.
        kept = marks[:-1]
    oldest = time_ - _RATE_SECONDS
    first = next((index for index in range(len(kept)) if kept[index][0] >= oldest), len(kept))
    # A rate needs some marks, also where steps are so slow that all of them are old.
    first = max(0, min(first, len(kept) + 1 - _LEAST_MARKS))
    return (*kept[first:], (time_, step))


def _fold_checkpoint(progress: Progress, event: Event) -> Progress:
    checkpoint = LastCheckpoint(event["uri"], event["step"], event["time"], event.get("seconds"))
    before = progress.checkpoints_before
    if progress.checkpoint:
        before = (*before, progress.checkpoint)
    return replace(
        progress,
        checkpoint=checkpoint,
        checkpoints_before=before[-_CHECKPOINTS_BEFORE:],
        missed=None,
        damaged=(),
        last_step=max(event["step"], progress.last_step or 0),
    )


def _fold_damaged(progress: Progress, event: Event) -> Progress:
    uri = event["uri"]
    message = f"the checkpoint of step {event['step']:,} is damaged and was set aside ({uri}): {event.get('detail') or '?'}"
    damaged = (*(text for text in progress.damaged if text != message), message)
    intact = [
        each
        for each in (*progress.checkpoints_before, progress.checkpoint)
        if each and each.uri != uri
    ]
    return replace(
        progress,
        checkpoint=intact[-1] if intact else None,
        checkpoints_before=tuple(intact[:-1]),
        damaged=damaged,
    )


def _fold_straggler(progress: Progress, event: Event) -> Progress:
    rank = event["rank"]
    slow_ranks = {other: text for other, text in progress.slow_ranks.items() if other != rank}
    if not event.get("is_over"):
        slow_ranks[rank] = (
            f"rank {rank} on {event['host']} takes {event['ratio']:.2f} x the median of all ranks, mostly in "
            f"{event['part']}"
        )
    return replace(progress, slow_ranks=slow_ranks)


def _fold_attempt(progress: Progress, _: Event) -> Progress:
    """Fold the start of a script's ranks. Steps and metrics of the attempt before stay until new ones arrive."""
    return replace(
        progress, has_attempts=True, attempt_step=None, failures=(), marks=(), fresh_start=None
    )


def _fold_environment(progress: Progress, event: Event) -> Progress:
    prepared_at = progress.prepared_at
    if prepared_at is None:
        prepared_at = event.get("time")
    known = {**progress.host_environments, event["host"]: event}
    return replace(progress, host_environments=known, prepared_at=prepared_at)


def _fold_stopped(progress: Progress, event: Event) -> Progress:
    # The ranks report the step, and each host the signal that has ended it.
    return replace(_fold_steps(progress, (event,)), stopped={**(progress.stopped or {}), **event})


_FOLDS: dict[str, _Fold] = {
    "attempt": _fold_attempt,
    "started": _fold_started,
    "evaluation": lambda progress, event: replace(
        progress, metrics={**progress.metrics, **dict(metric_values(event))}
    ),
    "checkpoint": _fold_checkpoint,
    "checkpoint_missed": lambda progress, event: replace(progress, missed=event),
    "checkpoint_damaged": _fold_damaged,
    "straggler": _fold_straggler,
    "bandwidth": lambda progress, event: replace(
        progress, bandwidth_gbps=event["gbps"], slow_network=event.get("warning")
    ),
    "tracking": _fold_tracking,
    "finished": lambda progress, event: replace(
        _fold_steps(progress, (event,)),
        last_epoch=event.get("epochs", progress.last_epoch),
        stopped=None,
        finished_at=event.get("time"),
    ),
    "stopped": _fold_stopped,
    "failed": lambda progress, event: replace(progress, failures=(*progress.failures, event)),
    "environment": _fold_environment,
    "outputs": lambda progress, event: replace(
        progress, host_files={**progress.host_files, event["host"]: event}
    ),
    "leaving": lambda progress, event: replace(
        progress, held={**progress.held, event.get("rank") or 0: event}
    ),
    "fresh_start": lambda progress, event: replace(progress, fresh_start=event),
    "patterns": lambda progress, event: replace(progress, unmatched=tuple(event["unmatched"])),
    "hang": lambda progress, _: progress,
    "ranks": lambda progress, event: replace(
        progress, host_ranks={**progress.host_ranks, event["host"]: event}
    ),
}
