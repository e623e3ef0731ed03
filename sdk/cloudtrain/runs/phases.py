"""The phases of a run with how long each took: those of its backend, else those that its events show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from cloudtrain.runs.status import Phase, Status
from cloudtrain.support.units import format_duration

PhaseTime = tuple[str, float]
"""Name and seconds of a phase."""

_SHOWN = 5
_BREAKS = ("Interrupted", "Restarting")


def describe_phases(status: Status, now: float, *, between: str = " -> ") -> str:
    """Return the phases of a run: `Pending 2m10s -> Downloading 40s -> Training 3h12m`.

    Of many phases, the first ones are summed up. Phases of zero seconds are left out, except those that have ended an
    attempt.

    Args:
        status: The run's status.
        now: The end of a phase that continues, in seconds since the epoch.
        between: Text between two phases.
    """
    phases = phase_times(status, now)
    first = phases[:-_SHOWN]
    words = []
    if first:
        summed = sum(seconds for _, seconds in first)
        words.append(f"{format_duration(summed)} before")
    words += [
        f"{name} {format_duration(seconds)}" if _is_visible(seconds) else name
        for name, seconds in phases[-_SHOWN:]
    ]
    return between.join(words)


def phase_times(status: Status, now: float) -> list[PhaseTime]:
    """Return the phases so far with their seconds; consecutive ones of the same name are merged.

    A backend without phases shows the events of its run: it starts until a host is ready, loads until the ranks train,
    trains, and saves what remains. Of a script it is only known that it runs.
    """
    phases = status.phases or tuple(_seen_phases(status))
    return _merged(phases, now)


def run_seconds(status: Status, now: float) -> float | None:
    """Return how long a run has taken so far: from its start, else from its submit; None if that is unknown."""
    started = status.started or status.created
    if started is None:
        return None
    if status.ended is not None:
        return (status.ended - started).total_seconds()
    return None if status.state.is_final else now - started.timestamp()


def _seen_phases(status: Status) -> Iterator[Phase]:
    """Yield the phases that the events of a run show."""
    if status.started is None:
        return
    known = [(name, _moment(begun)) for name, begun in _seen_begins(status) if begun is not None]
    ends: list[datetime | None] = [begun for _, begun in known[1:]]
    ends.append(status.ended)
    for (name, begun), end in zip(known, ends, strict=True):
        yield Phase(name, begun, None if end is None else max(begun, end))


def _seen_begins(status: Status) -> Iterator[tuple[str, float | None]]:
    """Yield names and begins of the phases that the events and the attempts of a run show, in their order."""
    progress = status.progress
    is_script = progress.has_attempts and progress.began_at is None
    works = "running" if is_script else "training"
    started = None if status.started is None else status.started.timestamp()
    first_end = _end_of(status.attempts[:1])
    yield "starting", started
    yield ("running" if is_script else "loading"), _before(progress.prepared_at, first_end)
    yield "training", _before(progress.began_at, first_end)
    for before, attempt in itertools.pairwise(status.attempts):
        begun = attempt.started.timestamp()
        yield "waiting", _end_of([before])
        yield "restarting", begun
        trained = (each.began for each in progress.stretches if each.began >= begun)
        yield works, _before(next(trained, None), _end_of([attempt]))
    if status.attempts and not status.state.is_final:
        # Its queue has not started it again yet.
        yield "waiting", _end_of(status.attempts[-1:])
    yield "saving", progress.finished_at


def _end_of(attempts: Sequence[Phase]) -> float | None:
    if not attempts or attempts[0].ended is None:
        return None
    return attempts[0].ended.timestamp()


def _before(moment: float | None, end: float | None) -> float | None:
    """Return a moment that is before the end of an attempt; else None."""
    return None if moment is None or (end is not None and moment > end) else moment


def _merged(phases: Sequence[Phase], now: float) -> list[PhaseTime]:
    spans = []
    for phase in phases:
        ended = now if phase.ended is None else phase.ended.timestamp()
        seconds = max(0.0, ended - phase.started.timestamp())
        if phase.ended is None or phase.name in _BREAKS or _is_visible(seconds):
            spans.append((phase.name, seconds))
    groups = itertools.groupby(spans, key=lambda span: span[0])
    return [(name, sum(seconds for _, seconds in group)) for name, group in groups]


def _is_visible(seconds: float) -> bool:
    return round(seconds) > 0


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
