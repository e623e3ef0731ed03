"""When a run on Slurm asks its ranks to save: in time for what its saves take."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cloudtrain.backends.slurm.slurm_output import SlurmJob
from cloudtrain.backends.slurm.stop_notice import needed_grace, notice_time
from cloudtrain.runs.progress import Progress, fold_events

START = datetime(2026, 11, 30, 10, 0, tzinfo=UTC)
HOUR = SlurmJob("7", "x", "", "RUNNING", start=START, ends_by=START + timedelta(hours=1))


def saved(*seconds: float | None) -> Progress:
    events = [
        {"event": "checkpoint", "uri": f"/c/{n}", "step": n, "time": 1.0 + n, "seconds": each}
        for n, each in enumerate(seconds)
    ]
    return fold_events(events, Progress())


def test_saves_of_seconds_need_the_usual_grace() -> None:
    assert needed_grace({}, saved()) == 120
    assert needed_grace({}, saved(4.0, 30.0, None)) == 120
    assert needed_grace({"CLOUDTRAIN_STOP_GRACE_SECONDS": "300"}, saved(4.0)) == 300


def test_the_slowest_of_the_last_saves_counts_twice() -> None:
    assert needed_grace({}, saved(100.0, 200.0, 90.0)) == 430
    assert needed_grace({}, saved(900.0, *[50.0] * 9)) == 130


def test_the_notice_leaves_grace_and_a_minute() -> None:
    assert notice_time(HOUR, 120) == (START + timedelta(minutes=57)).timestamp()
    assert notice_time(HOUR, 430) == (START + timedelta(seconds=3600 - 490)).timestamp()


def test_a_short_job_trains_for_half_of_its_time() -> None:
    short = replace(HOUR, ends_by=START + timedelta(minutes=2))
    assert notice_time(short, 120) == (START + timedelta(minutes=1)).timestamp()


def test_a_job_without_a_limit_gets_no_notice() -> None:
    assert notice_time(replace(HOUR, ends_by=None), 120) == math.inf
    assert notice_time(None, 120) == math.inf
