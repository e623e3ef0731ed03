"""Run ids: create, recognise and parse them."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime

RUN_ID_CHARACTERS = 63
"""Longest TrainingJobName. Source: botocore's model of CreateTrainingJob."""

_RUN_ID = re.compile(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*-\d{6}-\d{6}-[0-9a-f]{6}")


def make_run_id(name: str, now: datetime, suffix: str) -> str:
    """Return `<name>-<yymmdd-hhmmss>-<suffix>`: a name of at most 42 characters, UTC, six hexadecimal digits."""
    return f"{name}-{now:%y%m%d-%H%M%S}-{suffix}"


def is_run_id(text: str) -> bool:
    """Return whether a text has the form of a run id."""
    return len(text) <= RUN_ID_CHARACTERS and _RUN_ID.fullmatch(text) is not None


def submitted_at(run: str) -> datetime | None:
    """Return the time of the submit, in UTC, that a run id contains; None if it contains none."""
    with contextlib.suppress(ValueError):
        return datetime.strptime("-".join(run.split("-")[-3:-1]), "%y%m%d-%H%M%S").replace(tzinfo=UTC)
    return None
