"""`limits.recover`: how often a run is continued by itself, and what all of its attempts may cost. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cloudtrain.job.recover_causes import RECOVER_CAUSES
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import Step, decision, error
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_duration, format_usd

if TYPE_CHECKING:
    from cloudtrain.job.sections.recover import Recover


def describe_recovery(limits: Recover) -> str:
    """Return after what a run is continued, and how often."""
    cost = "" if limits.cost is None else f" for {format_usd(limits.cost)}"
    return f"it continues by itself after {_causes(limits)}: at most {_attempts(limits)}{cost}"


def _causes(limits: Recover) -> str:
    if limits.on == RECOVER_CAUSES:
        return "an outside cause"
    return " or ".join(each.replace("_", " ") for each in limits.on)


def _attempts(limits: Recover) -> str:
    return f"{count(limits.attempts, 'attempt')} in {format_duration(limits.time)}"


def decide_recovery(spec: JobSpec, backend: str, highest_usd: float | None) -> Step[None]:
    """Check that `limits.recover.cost` pays for an attempt, and say what all attempts may cost.

    Args:
        spec: The job.
        backend: Where it runs.
        highest_usd: Estimate of one attempt at its time limit; None without a known price.
    """
    limits = spec.limits.recover
    if limits is None:
        return
    facts = facts_of(backend)
    if facts.has_sites:
        yield decision("limits.recover: the queue of Slurm continues the run, without these limits")
        return
    if not facts.uses_account:
        yield decision(f"limits.recover: at most {_attempts(limits)}, after {_causes(limits)}")
        return
    place = ("limits", "recover", "cost")
    if highest_usd is None:
        if limits.cost is not None:
            hint = "cloudtrain prices --refresh, or remove it and bound limits.recover.attempts"
            yield error(place, "it cannot be kept without a known price", hint)
        return
    if limits.cost is not None and highest_usd > limits.cost:
        hint = f"raise it to {math.ceil(highest_usd)} USD, or lower limits.runtime"
        together = f"all together {limits.cost:g} USD"
        yield error(place, f"one attempt may cost {format_usd(highest_usd)}, and {together}", hint)
        return
    most = limits.attempts * highest_usd
    if limits.cost is not None:
        most = min(most, limits.cost)
    yield decision(
        f"limits.recover: at most {_attempts(limits)}, after {_causes(limits)}; together they may cost {format_usd(most)}"
    )
