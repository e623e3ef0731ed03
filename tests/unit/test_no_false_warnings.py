"""Every job of the repository is planned: a warning about a likely mistake appears only where the mistake is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cloudtrain

ROOT = Path(__file__).parents[2]
JOBS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("examples", "sdk", "tests")
    for path in (ROOT / folder).rglob("job.yaml")
)
MISTAKES = re.compile(r"code\.args\.|code\.command: |\S+\.sh:\d+: |\S+\.py:\d+:\d+ calls ")
"""Warnings about likely mistakes in arguments, shell scripts and the source of a Task."""


def test_the_jobs_are_found() -> None:
    assert len(JOBS) >= 30


@pytest.mark.parametrize("job", JOBS)
def test_a_correct_job_has_no_warning_of_mistakes(job: str) -> None:
    plan = cloudtrain.plan(ROOT / job, local=True)
    assert [each for each in plan.warnings if MISTAKES.match(each)] == []
