"""Run ids: create, recognise and parse them."""

from __future__ import annotations

import contextlib
import functools
from datetime import UTC, datetime
from pathlib import Path

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

RUN_ID_CHARACTERS = 63
"""Longest TrainingJobName. Source: botocore's model of CreateTrainingJob."""

_NAME = r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*"
_RUN_ID = lazy_pattern(rf"{_NAME}-\d{{6}}-\d{{6}}-[0-9a-f]{{6}}")
_TRIAL_ID = lazy_pattern(rf"({_NAME}?)-[0-9a-f]{{10}}(?:-\d+)?-\d{{3,}}-[0-9a-f]{{8}}")
"""SageMaker appends a number and eight hexadecimal digits to the name of a tuning job (sweeps/tuning_request.py)."""


def make_run_id(name: str, now: datetime, suffix: str) -> str:
    """Return `<name>-<yymmdd-hhmmss>-<suffix>`: a name of at most 42 characters, UTC, six hexadecimal digits."""
    return f"{name}-{now:%y%m%d-%H%M%S}-{suffix}"


def is_run_id(text: str) -> bool:
    """Return whether a text has the form of a run id, or of a trial of a tuning job."""
    is_id = _RUN_ID.fullmatch(text) or _TRIAL_ID.fullmatch(text)
    return len(text) <= RUN_ID_CHARACTERS and is_id is not None


def short_id(run: str) -> str:
    """Return the last six characters of a run's id or reference, by which every command finds the run."""
    return run[-6:]


def job_of(run: str) -> str:
    """Return the job's name in a run id; of a trial, that of its tuning job without digest and number."""
    trial = None if _RUN_ID.fullmatch(run) else _TRIAL_ID.fullmatch(run)
    if trial is not None:
        return trial[1]
    return run.rsplit("-", 3)[0]


def submit_order(run: str) -> list[str]:
    """Return date, time and suffix of a run id or reference, by which runs are sorted."""
    return run.rsplit("-", 3)[1:]


def written_order(run: str, folder: Path) -> tuple[float, list[str]]:
    """Return what runs with a folder on this machine are sorted by: the submit's time, but not after the folder's.

    A run id that came from elsewhere may contain any date, also one that is still to come.
    """
    submitted = submitted_at(run)
    try:
        # The link itself: it would be as new as what it leads to.
        written = folder.lstat().st_ctime
    except OSError:
        # Deleted meanwhile.
        written = 0.0
    if submitted is not None:
        written = min(submitted.timestamp(), written)
    return written, submit_order(run)


@functools.lru_cache(maxsize=10_000)
def submitted_at(run: str) -> datetime | None:
    """Return the time of the submit, in UTC, that a run id contains; None if it contains none."""
    with contextlib.suppress(ValueError):
        return datetime.strptime("-".join(run.split("-")[-3:-1]), "%y%m%d-%H%M%S").replace(
            tzinfo=UTC
        )
    return None
