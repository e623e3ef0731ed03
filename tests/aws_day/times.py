"""Waiting times of the day, which are shorter for a sandbox, and the day's way to print."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, TextIO


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line. A terminal or pipe that is gone is no reason to end: jobs must be stopped in any case."""
    with suppress(OSError, ValueError):
        print(text, file=file, flush=True)


@dataclass(frozen=True)
class Times:
    """Times in seconds, unless it says otherwise.

    Attributes:
        poll: Pause between two looks at a job.
        work: How long a job works that ends by itself.
        count: How long a job counts that is stopped meanwhile: longer than CloudWatch needs for its first line.
        runtime: Time limit of the jobs that are not meant to reach it.
        limit: Time limit of the job that reaches it. A job file accepts 60 and more; AWS counts the download of the image.
        capacity: Longest wait for instances. A job that waits longer is stopped.
        grace: From SIGTERM to SIGKILL.
        grace_tolerance: How far a measured grace may be from it.
        over_limit: What AWS bills beyond a time limit at most, as the estimate counts it.
        log_delay: From a printed line to the time at which CloudWatch has it, at most.
        keep_alive: How long a warm pool is kept.
        spot_wait: Limit of waiting and training of the spot job.
        end: Longest wait for the end of a job that was asked to stop.
    """

    poll: float = 10.0
    work: float = 20.0
    count: float = 180.0
    runtime: int = 600
    limit: int = 300
    capacity: float = 900.0
    grace: float = 120.0
    grace_tolerance: float = 10.0
    over_limit: float = 238.0
    log_delay: float = 15.0
    keep_alive: int = 600
    spot_wait: int = 1200
    end: float = 420.0

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the times of a JSON file with the values that differ; without a file, AWS's."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8"))) if path else cls()

    def to_json(self) -> dict[str, float]:
        """Return all values."""
        return asdict(self)
