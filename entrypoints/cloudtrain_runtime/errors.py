"""Exceptions of the runtime. A `JobError` is reported by its message alone, without a traceback."""

from __future__ import annotations


class JobError(Exception):
    """Base class of mistakes in the job."""


class TaskError(JobError):
    """The Task cannot be loaded, or one of its methods does not behave as documented."""


class CheckpointError(JobError):
    """A checkpoint is missing, cannot be saved or loaded, or does not fit this job."""


class DamagedError(Exception):
    """A checkpoint's bytes are not those that were written."""
