"""Values of a run's status as text. Every screen takes them from here: commands, notebooks and the dashboard.

`now` is in seconds since the epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cloudtrain.support.units import format_duration, format_usd

if TYPE_CHECKING:
    from cloudtrain.runs.status import Status

YEAR_SECONDS = 365 * 86400
"""Of an estimate above this only the size is shown: it is a first guess."""

_RUNNING = "RUNNING"  # the module of `State` imports this one


def shown_reason(status: Status) -> str:
    """Return the first line of the state's reason; empty while steps show that the run trains."""
    if status.state == _RUNNING and status.progress.last_step is not None:
        return ""
    return status.reason.strip().partition("\n")[0]


def describe_state(status: Status) -> str:
    """Return the state with its reason: `FAILED: AlgorithmError`."""
    return ": ".join(filter(None, (str(status.state), shown_reason(status))))


def describe_steps(status: Status) -> str:
    """Return the completed steps: `610/1,000 steps`, or an empty string while they are unknown."""
    progress = status.progress
    if progress.last_step is None:
        return ""
    if progress.total_steps:
        return f"{progress.last_step:,}/{progress.total_steps:,} steps"
    epochs = f", {progress.last_epoch} epochs" if progress.last_epoch else ""
    return f"step {progress.last_step:,}{epochs}"


def describe_progress(status: Status, now: float) -> str:
    """Return the completed steps and the time left: `610/1,000 steps, 12m left`."""
    steps = describe_steps(status)
    return ", ".join(filter(None, (steps, status.describe_rest(now)))) if steps else ""


def describe_checkpoint(status: Status, now: float) -> str:
    """Return the last complete checkpoint and its age: `step 600, 25s ago`; an empty string without one."""
    checkpoint, age = status.progress.checkpoint, status.checkpoint_age(now)
    if checkpoint is None or age is None:
        return ""
    when = "before the end" if status.ended is not None else "ago"
    return f"step {checkpoint.step:,}, {format_duration(age)} {when}"


def describe_cost(status: Status, cost_usd: float | None) -> str:
    """Return the cost so far: `at most 17.82 USD` with spot, whose price is known at the end; or nothing."""
    if not status.uses_account:
        return ""
    if cost_usd is None:
        return "price unknown" if status.instance_type is not None else ""
    at_most = "at most " if status.is_spot and not status.state.is_final else ""
    return f"{at_most}{format_usd(cost_usd)}"


def status_texts(status: Status, now: float) -> dict[str, Any]:
    """Return the texts of a status that the dashboard shows."""
    risk = status.usd_at_risk(now)
    return {
        "reason": shown_reason(status),
        "steps": describe_steps(status),
        "left": status.describe_rest(now),
        "cost": describe_cost(status, status.cost_usd),
        "at_risk": format_usd(risk) if risk else "",
    }
