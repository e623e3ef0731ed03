"""What the ranks have done between a start and their end, folded from a run's events, for the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cloudtrain_runtime.contract.events import Event

_MOST = 500
"""Most stretches that are kept: a script can print events without end."""

_KEPT_SAVES = 5
"""Number of the newest checkpoints of a stretch that a restart is looked up in."""

FINISHED = "finished"
LEFT = "left"
FAILED = "failed"
STOPPED = "stopped"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        step: Its step.
        until: The work up to this time is in it (seconds since the epoch).
        evaluation: Seconds of evaluations in the stretch up to then.
        stall: Seconds of saves in the stretch up to then.
    """

    step: int
    until: float
    evaluation: float
    stall: float


@dataclass(frozen=True)
class Stretch:
    """What the ranks have done from a start to their end. Times are in seconds since the epoch.

    Attributes:
        began: When training began, or the ranks of a script started.
        step: Step that it continues from; None for a script, which does not report it.
        ready: When its first step was done, or None.
        first: Step and time of the first reported step, or None.
        last_step: Newest step, or None.
        active: When it has shown progress last.
        step_seconds: Duration of a step, or None while it is unknown.
        evaluation: Seconds of evaluations.
        stall: Seconds for which training waited for saves.
        saves: Number of complete checkpoints whose stall is known.
        saved: The newest complete checkpoints.
        awaited: Step of a checkpoint after which no step has been reported, and the seconds of its save that were not
            counted as a stall; or None.
        uncounted_stall: Part of `stall` since `active`.
        ended: When it ended, or None.
        ending: How: `finished`, `left`, `failed` or `stopped`; empty before the end.
        hung: Seconds without progress before a hang was noticed.
        left: When its ranks were gone after `ended`, or None.
    """

    began: float
    step: int | None = None
    ready: float | None = None
    first: tuple[int, float] | None = None
    last_step: int | None = None
    active: float = 0.0
    step_seconds: float | None = None
    evaluation: float = 0.0
    stall: float = 0.0
    saves: int = 0
    saved: tuple[Saved, ...] = ()
    awaited: tuple[int, float] | None = None
    uncounted_stall: float = 0.0
    ended: float | None = None
    ending: str = ""
    hung: float = 0.0
    left: float | None = None


Stretches = tuple[Stretch, ...]

_Point = tuple[int, float]
"""Step and time."""


def fold_stretches(stretches: Stretches, event: Event) -> Stretches:
    """Return the stretches after an event from `parse_event`; those of other kinds and without a time change nothing."""
    time = event.get("time")
    if time is None:
        return stretches
    kind = event["event"]
    if kind in ("attempt", "started"):
        return _begin(stretches, event, time)
    if kind == "step":
        walk = StepWalk(stretches)
        walk.add(event)
        return walk.stretches
    fold = _FOLDS.get(kind)
    # An event of another host can arrive after the next start.
    if fold is None or not stretches or time < stretches[-1].began:
        return stretches
    return (*stretches[:-1], fold(stretches[-1], event, time))


def read_stretches(events: Iterable[Event]) -> Stretches:
    """Return the stretches of a run's events, in their order."""
    stretches: Stretches = ()
    for event in events:
        stretches = fold_stretches(stretches, event)
    return stretches


class StepWalk:
    """Adds the events of steps, of which there can be millions, to the newest stretch."""

    def __init__(self, stretches: Stretches) -> None:
        self._stretches = stretches
        self._first: _Point | None = None
        self._before: _Point | None = None
        self._last: _Point | None = None
        if stretches and stretches[-1].first is not None and stretches[-1].last_step is not None:
            self._first = stretches[-1].first
            self._last = stretches[-1].last_step, stretches[-1].active
        self._count = 0

    def add(self, event: Event) -> None:
        """Add an event of a step."""
        time = event.get("time")
        if time is None:
            return
        self._count += 1
        self._before = self._last
        self._last = event["step"], time
        if self._first is None:
            self._first = self._last

    @property
    def stretches(self) -> Stretches:
        """The stretches with these steps."""
        if not self._count or self._first is None or self._last is None:
            return self._stretches
        # A log of an early version has no event at the start of a script.
        newest = self._stretches[-1] if self._stretches else Stretch(self._first[1])
        rate = _rate(self._before, self._last) or newest.step_seconds
        ready = newest.ready
        if ready is None or newest.step_seconds is None:
            ready = _first_step_done(newest, self._first, rate)
        changed = replace(
            newest,
            first=self._first,
            ready=ready,
            last_step=self._last[0],
            active=max(newest.active, self._last[1]),
            step_seconds=rate,
            awaited=None,
            uncounted_stall=0.0,
        )
        return (*self._stretches[:-1], changed)


def _rate(one: _Point | None, other: _Point | None) -> float | None:
    """Return the seconds per step between two points; None if they do not show it."""
    if one is None or other is None or other[0] <= one[0]:
        return None
    return max(0.0, other[1] - one[1]) / (other[0] - one[0])


def _first_step_done(stretch: Stretch, first: _Point, step_seconds: float | None) -> float:
    """Return when the first step was done, which may not be the first that is reported."""
    number, time = first
    if stretch.step is None or step_seconds is None:
        return max(stretch.began, time)
    steps_before = max(0, number - stretch.step - 1)
    return max(stretch.began, time - steps_before * step_seconds)


def _begin(stretches: Stretches, event: Event, time: float) -> Stretches:
    step = event.get("step", 0) if event["event"] == "started" else None
    if stretches:
        newest = stretches[-1]
        is_untouched = newest.step is None and newest.first is None and newest.ended is None
        if step is not None and is_untouched:
            # A program that has reported its start is a Task.
            return (*stretches[:-1], replace(newest, step=step, last_step=step, active=time))
        if len(stretches) >= _MOST:
            return stretches
    return (*stretches, Stretch(time, step=step, last_step=step, active=time))


def _fold_evaluation(stretch: Stretch, event: Event, time: float) -> Stretch:
    """Count the time since the last sign of progress, without the steps in it."""
    found = _count_final_save(stretch, event)
    step = event.get("step", found.last_step)
    steps = 0
    if step is not None and found.last_step is not None:
        steps = max(0, step - found.last_step)
    seconds = time - found.active - found.uncounted_stall
    if steps:
        # Without a known rate, the time counts as that of the steps.
        rate = found.step_seconds
        seconds = 0.0 if rate is None else seconds - steps * rate
    return replace(
        found,
        # An evaluation of weights takes no step.
        ready=found.began if found.ready is None else found.ready,
        last_step=step,
        active=max(found.active, time),
        evaluation=found.evaluation + max(0.0, seconds),
        uncounted_stall=0.0,
    )


def _fold_checkpoint(stretch: Stretch, event: Event, time: float) -> Stretch:
    stall = event.get("stall_seconds")
    seconds = event.get("seconds")
    until = time
    awaited = None
    if stall is not None and seconds is not None:
        # What the ranks do after the copy is not in the checkpoint.
        until = max(stretch.began, time - max(0.0, seconds - stall))
        awaited = event["step"], max(0.0, seconds - stall)
    stretch = replace(
        stretch,
        stall=stretch.stall + (stall or 0.0),
        saves=stretch.saves + (stall is not None),
        awaited=awaited,
        uncounted_stall=stretch.uncounted_stall + (stall or 0.0),
    )
    saved = Saved(event["step"], until, stretch.evaluation, stretch.stall)
    return replace(stretch, saved=(*stretch.saved, saved)[-_KEPT_SAVES:])


def _count_final_save(stretch: Stretch, event: Event) -> Stretch:
    """Count a save that the ranks have waited for, at the end, as a stall: nothing was trained meanwhile."""
    if stretch.awaited is None or stretch.awaited[0] != event.get("step", stretch.awaited[0]):
        return stretch
    seconds = stretch.awaited[1]
    newest = stretch.saved[-1]
    kept = replace(newest, until=newest.until + seconds, stall=newest.stall + seconds)
    return replace(
        stretch,
        stall=stretch.stall + seconds,
        saved=(*stretch.saved[:-1], kept),
        awaited=None,
        uncounted_stall=stretch.uncounted_stall + seconds,
    )


def _fold_damaged(stretch: Stretch, event: Event, time: float) -> Stretch:
    del time
    kept = tuple(each for each in stretch.saved if each.step != event["step"])
    return replace(stretch, saved=kept)


def _end(stretch: Stretch, ending: str, time: float) -> Stretch:
    if stretch.ending in (FINISHED, FAILED, STOPPED):
        return stretch
    if stretch.ended is not None:
        # Ranks that have left can have failed.
        time = min(time, stretch.ended)
    return replace(stretch, ended=max(stretch.began, time), ending=ending)


def _fold_failed(stretch: Stretch, event: Event, time: float) -> Stretch:
    return _end(stretch, FAILED, min(time, event.get("failed_at", time)))


def _fold_hang(stretch: Stretch, event: Event, time: float) -> Stretch:
    found = _end(stretch, FAILED, time)
    if found.ending != FAILED:
        return found
    return replace(found, hung=max(found.hung, event.get("seconds", 0.0)))


def _fold_finished(stretch: Stretch, event: Event, time: float) -> Stretch:
    return _end(_count_final_save(stretch, event), FINISHED, time)


def _fold_stopped(stretch: Stretch, event: Event, time: float) -> Stretch:
    if stretch.ended is not None:
        return stretch
    return _end(_count_final_save(stretch, event), STOPPED, time)


def _fold_outputs(stretch: Stretch, event: Event, time: float) -> Stretch:
    """Fold the end of a host's ranks; the last host's counts."""
    del event
    found = replace(stretch, left=max(time, stretch.left or 0.0))
    if stretch.ending == LEFT or stretch.ended is None:
        return replace(found, ended=found.left, ending=LEFT)
    return found


def _fold_leaving(stretch: Stretch, event: Event, time: float) -> Stretch:
    done = _end(stretch, FINISHED, time - event.get("seconds", 0.0))
    return replace(done, left=max(time, done.left or 0.0))


_FOLDS = {
    "evaluation": _fold_evaluation,
    "checkpoint": _fold_checkpoint,
    "checkpoint_damaged": _fold_damaged,
    "failed": _fold_failed,
    "hang": _fold_hang,
    "finished": _fold_finished,
    "stopped": _fold_stopped,
    "outputs": _fold_outputs,
    "leaving": _fold_leaving,
}
FOLDED_KINDS = frozenset({"attempt", "started", *_FOLDS})
"""Kinds of events that change stretches, besides those of steps."""
