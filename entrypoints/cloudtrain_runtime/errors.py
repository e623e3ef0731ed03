"""Exceptions of the runtime. A `JobError` is reported by its message alone, without a traceback."""

from __future__ import annotations


class JobError(Exception):
    """Base class of mistakes in the job.

    Args:
        message: What is wrong, and what to do.
        is_common: Whether all ranks raise it, so that only rank 0 prints it.
    """

    def __init__(self, message: str = "", *, is_common: bool = False) -> None:
        super().__init__(message)
        self.is_common = is_common


class TaskError(JobError):
    """The Task cannot be loaded, or one of its methods does not behave as documented."""


class CheckpointError(JobError):
    """A checkpoint is missing, cannot be saved or loaded, or does not fit this job."""


class DamagedError(Exception):
    """A checkpoint's bytes are not those that were written."""
