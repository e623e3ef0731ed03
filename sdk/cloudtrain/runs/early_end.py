"""Whether a run whose containers have ended was complete. The exit code does not say it: SageMaker's is 0 after a stop."""

from __future__ import annotations

from cloudtrain.runs.progress import Progress

OUTSIDE_STOP = "stopped by a signal from outside"
"""Beginning of the reason of a run that something else than cloudtrain has stopped: preemption, a node drain, a logout."""


STOPPED_BY_REQUEST = "stopped by request"
"""The reason of a run that its user has stopped."""


def early_end(progress: Progress) -> str:
    """Return why a run that nobody has asked to stop has ended before its last step; empty if it is complete.

    Args:
        progress: What the run has reported until its end.
    """
    stopped = progress.stopped
    has_failed = any(not failure.get("secondary") for failure in progress.failures)
    if stopped is None or has_failed:
        return ""
    step = progress.last_step
    total = progress.total_steps
    if step is not None and total is not None and step >= total:
        return ""
    name = f" ({stopped['signal']})" if "signal" in stopped else ""
    if step is None:
        return f"{OUTSIDE_STOP}{name}"
    of_total = "" if total is None else f" of {total:,}"
    return f"{OUTSIDE_STOP}{name} after step {step:,}{of_total}"
