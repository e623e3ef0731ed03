"""A folder of runs that a preview of cloudtrain 0.1.0 has written is read, and its runs are resumed.

`written_by/preview-0.1/home.tar.xz` holds runs of all final states, a run of the sandbox, and a sweep, without the containers'
copies of the code. It is never written again: a version that cannot read it breaks what users have on their disks.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from support.jobs import Cli

ARCHIVE = Path(__file__).parents[1] / "written_by" / "preview-0.1" / "home.tar.xz"
SUCCEEDED = "small-261129-020211-6bedb5"
FAILED = "small-261129-020226-3baabb"
STOPPED = "small-261129-020302-6004c8"
KILLED = "small-261129-020325-e0d3d4"
TRIALS = ("small-261129-020527-e52b80", "small-261129-020532-3190ca")
SWEEP = "widths-261129-020505-051cc3"
STATES = {
    SUCCEEDED: "SUCCEEDED",
    FAILED: "FAILED",
    STOPPED: "STOPPED",
    KILLED: "FAILED",
    **dict.fromkeys(TRIALS, "SUCCEEDED"),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / ".cloudtrain"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".cloudtrain"


def test_recorded_runs_are_shown(cli: Cli, home: Path) -> None:
    listed = cli("list", "--json")
    assert listed.code == 0, listed.err
    assert {run["run"]: run["state"] for run in listed.json["runs"]} == STATES
    for run, state in STATES.items():
        status = cli("status", run, "--json")
        assert status.json["state"] == state
        assert status.json["last_checkpoint"]["uri"].startswith(home.as_uri())
        history = cli("metrics", run, "--json").json
        assert history["metrics"]["train/loss"], run
    assert cli("checkpoints", "verify", SUCCEEDED, "--json").code == 0
    assert cli("logs", FAILED).out.count("a sample is damaged") > 0


def test_recorded_failures_are_explained(cli: Cli, home: Path) -> None:
    failed = cli("explain", FAILED, "--json").json
    assert (failed["class"], failed["place"]) == ("user_code", "small.py:26")
    assert "killed" in cli("explain", KILLED).out


def test_a_recorded_sweep_is_shown(cli: Cli, home: Path) -> None:
    found = cli("sweep", "status", SWEEP, "--json")
    assert found.code == 0, found.err
    assert found.json["state"] == "SUCCEEDED"
    assert {trial["run"] for trial in found.json["trials"]} == set(TRIALS)


def test_a_recorded_home_has_a_report(cli: Cli, home: Path, tmp_path: Path) -> None:
    done = cli("report", *STATES, "-o", tmp_path / "report.html", "--json")
    assert done.code == 0, done.err
    text = (tmp_path / "report.html").read_text()
    assert all(run in text for run in STATES)


def test_a_recorded_run_is_resumed(cli: Cli, home: Path) -> None:
    done = cli("resume", SUCCEEDED, "--set", "train.steps=8", "--follow", "--json")
    assert done.code == 0, done.err
    assert (done.json["state"], done.json["last_step"]) == ("SUCCEEDED", 8)
    plan = json.loads((home / "runs" / done.json["run"] / "plan.json").read_text())
    assert SUCCEEDED in json.dumps(plan["job"])
