"""Causes outside of a job: a full disk, a lost network, expired credentials, no capacity, an image.

They say nothing about the job or its values, so a run that fails for one of them can be repeated.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from cloudtrain.backends.container.machine import is_disk_full
from cloudtrain.client.next_step import explain_with_next_step
from cloudtrain.errors import (
    CloudtrainError,
    CredentialsError,
    NoCapacityError,
    UnreachableError,
)
from cloudtrain.failure_rules.classes import FailureClass
from cloudtrain.runs.early_end import OUTSIDE_STOP
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status

_CLASSES = frozenset(
    {
        FailureClass.CAPACITY,
        FailureClass.IAM,
        FailureClass.IMAGE_PULL,
        FailureClass.MACHINE,
        FailureClass.QUOTA,
        FailureClass.S3_ACCESS,
        FailureClass.SERVICE,
        FailureClass.SPOT,
    }
)


def full_disk(folder: Path) -> str:
    """Return that the disk of a folder is full, or an empty text."""
    with contextlib.suppress(OSError):
        if is_disk_full(folder):
            return f"the disk is full ({folder})"
    return ""


def cause_of_error(error: Exception, home: Path) -> str:
    """Return the outside cause of a submit that has failed, or an empty text.

    Args:
        error: What the submit has raised.
        home: Folder of local runs and bundles.
    """
    if isinstance(error, UnreachableError | NoCapacityError | CredentialsError):
        return error.message
    return full_disk(home)


def cause_of_end(run: Run, status: Status, home: Path, *, shares_disk: bool) -> str:
    """Return the outside cause of the end of a run, or an empty text.

    Args:
        run: The run.
        status: Its status after its end.
        home: Folder of local runs.
        shares_disk: Whether the run wrote to this machine's disk. The disk of an instance belongs to the job.
    """
    if status.reason.startswith(OUTSIDE_STOP):
        return status.reason
    if status.state is not State.FAILED:
        return ""
    if shares_disk and (cause := full_disk(home)):
        return cause
    try:
        found = explain_with_next_step(run, status)
    except (CloudtrainError, OSError):
        return ""
    is_full = found.failure is FailureClass.DISK_FULL and shares_disk
    if found.failure is None or not (is_full or found.failure in _CLASSES):
        return ""
    return f"{found.failure.words}: {found.message}".partition("\n")[0]
