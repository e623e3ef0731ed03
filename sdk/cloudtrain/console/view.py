"""How a run stands, as rows of a name and a value: the same for `status` and for the live view of `follow`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.console.terminal import plain
from cloudtrain.errors import EXIT_DONE
from cloudtrain.runs.progress import STEP_PARTS
from cloudtrain.support.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.runs.status import Phase, Status, Waiting

Row = tuple[str, str]
"""What a line is about, and what it says."""

_PHASES = 5
_BREAKS = ("Interrupted", "Restarting")
_METRICS = 6
_SHOWN_ELSEWHERE = frozenset(
    f"train/{name}"
    for name in (
        "samples_per_second",
        "tokens_per_second",
        "grad_norm",
        "data_wait",
        "mfu",
        "memory_bytes",
        *(f"{part}_seconds" for part in STEP_PARTS),
    )
)
_SOON_SECONDS = 300
_DAY_SECONDS = 86400
_YEAR_SECONDS = 365 * _DAY_SECONDS


def state_rows(status: Status, now: float) -> Iterator[Row]:
    """Yield the state with the phases so far, why it is so, and what is waited for.

    Args:
        status: The run's status.
        now: Seconds since the epoch.
    """
    yield str(status.state), describe_phases(status, now)
    reason = status.reason.strip().split("\n")[0]
    if status.waiting is not None:
        yield "waiting", reason
        yield "for", _wanted(status.waiting, now)
    elif reason and status.is_ending and status.exit_code != EXIT_DONE:
        yield "reason", reason
    elif reason and status.progress.last_step is None:
        yield "now", reason


def progress_row(status: Status, now: float) -> Row | None:
    """Return how far training has come and how long it will take, or None while nothing is known of it."""
    done = describe_steps(status)
    if not done:
        return None
    left = status.seconds_left(now)
    if not left:
        return "progress", done
    if left > _YEAR_SECONDS:
        return "progress", f"{done}, more than a year left"
    moment = datetime.fromtimestamp(now + left, tz=UTC)
    until = f"{moment:%H:%M}" if left < _DAY_SECONDS else f"{moment:%Y-%m-%d %H:%M}"
    return "progress", f"{done}, {format_duration(left)} left (until {until} UTC)"


def limit_row(status: Status, now: float) -> Row | None:
    """Return when the run's limits end it, where that is soon or before training is done; else None."""
    if status.ends_by is None:
        return None
    until, left = status.ends_by.timestamp() - now, status.seconds_left(now)
    if left is not None and left > until:
        return "limit", f"its time is over in {_span(until)}, {format_duration(left - until)} before training is done"
    return ("limit", f"its time is over in {_span(until)}") if left is None and until < _SOON_SECONDS else None


def metrics_row(status: Status) -> Row | None:
    """Return the latest metrics in one line, those of the whole run before those of a step, or None."""
    metrics = plain_metrics(status)
    rate = status.progress.metrics.get("train/samples_per_second")
    names = sorted(metrics, key=lambda name: (name != "train/loss", name.partition("/")[0] != "test", name))
    parts = [f"{name} {describe_metric(metrics[name])}" for name in names[:_METRICS]]
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    return ("metrics", "  ".join(parts)) if parts else None


def describe_metric(value: float | None) -> str:
    """Return a metric's value for people."""
    return "not finite" if value is None else f"{value:.4g}"


def plain_metrics(status: Status) -> dict[str, float | None]:
    """Return the metrics that are not shown in another form."""
    return {name: value for name, value in status.progress.metrics.items() if name not in _SHOWN_ELSEWHERE}


def step_row(status: Status) -> Row | None:
    """Return where the time of a step goes, in one line, or None while that is not known."""
    metrics = status.progress.metrics
    parts = {part: metrics.get(f"train/{part}_seconds") for part in STEP_PARTS}
    known = {part: seconds for part, seconds in parts.items() if seconds is not None}
    total = sum(known.values())
    if not total:
        return None
    shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in known.items())
    return "step", f"{_short(total)}: {shares}"


def device_row(status: Status) -> Row | None:
    """Return tokens per second, utilisation and memory of a rank, or None where nothing is known of them."""
    metrics = status.progress.metrics
    tokens, mfu, memory = (metrics.get(f"train/{name}") for name in ("tokens_per_second", "mfu", "memory_bytes"))
    parts = [] if tokens is None else [f"{tokens:,.0f} tokens/s"]
    parts += [] if mfu is None else [f"MFU {mfu:.1%}"]
    parts += [] if memory is None else [f"{memory / 1e9:.1f} GB of memory per rank at most"]
    return ("device", ", ".join(parts)) if parts else None


def warning_rows(status: Status) -> list[Row]:
    """Return what makes the run slower than it could be, and what its hosts report."""
    slow = [("slow", harmless(text)) for text in status.warnings()]
    return [*slow, *(("warning", harmless(text)) for text in status.host_warnings())]


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def checkpoint_row(status: Status, now: float) -> Row | None:
    """Return the last complete checkpoint, its age, and what would be paid again if the run died now; or None.

    Args:
        status: The run's status.
        now: Seconds since the epoch.
    """
    checkpoint, age, risk = status.progress.checkpoint, status.checkpoint_age(now), status.usd_at_risk(now)
    at_risk = f", {risk:,.2f} USD at risk" if risk else ""
    if checkpoint is None or age is None:
        return ("checkpoint", f"none yet{at_risk}") if at_risk else None
    when = "before the end" if status.ended is not None else "ago"
    return "checkpoint", f"step {checkpoint.step:,}, {format_duration(age)} {when}{at_risk}"


def alarm_rows(status: Status, now: float) -> list[Row]:
    """Return what is wrong with the run's checkpoints. `now` is in seconds since the epoch."""
    return [("alarm", harmless(text)) for text in status.alarms(now)]


def spent_row(status: Status, now: float, *, told: float) -> Row | None:
    """Return what the run has cost so far and on what; None where nothing is paid for.

    Args:
        status: The run's status.
        now: Seconds since the epoch.
        told: When the status was told: what has been spent since then is added.
    """
    cost = status.cost_by(now, told=told)
    if status.backend == "local" or (cost is None and status.instance_type is None):
        return None
    if cost is None:
        return "spent", f"{status.instances or 1} x {status.instance_type}, whose price is not known"
    goes_on = not status.state.is_final
    parts = [f"{'at most ' if status.is_spot and goes_on else ''}{cost:,.2f} USD"]
    if status.instance_type:
        parts.append(f"{status.instances or 1} x {status.instance_type}" + (" spot" if status.is_spot else ""))
    if not goes_on:
        parts.append(f"{format_duration(status.billable_seconds)} billed")
    elif status.usd_per_hour is not None:
        parts.append(f"{status.usd_per_hour:,.2f} USD/h" + (" on demand" if status.is_spot else ""))
    return "spent", ", ".join(parts)


def harmless(text: str) -> str:
    """Return one line without what moves a terminal's cursor or changes its colours."""
    return plain(text).replace("\n", "")


def describe_phases(status: Status, now: float) -> str:
    """Return the stages of a run with how long each took: `Pending 2m10s -> Downloading 40s -> Training 3h12m`.

    Of many, the earliest are one sum, and those of no time are left out, but for what has ended an attempt. A backend
    that keeps none tells how long the run takes.
    """
    if not status.phases:
        if status.started is None:
            return ""
        ended = now if status.ended is None else status.ended.timestamp()
        return f"for {_span(ended - status.started.timestamp())}"
    spans = _merged(status.phases, now)
    earlier, shown = spans[:-_PHASES], spans[-_PHASES:]
    words = [f"{_span(sum(seconds for _, seconds in earlier))} before"] if earlier else []
    words += [f"{name} {_span(seconds)}" if _lasts(seconds) else name for name, seconds in shown]
    return " -> ".join(words)


def describe_steps(status: Status) -> str:
    """Return how far training has come: `610/1000 steps`, or an empty string."""
    progress = status.progress
    if progress.last_step is None:
        return ""
    if progress.total_steps:
        return f"{progress.last_step:,}/{progress.total_steps:,} steps"
    epochs = f", {progress.last_epoch} epochs" if progress.last_epoch else ""
    return f"step {progress.last_step:,}{epochs}"


def _merged(phases: Sequence[Phase], now: float) -> list[tuple[str, float]]:
    """Return names and seconds of phases, those of one name in a row as one."""
    spans = [
        (phase.name, (now if phase.ended is None else phase.ended.timestamp()) - phase.started.timestamp())
        for phase in phases
        if phase.ended is None or phase.name in _BREAKS or _lasts((phase.ended - phase.started).total_seconds())
    ]
    groups = itertools.groupby(spans, key=lambda span: span[0])
    return [(name, sum(seconds for _, seconds in group)) for name, group in groups]


def _lasts(seconds: float) -> bool:
    return round(seconds) > 0


def _wanted(waiting: Waiting, now: float) -> str:
    types = " or ".join(waiting.types)
    until = f", gives up in {_span(waiting.until.timestamp() - now)} ({waiting.limit})" if waiting.until else ""
    return f"{waiting.instances} x {types}{until}"


def _span(seconds: float) -> str:
    """Return a duration; clocks that differ make none negative."""
    return format_duration(max(0.0, seconds))
