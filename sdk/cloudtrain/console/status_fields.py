"""A run's status as rows of a label and a value, for `status` and the live view of `follow`.

`now`, and `status_time` at which a status was fetched, are in seconds since the epoch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cloudtrain.console import command_name
from cloudtrain.console.terminal import strip_escapes
from cloudtrain.errors import EXIT_DONE
from cloudtrain.runs.shown_metrics import shown_metrics
from cloudtrain.runs.status import (
    YEAR_SECONDS,
    describe_checkpoint,
    describe_cost,
    describe_progress,
    shown_reason,
)
from cloudtrain.support.notebook.summary import Row
from cloudtrain.support.units import format_duration, format_size, format_usd
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.metric_values import STEP_PARTS

if TYPE_CHECKING:
    from cloudtrain.runs.status import Phase, Status

_PHASES = 5
_BREAKS = ("Interrupted", "Restarting")
_SOON_SECONDS = 300
_DAY_SECONDS = 86400


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
        parts.append(f"{rate:,.0f} samples/s")
    return ("metrics", "  ".join(parts)) if parts else None


def step_row(status: Status) -> Row | None:
    """Return the duration of a step and the share of each part, or None while they are unknown."""
    metrics = status.progress.metrics
    parts = {part: metrics.get(f"train/{part}_seconds") for part in STEP_PARTS}
    known = {part: seconds for part, seconds in parts.items() if seconds is not None}
    total = sum(known.values())
    if not total:
        return None
    shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in known.items())
    duration = f"{total:.3g} s" if total >= 1 else f"{total * 1e3:.3g} ms"
    return "step", f"{duration}: {shares}"


def device_row(status: Status) -> Row | None:
    """Return tokens per second, utilisation and peak memory of a rank, or None while they are unknown."""
    metrics = status.progress.metrics
    tokens = metrics.get("train/tokens_per_second")
    mfu = metrics.get("train/mfu")
    memory = metrics.get("train/memory_bytes")
    parts = []
    if tokens is not None:
        parts.append(f"{tokens:,.0f} tokens/s")
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")
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
    return [("" if index else "hosts", as_one_line(text)) for index, text in enumerate(rows)]


def describe_environment(event: Event) -> str:
    """Return what a host has, by its event `environment`: devices, versions and sizes in rounded numbers."""
    names = {"memory_bytes": "memory", "shm_bytes": "shared memory", "disk_free_bytes": "free disk"}
    sizes = [
        f"{format_size(event[name])} {word}"
        for name, word in names.items()
        if event.get(name) is not None
    ]
    return ", ".join([describe_devices(event), *sizes])


def describe_devices(event: Event) -> str:
    """Return the devices and versions in an event `environment`, which hosts of one type share."""
    gpus: Counter[str] = Counter(event.get("gpus", ()))
    efa = event.get("efa", ())
    packages = event.get("packages", {})
    driver = event.get("driver")
    parts = [f"{count} x {name}" for name, count in gpus.items()] or ["no GPU"]
    if driver is not None:
        compat = f" with {event['cuda_compat']}" if event.get("cuda_compat") else ""
        parts.append(f"driver {driver}{compat}")
    if event.get("cuda"):
        parts.append(f"CUDA {event['cuda']}")
    if efa:
        parts.append(f"{len(efa)} EFA ({event.get('efa_provider') or 'no provider'})")
    if "torch" in packages:
        parts.append(f"torch {packages['torch']}")
    if "python" in event:
        parts.append(f"Python {event['python']}")
    return ", ".join(parts)


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
    if cost is None:
        return "spent", ", ".join(reversed(parts))
    if not is_live:
        parts.append(f"{format_duration(status.billable_seconds)} billed")
    elif status.usd_per_hour is not None:
        # The known price is that of instances on demand.
        on_demand = " on demand" if status.is_spot else ""
        parts.append(f"{format_usd(status.usd_per_hour)} per hour{on_demand}")
    return "spent", ", ".join(parts)


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
            ("", f"end it: {command_name()} stop {status.reference} --pool"),
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


def describe_phases(status: Status, now: float) -> str:
    """Return the stages of a run with how long each took: `Pending 2m10s -> Downloading 40s -> Training 3h12m`.

    Of many stages, the first ones are summed up. Stages of zero seconds are left out, except those that have ended an
    attempt. For a backend without stages the result is the run's duration.
    """
    if not status.phases:
        if status.started is None:
            return ""
        ended = now if status.ended is None else status.ended.timestamp()
        return f"for {format_duration(ended - status.started.timestamp())}"
    spans = _merged(status.phases, now)
    first = spans[:-_PHASES]
    shown = spans[-_PHASES:]
    words = []
    if first:
        summed = sum(seconds for _, seconds in first)
        words.append(f"{format_duration(summed)} before")
    words += [
        f"{name} {format_duration(seconds)}" if _is_visible(seconds) else name
        for name, seconds in shown
    ]
    return " -> ".join(words)


def _merged(phases: Sequence[Phase], now: float) -> list[tuple[str, float]]:
    """Return names and seconds of phases; consecutive phases of the same name are merged."""
    spans = []
    for phase in phases:
        ended = now if phase.ended is None else phase.ended.timestamp()
        seconds = ended - phase.started.timestamp()
        if phase.ended is None or phase.name in _BREAKS or _is_visible(seconds):
            spans.append((phase.name, seconds))
    groups = itertools.groupby(spans, key=lambda span: span[0])
    return [(name, sum(seconds for _, seconds in group)) for name, group in groups]


def _is_visible(seconds: float) -> bool:
    return round(seconds) > 0
