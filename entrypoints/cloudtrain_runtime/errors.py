"""What is the job's own mistake: the message says all that its author needs, a traceback would only hide it."""

from __future__ import annotations


class JobError(Exception):
    """Base of the job's mistakes."""


class TaskError(JobError):
    """The Task cannot be loaded or does not keep its promise."""


class CheckpointError(JobError):
    """There is no checkpoint to resume from, or it does not fit this job."""


class DamagedError(Exception):
    """A checkpoint has not the bytes that were written."""
