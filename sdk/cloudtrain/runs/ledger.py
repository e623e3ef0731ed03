"""The ledger of a run: where its seconds and its money went.

Each attempt, from the moment when the run gets its machines until it loses them, is a list of consecutive spans. So each
second that is paid belongs to exactly one kind. What the events do not show belongs to the kind that surrounds it.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from cloudtrain.runs.checkpoint_interval import best_interval, lost_share
from cloudtrain.runs.status import Phase, State, Status
from cloudtrain.runs.stretches import FAILED, FINISHED, LEFT, STOPPED, Saved, Stretch, Stretches
from cloudtrain.support.backend_facts import facts_of


class Kind(enum.StrEnum):
    """What seconds of a run were spent for."""

    WAITING = "waiting"
    """In a queue, or for capacity: not paid."""

    START = "start"
    """Download, image, installation, and all else until the first step is done."""

    TRAINING = "training"
    """Steps whose work was kept: it is in a checkpoint that the run continued from, or in its result."""

    EVALUATION = "evaluation"
    """Evaluations during the training and at its end."""

    CHECKPOINT = "checkpoint"
    """The training waited for a save."""

    REPEATED = "repeated"
    """Work after the last checkpoint before an interruption: it was done again, or is lost."""

    RESTART = "restart"
    """From an interruption until the next first step is done."""

    IDLE = "idle"
    """After the work until the end, and a hang."""

    UPLOAD = "upload"
    """Model and outputs were stored."""


class StartPart(enum.StrEnum):
    """A part of the start and of restarts."""

    DOWNLOAD = "the download of the data"
    IMAGE = "the image"
    LOADING = "packages, imports and data"
    FIRST_STEP = "the first step"


PAID = tuple(kind for kind in Kind if kind is not Kind.WAITING)


@dataclass(frozen=True)
class Span:
    """Consecutive seconds of one kind, from `began` to `ended` in seconds since the epoch.

    Within a stretch of training, evaluations and saves are summed up behind the training.
    """

    kind: Kind
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.ended - self.began


@dataclass(frozen=True)
class Attempt:
    """The spans of one attempt: of the wait before it, and from its start to its end, without a gap."""

    number: int
    spans: tuple[Span, ...]

    @property
    def paid(self) -> tuple[Span, ...]:
        """The spans on its machines."""
        return tuple(span for span in self.spans if span.kind is not Kind.WAITING)

    @property
    def paid_seconds(self) -> float:
        """Seconds on its machines."""
        return sum(span.seconds for span in self.paid)


@dataclass(frozen=True)
class Entry:
    """The sum of a kind. `usd` is None where the price is unknown."""

    kind: Kind
    seconds: float
    usd: float | None


@dataclass(frozen=True)
class Interval:
    """What an interval between two checkpoints would have cost: saves and repeated work, as Young and Daly estimate."""

    seconds: float
    lost_seconds: float
    usd: float | None


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run, measured.

    Attributes:
        count: Complete checkpoints whose stall is known.
        stall_seconds: Mean seconds for which the training waited for one.
        interval: The measured interval and what it costs by the estimate; None without a save.
        best: The best interval; None without an interruption, which the estimate needs.
        others: Half and twice the measured interval.
    """

    count: int = 0
    stall_seconds: float = 0.0
    interval: Interval | None = None
    best: Interval | None = None
    others: tuple[Interval, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """Where the seconds and the money of a run went.

    Attributes:
        run: Reference of the run.
        entries: The sum of each kind, in the order of `Kind`.
        attempts: The attempts, oldest first.
        seconds: All seconds that are paid: the sum of all entries but `waiting`. With spot, AWS bills fewer.
        waiting: Seconds that are not paid.
        billed_seconds: Seconds that are billed, or 0 for a run that is not billed.
        cost_usd: Cost of these; None where the price is unknown.
        interruptions: How often the training was interrupted and started again.
        saves: Its checkpoints.
        start_parts: Seconds of the parts of `start` and `restart`.
        hung_seconds: Part of `idle` before hangs were noticed.
        is_complete: Whether the run has ended.
    """

    run: str
    entries: tuple[Entry, ...]
    attempts: tuple[Attempt, ...]
    seconds: float
    waiting: float
    billed_seconds: int
    cost_usd: float | None
    interruptions: int
    saves: Saves
    start_parts: Mapping[StartPart, float]
    hung_seconds: float
    is_complete: bool

    def entry(self, kind: Kind) -> Entry:
        """Return the sum of a kind."""
        return next(each for each in self.entries if each.kind is kind)

    def share(self, *kinds: Kind) -> float:
        """Return the share of kinds in the paid seconds, 0 to 1."""
        if not self.seconds:
            return 0.0
        return sum(self.entry(kind).seconds for kind in kinds) / self.seconds

    @property
    def ratio(self) -> float | None:
        """The effective training time ratio: seconds of training that were kept / all seconds that were paid.

        Evaluations, saves, starts, restarts, repeated work, idle time and uploads are in the denominator only. Sources:
        "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (Meta, 2024, arXiv:2410.21680), whose
        ETTR is the productive share of a job's wall-clock time; MegaScale (NSDI 2024) and ByteRobust (2025) report
        the same ratio. Meta's also counts the time in the queue, which is not paid, so it is `waiting` here.
        None before the first paid second.
        """
        return self.share(Kind.TRAINING) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as an object of JSON."""
        return {
            "run": self.run,
            "is_complete": self.is_complete,
            "seconds": _round(self.seconds),
            "waiting_seconds": _round(self.waiting),
            "billed_seconds": self.billed_seconds,
            "cost_usd": _usd(self.cost_usd),
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "interruptions": self.interruptions,
            "entries": [
                {"kind": each.kind, "seconds": _round(each.seconds), "usd": _usd(each.usd)}
                for each in self.entries
            ],
            "attempts": [
                {
                    "attempt": each.number,
                    "spans": [
                        {
                            "kind": span.kind,
                            "began": _round(span.began),
                            "seconds": _round(span.seconds),
                        }
                        for span in each.spans
                    ],
                }
                for each in self.attempts
            ],
            "checkpoints": {
                "count": self.saves.count,
                "stall_seconds": _round(self.saves.stall_seconds),
                "interval": _interval(self.saves.interval),
                "best": _interval(self.saves.best),
                "others": [_interval(each) for each in self.saves.others],
            },
        }


def make_ledger(status: Status, now: float, stretches: Stretches | None = None) -> Ledger:
    """Return the ledger of a run, from what is recorded of it.

    Args:
        status: Its status.
        now: The end of what continues, in seconds since the epoch.
        stretches: What its ranks have done; by default as its status has it, which needs all events of the run.
    """
    known = status.progress.stretches if stretches is None else stretches
    periods = _periods(status, now)
    by_period = _assign(_find_kept_work(known, status), periods)
    attempts = tuple(
        Attempt(
            number,
            (*_wait_before(status, periods, number - 1), *_spans(period, works, status)),
        )
        for number, (period, works) in enumerate(zip(periods, by_period, strict=True), 1)
    )
    attempts = _with_last_wait(status, periods, attempts, now)
    sums = dict.fromkeys(Kind, 0.0)
    for span in itertools.chain.from_iterable(each.spans for each in attempts):
        sums[span.kind] += span.seconds
    paid = sum(period.ended - period.began for period in periods)
    scale = _scale(status, paid)
    seconds = {
        kind: value if kind is Kind.WAITING else value * scale for kind, value in sums.items()
    }
    total = paid * scale
    entries = tuple(
        Entry(kind, value, _cost_of(status, kind, value, total)) for kind, value in seconds.items()
    )
    starts = sum(max(1, len(works)) for works in by_period)
    found = Ledger(
        run=status.reference,
        entries=entries,
        attempts=attempts,
        seconds=total,
        waiting=seconds[Kind.WAITING],
        billed_seconds=status.billable_seconds,
        cost_usd=status.cost_usd,
        interruptions=max(0, starts - 1),
        saves=Saves(),
        start_parts=_split_start(status, known, seconds[Kind.START] + seconds[Kind.RESTART], now),
        hung_seconds=sum(each.hung for each in known),
        is_complete=status.state.is_final,
    )
    return replace(found, saves=_measure_saves(found, known))


@dataclass(frozen=True)
class _Period:
    """A period for which a run has its machines; results are stored from `upload` on, where that is known."""

    began: float
    ended: float
    upload: float | None
    is_first: bool
    is_last: bool


def _periods(status: Status, now: float) -> list[_Period]:
    """Return the periods that are paid, in order; each begins and ends as its backend has recorded it."""
    found: list[tuple[float, float, float | None]] = []
    if status.phases:
        found = [
            each for phases in _phases_by_attempt(status) for each in _billed_periods(phases, now)
        ]
    elif status.attempts:
        found = [(_time(each.started), _end(each, now), None) for each in status.attempts]
    elif status.started is not None:
        ended = now if status.ended is None else _time(status.ended)
        found = [(_time(status.started), ended, None)]
    last = len(found) - 1
    return [
        _Period(began, max(began, ended), upload, index == 0, index == last)
        for index, (began, ended, upload) in enumerate(found)
    ]


def _phases_by_attempt(status: Status) -> list[tuple[Phase, ...]]:
    """Return the phases of each attempt; those of the run where no attempt has its own."""
    own = [each.phases for each in status.attempts if each.phases]
    return own or [status.phases]


def _billed_periods(
    phases: Sequence[Phase], now: float
) -> Iterator[tuple[float, float, float | None]]:
    for is_billed, group in itertools.groupby(phases, key=lambda phase: phase.is_billed):
        members = list(group)
        if not is_billed:
            continue
        uploads = (_time(each.started) for each in members if each.name == "Uploading")
        yield _time(members[0].started), _end(members[-1], now), next(uploads, None)


def _wait_before(status: Status, periods: Sequence[_Period], index: int) -> Iterator[Span]:
    """Yield the wait before a period. A run that no queue has started does not wait."""
    began = None
    if index:
        began = periods[index - 1].ended
    elif (status.phases or status.attempts) and status.created is not None:
        began = _time(status.created)
    if began is not None and began < periods[index].began:
        yield Span(Kind.WAITING, began, periods[index].began)


def _with_last_wait(
    status: Status, periods: Sequence[_Period], attempts: tuple[Attempt, ...], now: float
) -> tuple[Attempt, ...]:
    """Return the attempts with the wait that no period has ended, as one without machines."""
    if periods:
        began = periods[-1].ended
    elif (status.phases or status.attempts) and status.created is not None:
        began = _time(status.created)
    else:
        return attempts
    if not _waits_at_the_end(status):
        return attempts
    ended = now if status.ended is None else _time(status.ended)
    if ended <= began:
        return attempts
    return (*attempts, Attempt(len(attempts) + 1, (Span(Kind.WAITING, began, ended),)))


def _waits_at_the_end(status: Status) -> bool:
    is_open = not status.state.is_final
    if is_open and status.attempts and status.attempts[-1].ended is not None:
        return True
    if status.phases:
        # The last phase of an ended job has no length.
        timed = [each for each in status.phases if each.ended is None or each.ended > each.started]
        return bool(timed) and not timed[-1].is_billed
    return False


@dataclass(frozen=True)
class _Work:
    """A stretch, and what was kept of its work: all of it, or where `is_cut` up to a checkpoint, or nothing."""

    stretch: Stretch
    is_cut: bool = False
    kept: Saved | None = None


def _find_kept_work(stretches: Stretches, status: Status) -> list[_Work]:
    """Return the stretches with what was kept of their work."""
    works: list[_Work] = []
    for stretch in stretches:
        _cut_before(works, stretch)
        works.append(_Work(stretch))
    if works and _has_lost_its_end(stretches[-1], status):
        saved = stretches[-1].saved
        works[-1] = _Work(stretches[-1], is_cut=True, kept=saved[-1] if saved else None)
    return works


def _cut_before(works: list[_Work], following: Stretch) -> None:
    """Note what is lost of the work before a restart."""
    step = _resumed_step(following)
    for index in reversed(range(len(works))):
        work = works[index]
        known = [each for each in work.stretch.saved if step is None or each.step <= step]
        found = known[-1] if known else None
        kept = found
        if work.is_cut:
            # An earlier restart can have lost more of it.
            kept = _earlier(work.kept, found)
        works[index] = _Work(work.stretch, is_cut=True, kept=kept)
        if found is not None or work.stretch.step == step:
            return


def _resumed_step(stretch: Stretch) -> int | None:
    """Return the step that a stretch has continued from: at most this one for a script; None if it is unknown."""
    if stretch.step is not None:
        return stretch.step
    return None if stretch.first is None else max(0, stretch.first[0] - 1)


def _earlier(one: Saved | None, other: Saved | None) -> Saved | None:
    if one is None or other is None:
        return None
    return min(one, other, key=lambda saved: saved.until)


def _has_lost_its_end(stretch: Stretch, status: Status) -> bool:
    """Whether the newest stretch has ended without keeping what it did after its last checkpoint."""
    if stretch.ending == FINISHED or status.state is State.SUCCEEDED:
        return False
    waits_again = status.state in (State.INTERRUPTED, State.QUEUED)
    return status.state.is_final or waits_again or stretch.ending in (FAILED, STOPPED)


def _assign(works: Sequence[_Work], periods: Sequence[_Period]) -> list[list[_Work]]:
    """Return what began in each period, or in the wait after it."""
    found: list[list[_Work]] = [[] for _ in periods]
    for work in works:
        at = sum(period.began <= work.stretch.began for period in periods)
        if periods:
            found[max(0, at - 1)].append(work)
    return found


def _spans(period: _Period, works: Sequence[_Work], status: Status) -> tuple[Span, ...]:
    """Return the spans of a period, which follow each other from its start to its end."""
    line = _Line(period)
    before = Kind.START if period.is_first else Kind.RESTART
    for index, work in enumerate(works):
        following = None if index + 1 == len(works) else works[index + 1].stretch
        limit = _limit(work.stretch, following, period)
        ready = _ready(work.stretch)
        if ready is None:
            line.advance(before, limit)
        else:
            line.advance(before, min(ready, limit))
            has_succeeded = period.is_last and status.state is State.SUCCEEDED
            _add_work(line, work, _work_end(work.stretch, limit, has_succeeded=has_succeeded))
            line.advance(Kind.IDLE, limit)
        before = Kind.RESTART
    stretches = [work.stretch for work in works]
    if not stretches:
        line.advance(before, period.ended if period.upload is None else period.upload)
    else:
        _add_tail(line, stretches[-1], status)
    line.advance(Kind.UPLOAD, period.ended)
    return tuple(line.spans)


def _limit(stretch: Stretch, following: Stretch | None, period: _Period) -> float:
    """Return when the ranks of a stretch have ended."""
    if stretch.ended is not None:
        return stretch.ended if following is None else min(stretch.ended, following.began)
    if following is not None:
        return min(max(stretch.active, stretch.began), following.began)
    return period.ended if period.upload is None else period.upload


def _ready(stretch: Stretch) -> float | None:
    """Return when training began; of a script that reports no step, when its ranks have started."""
    if stretch.ready is None and stretch.step is None:
        return stretch.began
    return stretch.ready


def _work_end(stretch: Stretch, limit: float, *, has_succeeded: bool) -> float:
    """Return when a stretch has done its last work."""
    if stretch.hung:
        return limit - stretch.hung
    is_script = stretch.step is None and stretch.first is not None
    has_left = stretch.ending == LEFT or (not stretch.ending and has_succeeded)
    return stretch.active if is_script and has_left else limit


def _add_work(line: _Line, work: _Work, worked: float) -> None:
    """Add the work of a stretch from its first step on: what was kept of it, and what was lost."""
    evaluation = work.stretch.evaluation
    stall = work.stretch.stall
    until = worked
    if work.is_cut:
        kept = work.kept
        evaluation = kept.evaluation if kept else 0.0
        stall = kept.stall if kept else 0.0
        until = min(worked, kept.until) if kept else line.end
    seconds = max(0.0, until - line.end)
    stall = min(stall, seconds)
    evaluation = min(evaluation, seconds - stall)
    line.advance(Kind.TRAINING, line.end + seconds - stall - evaluation)
    line.advance(Kind.EVALUATION, line.end + evaluation)
    line.advance(Kind.CHECKPOINT, until)
    line.advance(Kind.REPEATED, worked)


def _add_tail(line: _Line, last: Stretch, status: Status) -> None:
    """Add what follows the last work of a period up to its upload."""
    period = line.period
    upload = period.ended if period.upload is None else period.upload
    goes_on = not period.is_last or not status.state.is_final
    if last.ending in (FINISHED, LEFT):
        idle_until = last.left or line.end
        line.advance(Kind.IDLE, idle_until if period.upload is None else upload)
    else:
        line.advance(Kind.RESTART if goes_on else Kind.IDLE, upload)


class _Line:
    """The spans of a period so far. Each begins where the one before it ends, and none passes the period's end."""

    def __init__(self, period: _Period) -> None:
        self.period = period
        self.end = period.began
        self.spans: list[Span] = []

    def advance(self, kind: Kind, to: float) -> None:
        """Add a span up to a time; nothing if that is past already."""
        to = min(to, self.period.ended)
        if to <= self.end:
            return
        if self.spans and self.spans[-1].kind is kind:
            self.spans[-1] = replace(self.spans[-1], ended=to)
        else:
            self.spans.append(Span(kind, self.end, to))
        self.end = to


def _scale(status: Status, paid: float) -> float:
    """Return the factor from seconds between phases to billed seconds.

    AWS reports the billed seconds of an ended job as one number, which can differ from the times of its phases. With
    spot it is not a time: AWS lowers it for the discount.
    """
    is_reported = facts_of(status.backend).uses_account and status.state.is_final
    if not is_reported or status.is_spot or not paid or not status.billable_seconds:
        return 1.0
    return status.billable_seconds / paid


def _cost_of(status: Status, kind: Kind, seconds: float, total: float) -> float | None:
    if kind is Kind.WAITING or not total:
        return 0.0
    return None if status.cost_usd is None else status.cost_usd * seconds / total


def _split_start(
    status: Status, stretches: Stretches, total: float, now: float
) -> dict[StartPart, float]:
    """Return what the starts and restarts consist of: what the phases and the first steps show, and the rest."""
    found = dict.fromkeys(StartPart, 0.0)
    names = {"Downloading": StartPart.DOWNLOAD, "DownloadingTrainingImage": StartPart.IMAGE}
    for phase in itertools.chain.from_iterable(_phases_by_attempt(status)):
        if phase.name in names:
            found[names[phase.name]] += max(0.0, _end(phase, now) - _time(phase.started))
    waits = (each.ready - each.began for each in stretches if each.ready is not None)
    found[StartPart.FIRST_STEP] = sum(waits)
    found[StartPart.LOADING] = max(0.0, total - sum(found.values()))
    return found


def _measure_saves(ledger: Ledger, stretches: Stretches) -> Saves:
    count = sum(each.saves for each in stretches)
    stall = sum(each.stall for each in stretches)
    work = [Kind.TRAINING, Kind.EVALUATION, Kind.REPEATED, Kind.CHECKPOINT]
    seconds = sum(ledger.entry(kind).seconds for kind in work)
    if not count or not seconds:
        return Saves(count)
    mean = stall / count
    # Without a stall, a save costs nothing, and the estimate has no optimum.
    if not ledger.interruptions or not mean:
        return Saves(count, mean, Interval(seconds / count, stall, _price(ledger, stall)))
    between = ledger.seconds / ledger.interruptions

    def estimate(interval: float) -> Interval:
        lost = lost_share(interval, mean, between) * seconds
        return Interval(interval, lost, _price(ledger, lost))

    interval = seconds / count
    best = best_interval(mean, between)
    others = (estimate(interval / 2), estimate(interval * 2))
    return Saves(count, mean, estimate(interval), estimate(best), others)


def _price(ledger: Ledger, seconds: float) -> float | None:
    if ledger.cost_usd is None or not ledger.seconds:
        return None
    return ledger.cost_usd * seconds / ledger.seconds


def _interval(found: Interval | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "seconds": _round(found.seconds),
        "lost_seconds": _round(found.lost_seconds),
        "usd": _usd(found.usd),
    }


def _time(moment: datetime) -> float:
    return moment.timestamp()


def _end(phase: Phase, now: float) -> float:
    return now if phase.ended is None else _time(phase.ended)


def _round(seconds: float) -> float:
    return round(seconds, 3)


def _usd(usd: float | None) -> float | None:
    return None if usd is None else round(usd, 4)
