"""When a run asks its ranks to save before the time limit of its Slurm job, from the time that its saves take."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cloudtrain.backends.container.host_launcher import grace_seconds
from cloudtrain.backends.slurm.slurm_output import SlurmJob
from cloudtrain.runs.progress import Progress

_END_SECONDS = 60.0
"""Time for the end of the processes, and for the order that queues the job again."""
_MARGIN_SECONDS = 30.0


def needed_grace(environ: Mapping[str, str], progress: Progress) -> float:
    """Return the seconds that ranks get between a stop notice and their end.

    Args:
        environ: Environment of the batch step, whose grace period is the least.
        progress: What former attempts have measured.
    """
    checkpoints = (progress.checkpoint, *progress.checkpoints_before)
    slowest = max((each.seconds or 0.0 for each in checkpoints if each is not None), default=0.0)
    # A save may have begun just before the notice; the last one follows it.
    measured = 2 * slowest + _MARGIN_SECONDS
    return max(grace_seconds(environ), measured)


def notice_time(job: SlurmJob | None, grace: float) -> float:
    """Return when the stop notice is due, in seconds since the epoch; infinite for a job without a limit.

    A job of a few minutes gets it in the middle of its time.

    Args:
        job: The running job, as `scontrol` describes it.
        grace: Seconds between the notice and the end of the ranks.
    """
    if job is None or job.start is None or job.ends_by is None:
        return math.inf
    start, end = job.start.timestamp(), job.ends_by.timestamp()
    return max(end - grace - _END_SECONDS, (start + end) / 2)
