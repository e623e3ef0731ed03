"""Reports of a failure: the file `/opt/ml/output/failure`, which SageMaker shows, and one event line."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from cloudtrain_runtime.contract import FAILURE_CHARACTERS
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.event_log import emit, log_line

REPORTED_EXIT_CODE = 3
"""Exit code of torchrun's agent when it has reported why the ranks failed. The container's exit code is then 1."""


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed."""

    rank: int
    local_rank: int
    # what happened, in one line: `failed: ValueError: no such column`
    title: str
    traceback: str
    exit_code: int
    # seconds since the epoch
    failed_at: float
    # whether it is only a consequence of another rank's failure
    secondary: bool = False

    @property
    def message(self) -> str:
        """One line with rank, host and title."""
        host = os.environ.get("SM_CURRENT_HOST", "")
        place = f" on {host} (local rank {self.local_rank})" if host else ""
        return f"rank {self.rank}{place} {self.title}"


def report_failure(failure: RankFailure) -> None:
    """Print the failure in one line and emit the event. The rank itself has printed its traceback."""
    log_line(failure.message)
    emit(
        "failed",
        rank=failure.rank,
        local_rank=failure.local_rank,
        host=os.environ.get("SM_CURRENT_HOST", ""),
        exit_code=failure.exit_code,
        message=failure.message,
        secondary=failure.secondary,
        failed_at=failure.failed_at,
    )


def failure_reason(failure: RankFailure) -> str:
    """Return the text of the failure file: the message, and as much of the traceback's end as fits."""
    message = redact(failure.message)
    tail = redact(failure.traceback).rstrip()[-2 * FAILURE_CHARACTERS :]
    # Only complete lines are left out, the oldest first.
    while tail and len(message) + len(tail) >= FAILURE_CHARACTERS:
        tail = tail.partition("\n")[2]
    return f"{message}\n{tail}".rstrip()[:FAILURE_CHARACTERS]


def write_failure_file(reason: str, *, replace: bool) -> None:
    """Write the failure file, which SageMaker shows; with `replace` also over that of another process."""
    path = ml_tree(os.environ).failure
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.suppress(FileExistsError),
        path.open("w" if replace else "x", encoding="utf-8") as file,
    ):
        file.write(reason[:FAILURE_CHARACTERS])


def fail(text: str) -> int:
    """Write a failure of this host to the failure file and the log; return the container's exit code."""
    write_failure_file(redact(text), replace=True)
    log_line(text)
    return 1
