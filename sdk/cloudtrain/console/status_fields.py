"""A run's status as rows of a label and a value, for `status` and the live view of `follow`.

`now`, and `status_time` at which a status was fetched, are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.console import command_name
from cloudtrain.console.terminal import strip_escapes
from cloudtrain.errors import EXIT_DONE
from cloudtrain.runs.event_words import describe_devices
from cloudtrain.runs.phases import describe_phases
from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.runs.status import (
    YEAR_SECONDS,
    describe_checkpoint,
    describe_cost,
    describe_progress,
    shown_reason,
)
from cloudtrain.runs.step_parts import describe_seconds, step_parts
from cloudtrain.runs.titles import METRICS, describe_metric_value
from cloudtrain.support.notebook.summary import Row
from cloudtrain.support.units import format_duration, format_size, format_usd

if TYPE_CHECKING:
    from cloudtrain.runs.status import RunAttempt, Status

_SOON_SECONDS = 300
_DAY_SECONDS = 86400
_SHOWN_ATTEMPTS = 5


def state_rows(status: Status, now: float) -> Iterator[Row]:
    """Yield the state with the phases so far, its reason, and what the run waits for."""
    yield str(status.state), describe_phases(status, now)
    reason = shown_reason(status)
    if status.waiting is not None:
        yield "waiting", reason
        until = status.waiting.until
        types = " or ".join(status.waiting.types)
        end = ""
        if until:
            left = format_duration(until.timestamp() - now)
            end = f", gives up in {left} ({status.waiting.limit})"
        yield "for", f"{status.waiting.instances} x {types}{end}"
    elif reason and status.exit_code != EXIT_DONE:
        yield "reason" if status.is_ending else "now", reason


def attempt_rows(status: Status, now: float) -> list[Row]:
    """Return the newest attempts of a run that was continued: how long each took, what it saved, and why it ended."""
    if len(status.attempts) < 2:  # noqa: PLR2004 (the first attempt is the run)
        return []
    rows = [
        (f"attempt {number}", _describe_attempt(each, now))
        for number, each in enumerate(status.attempts, 1)
    ]
    return rows[-_SHOWN_ATTEMPTS:]


def _describe_attempt(attempt: RunAttempt, now: float) -> str:
    ended = now if attempt.ended is None else attempt.ended.timestamp()
    parts = [format_duration(ended - attempt.started.timestamp())]
    if attempt.checkpoint is not None:
        parts.append(f"saved step {attempt.checkpoint:,}")
    text = ", ".join(parts)
    reason = as_one_line(attempt.detail.strip().partition("\n")[0])
    return f"{text}: {reason}" if reason else text


def progress_row(status: Status, now: float) -> Row | None:
    """Return the completed steps and the time left, or None while they are unknown."""
    done = describe_progress(status, now)
    left = status.seconds_left(now)
    if not done:
        return None
    if not left or left > YEAR_SECONDS:
        return "progress", done
    moment = datetime.fromtimestamp(now + left, tz=UTC)
    if left < _DAY_SECONDS:
        return "progress", f"{done} (until {moment:%H:%M} UTC)"
    return "progress", f"{done} (until {moment:%Y-%m-%d %H:%M} UTC)"


def limit_row(status: Status, now: float) -> Row | None:
    """Return when the run's time limit ends it, if that is soon or before training completes; else None."""
    if status.ends_by is None:
        return None
    until = status.ends_by.timestamp() - now
    left = status.seconds_left(now)
    text = f"time limit in {format_duration(until)}"
    if left is None:
        # It is not known whether training completes before: the limit is shown when it is near.
        return ("limit", text) if until < _SOON_SECONDS else None
    if left > until:
        return "limit", f"{text}, {format_duration(left - until)} before training completes"
    return None


def metrics_row(status: Status) -> Row | None:
    """Return the latest metrics in one line with the speed, or None."""
    parts = shown_metrics(status.progress.metrics)
    rate = status.progress.metrics.get("train/samples_per_second")
    if rate is not None:
        parts.append(f"{rate:,.0f} {METRICS['samples_per_second'].unit}")
    return ("metrics", "  ".join(parts)) if parts else None


def step_row(status: Status) -> Row | None:
    """Return the duration of a step and the share of each part, or None while they are unknown."""
    parts = step_parts(status.progress.metrics)
    if not parts:
        return None
    total = sum(parts.values())
    shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in parts.items())
    return "step", f"{describe_seconds(total)}: {shares}"


def device_row(status: Status) -> Row | None:
    """Return tokens per second, utilisation and peak memory of a rank, or None while they are unknown."""
    metrics = status.progress.metrics
    tokens = metrics.get("train/tokens_per_second")
    mfu = metrics.get("train/mfu")
    memory = metrics.get("train/memory_bytes")
    parts = []
    if tokens is not None:
        parts.append(f"{tokens:,.0f} {METRICS['tokens_per_second'].unit}")
    if mfu is not None:
        parts.append(f"{METRICS['mfu'].text} {describe_metric_value('train/mfu', mfu)}")
    if memory is not None:
        parts.append(f"{format_size(memory)} of memory per rank at most")
    return ("device", ", ".join(parts)) if parts else None


def host_rows(status: Status) -> list[Row]:
    """Return what the hosts have, one row for all hosts that have the same."""
    hosts_by_text: dict[str, list[str]] = {}
    for host, event in sorted(status.progress.host_environments.items()):
        hosts_by_text.setdefault(describe_devices(event), []).append(host)
    several = len(hosts_by_text) > 1
    rows = [
        f"{', '.join(hosts)}: {text}" if several else text for text, hosts in hosts_by_text.items()
    ]
    return [("hosts", as_one_line(text)) for text in rows]


def warning_rows(status: Status) -> list[Row]:
    """Return warnings about what slows the run down, and those that its hosts report."""
    slow = [("slow", as_one_line(text)) for text in status.warnings()]
    return [*slow, *(("warning", as_one_line(text)) for text in status.host_warnings())]


def checkpoint_row(status: Status, now: float) -> Row | None:
    """Return the last complete checkpoint, its age and the cost of the work since then, or None."""
    checkpoint = describe_checkpoint(status, now)
    risk = status.usd_at_risk(now)
    at_risk = f", {format_usd(risk)} at risk" if risk else ""
    if not checkpoint and not at_risk:
        return None
    return "checkpoint", f"{checkpoint or 'none yet'}{at_risk}"


def alarm_rows(status: Status, now: float) -> list[Row]:
    """Return the alarms about the run's checkpoints."""
    return [("alarm", as_one_line(text)) for text in status.alarms(now)]


def spent_row(status: Status, now: float, *, status_time: float) -> Row | None:
    """Return the cost of the run so far, with that since `status_time`, and of what; None where it costs nothing."""
    cost = status.cost_by(now, read_at=status_time)
    text = describe_cost(status, cost)
    is_live = not status.state.is_final
    if not text:
        return None
    parts = [text]
    if status.instance_type:
        spot = " spot" if status.is_spot else ""
        parts.append(f"{status.instances or 1} x {status.instance_type}{spot}")
    # Nobody is billed for what a simulated account runs.
    name = "would cost" if status.is_simulated else "spent"
    if cost is None:
        return name, ", ".join(reversed(parts))
    if not is_live:
        parts.append(f"{format_duration(status.billable_seconds)} billed")
    elif status.usd_per_hour is not None:
        # The known price is that of instances on demand.
        on_demand = " on demand" if status.is_spot else ""
        parts.append(f"{format_usd(status.usd_per_hour)} per hour{on_demand}")
    return name, ", ".join(parts)


def time_row(status: Status, now: float) -> Row | None:
    """Return where the time of a run went that has ended or was interrupted; None where its events are not at hand."""
    from cloudtrain.runs.ledger import make_ledger
    from cloudtrain.runs.ledger_reading import has_all_events
    from cloudtrain.runs.ledger_words import status_text

    if not has_all_events(status):
        return None
    text = status_text(make_ledger(status, now))
    return ("time", text) if text else None


def pool_rows(status: Status) -> list[Row]:
    """Return the rows of a status about its warm pool; none when the run has no warm pool."""
    from cloudtrain.planning.warm_pool import clock_time

    pool = status.warm_pool
    if pool is None:
        return []
    kept = format_duration(pool.kept_seconds)
    paid = f"{kept}, {format_usd(pool.usd)}" if pool.usd is not None else kept
    if pool.is_available:
        text = "kept"
        if pool.until is not None:
            text += f" until {clock_time(pool.until)}"
        if status.usd_per_hour is not None:
            text += f" at {format_usd(status.usd_per_hour)} per hour"
        return [
            ("warm pool", f"{text} ({paid} so far)"),
            ("end pool", f"{command_name()} stop {status.reference} --pool"),
        ]
    if pool.reused_by:
        return [("warm pool", f"taken over by {pool.reused_by} after {paid}")]
    if pool.status == "InUse":
        text = "in use, and not kept after the end"
        if pool.keep_alive_seconds:
            text = f"kept for {format_duration(pool.keep_alive_seconds)} after the end"
        return [("warm pool", text)]
    if not pool.kept_seconds:
        return [("warm pool", "ended, or was not kept")]
    return [("warm pool", f"ended after {paid}")]


def as_one_line(text: str) -> str:
    """Return text as one line without cursor movements and colours."""
    return strip_escapes(text).replace("\n", "")
