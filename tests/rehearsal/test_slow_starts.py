"""Scripts whose imports take longer than their share of a rehearsal's time."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.plans import WriteJob

import cloudtrain
from cloudtrain.support.checks import Check, Result

pytestmark = pytest.mark.processes

JOB = """\
name: slow
code: {script: train.py}
cluster: {instance_type: ml.m5.large, processes_per_instance: 1}
limits: {runtime: 1h}
"""
TRAIN = """
import time
import cloudtrain_runtime
for step in range(1, 10_000):
    cloudtrain_runtime.report(step=step, loss=1.0)
    time.sleep(0.05)
"""
ENDLESS_IMPORT = "import threading\nthreading.Event().wait()\n"
# Longer than the share of a run of 0.1 minutes, which is 10 s.
SLOW_IMPORT = "import time\ntime.sleep(12)\n"


def rehearse(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Check], list[float]]:
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(path.parent / "home"))
    lefts: list[float] = []

    class Lefts(cloudtrain.Observer):
        def on_check(self, check: Check, seconds_left: float) -> None:  # noqa: ARG002
            lefts.append(seconds_left)

    found = cloudtrain.rehearse(path, minutes=0.1, seed=1, observer=Lefts())
    return list(found.checks), lefts


def test_a_script_that_still_imports_shows_nothing(
    job: WriteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.features.rehearsal.runs.LEAST_START_SECONDS", 3.0)
    checks, _ = rehearse(job(JOB, train_py=ENDLESS_IMPORT + TRAIN), monkeypatch)
    (starts,) = (check for check in checks if check.name == "starts")
    assert starts.result == "unknown"
    assert "no step was seen in 6s, the limit for imports" in starts.detail
    assert "--minutes 1" in starts.detail
    assert {str(check.result) for check in checks} == {"unknown"}


def test_the_clock_starts_at_the_first_step(job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, lefts = rehearse(job(JOB, train_py=SLOW_IMPORT + TRAIN), monkeypatch)
    assert len(lefts) == len(checks)
    starts, trains = checks[:2]
    assert (starts.name, starts.result) == ("starts", Result.PASS)
    # On a slow machine the 6 s end first.
    assert (trains.name, trains.result in (Result.PASS, Result.UNKNOWN)) == ("trains", True), trains
