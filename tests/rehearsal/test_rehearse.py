"""`cloudtrain rehearse`: what it proves about a job, its receipt, and what is left of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli

pytestmark = pytest.mark.processes

CHECKS = {
    "starts",
    "trains",
    "saves",
    "stops",
    "resumes",
    "samples",
    "elastic",
    "memory",
    "network",
}


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Return the job file of a copy of the digits example."""
    return Path(shutil.copytree(EXAMPLES / "digits", tmp_path / "digits")) / "job.yaml"


@pytest.mark.promise
def test_the_digits_example_is_proven(cli: Cli, digits: Path) -> None:
    environ = {"CLOUDTRAIN_HOME": str(digits.parent / "home")}
    done = cli("rehearse", digits, "--json", "--seed", "3", "--save", environ=environ)
    assert done.code == 0, done.out
    answer = done.json
    results = {check["name"]: check["result"] for check in answer["checks"]}
    assert set(answer) == {"verdict", "checks", "receipt", "folder", "warnings"}
    assert answer["verdict"] == "proven", answer
    assert results == {**dict.fromkeys(CHECKS, "proven"), "network": "unknown"}
    resumes = next(check["detail"] for check in answer["checks"] if check["name"] == "resumes")
    for what in ("SIGTERM", "SIGKILL of a rank", "SIGKILL of a host", "SIGKILL of the launcher"):
        assert what in resumes
    receipt = cli("plan", digits, "--json", environ=environ).json["rehearsal"]
    assert {name: receipt[name] for name in answer["receipt"]} == answer["receipt"]
    assert receipt["verdict"] == "proven"
    assert [
        each
        for each in (digits.parent / "home" / "rehearsals").iterdir()
        if each.name.startswith("run-")
    ] == []
    # The receipt beside the job is not part of the code, or it would change the code that it is about.
    assert "rehearsal.json" in {each.name for each in digits.parent.iterdir()}
