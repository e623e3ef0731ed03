"""Pauses of a controller: while the disk is full, or AWS cannot be reached, it starts nothing and records why."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cloudtrain.controllers.folder import ControllerFolder
from cloudtrain.controllers.outside_causes import full_disk
from cloudtrain.errors import CloudError, CredentialsError, UnreachableError

_RETRY_SECONDS = 30.0
_LONGEST_RETRY_SECONDS = 600.0
_MOST_DOUBLINGS = 10
_DISK_SECONDS = 1.0
_MOST_LAST_COPIES = 5
T = TypeVar("T")


class Pauses:
    """The pauses of one controller.

    Args:
        place: Its folder.
        report: Called with one line about each new cause.

    Attributes:
        cause: Why it pauses at present; empty for no reason.
    """

    def __init__(self, place: ControllerFolder, report: Callable[[str], None]) -> None:
        self._place = place
        self._report = report
        self._until = 0.0
        self.cause = ""

    @property
    def is_over(self) -> bool:
        """Whether the time of the last pause is over."""
        return time.monotonic() >= self._until

    def begin(self, cause: str, repeats: int = 0, *, shortest_seconds: float | None = None) -> None:
        """Start nothing for a time, and record why.

        Args:
            cause: Why.
            repeats: Number of earlier pauses in a row, with which the time grows.
            shortest_seconds: The time of the first one; by default 30 s.
        """
        shortest = _RETRY_SECONDS if shortest_seconds is None else shortest_seconds
        seconds = shortest * 2 ** min(repeats, _MOST_DOUBLINGS)
        self._begin(cause, min(_LONGEST_RETRY_SECONDS, seconds))

    def _begin(self, cause: str, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        if cause != self.cause:
            self.cause = cause
            self._place.write_pause(cause)
            self._report(f"paused: {cause}")

    def end(self) -> None:
        """End a pause."""
        self.cause = ""
        self._place.write_pause("")

    def may_start(self) -> bool:
        """Return whether a run may start now."""
        if not self.is_over:
            return False
        if cause := full_disk(self._place.home):
            self._begin(cause, _DISK_SECONDS)
            return False
        if self.cause:
            self.end()
        return True

    def write(self, write: Callable[[], T]) -> T:
        """Write a record; while the disk is full, wait until it can be written."""
        while True:
            try:
                return write()
            except Exception:  # SQLite, SQLAlchemy and Optuna have an exception each
                cause = full_disk(self._place.folder)
                if not cause:
                    raise
                self._begin(cause, _DISK_SECONDS)
                time.sleep(_DISK_SECONDS)

    def copy(self, copy: Callable[[], None]) -> None:
        """Copy the record to S3, and wait while it cannot be reached: a run that the copy lacks may be paid twice."""
        while True:
            try:
                copy()
            except (UnreachableError, CredentialsError) as error:
                self.begin(error.message)
                time.sleep(_RETRY_SECONDS)
            else:
                return

    def copy_end(self, copy: Callable[[], None]) -> None:
        """Copy the record, which has the end here already: an error would look like a reason to start again."""
        for _ in range(_MOST_LAST_COPIES):
            try:
                copy()
            except CloudError as error:
                self._report(f"the end is recorded here, and not yet in S3: {error.message}")
                time.sleep(_RETRY_SECONDS)
            else:
                return
