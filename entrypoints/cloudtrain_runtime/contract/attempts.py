"""Attempts of a run on a cluster with a queue: which of them may still write checkpoints.

The queue starts an interrupted run again, and the processes of a lost node may live on for minutes. Each attempt writes
its number to a file in the run's folder before it starts, and a mark behind it when it ends. Who finds a larger number
than its own, or the mark, has been replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

ATTEMPT_VARIABLE: Final = "CLOUDTRAIN_ATTEMPT"
"""Number of the attempt that a process belongs to, from 1."""

ATTEMPT_FILE_VARIABLE: Final = "CLOUDTRAIN_ATTEMPT_FILE"
"""Path of the file with the number of the newest attempt."""

_ENDED = "ended"
_MOST_BYTES = 40


def attempt_text(number: int, *, has_ended: bool = False) -> str:
    """Return the content of the file for an attempt."""
    return f"{number} {_ENDED}\n" if has_ended else f"{number}\n"


def read_attempt(file: Path) -> int:
    """Return the number of the newest attempt; 1 where there is no file, because the run has always one."""
    try:
        return _read(file)[0]
    except (OSError, ValueError):
        return 1


def find_replacement(file: Path, number: int) -> str:
    """Return why an attempt may write no more, as a part of a sentence; empty if it may.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged.
    """
    try:
        newest, has_ended = _read(file)
    except FileNotFoundError:
        return ""
    if newest > number:
        return f"attempt {newest} of this run has begun"
    return "this attempt of the run has ended" if newest == number and has_ended else ""


def refuse_replaced(environ: Mapping[str, str]) -> None:
    """Check that the attempt of this environment may still write.

    Raises:
        OSError: It was replaced, or the file cannot be read.
        ValueError: The file is damaged.
    """
    if ATTEMPT_VARIABLE not in environ:
        return
    reason = find_replacement(Path(environ[ATTEMPT_FILE_VARIABLE]), int(environ[ATTEMPT_VARIABLE]))
    if reason:
        raise OSError(f"{reason}, so this one saves no more")


def _read(file: Path) -> tuple[int, bool]:
    number, _, rest = file.read_bytes()[:_MOST_BYTES].decode("ascii", "replace").partition(" ")
    return int(number), rest.strip() == _ENDED
