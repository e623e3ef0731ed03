"""The example for a new account, on this machine: it measures the network, fails once, resumes and reports."""

from __future__ import annotations

import json
import tarfile

import pytest
from support.jobs import EXAMPLES, Cli

JOB = EXAMPLES / "first-contact" / "job.yaml"

pytestmark = pytest.mark.processes


def test_the_first_contact_resumes_and_reports(cli: Cli) -> None:
    done = cli("submit", JOB, "--local", "--follow", "--json", "--set", "code.args.largest-mb=1")
    assert done.code == 0, done.err
    with tarfile.open(done.json["artifacts"]["output"]) as archive:
        file = archive.extractfile("first-contact.json")
        assert file is not None
        report = json.load(file)
    assert (report["world_size"], report["steps"], report["resumed_from_step"]) == (4, 20, 10)
    assert [rank["host"] for rank in report["ranks"]] == ["algo-1", "algo-1", "algo-2", "algo-2"]
    sizes = [entry["bytes"] for entry in report["all_reduce"]]
    assert (sizes[0], sizes[-1]) == (4096, 262_144)
    assert all(entry["gbit_per_second"] > 0 for entry in report["all_reduce"])
    assert done.json["last_step"] == 20
    assert set(done.json["hosts"]) == {"algo-1", "algo-2"}
    lines = [line["text"] for line in cli("logs", done.json["run"], "--json").json["lines"]]
    assert sum("all ranks fail on purpose after step 10" in line for line in lines) == 1
    assert sum("first contact succeeded: resumed from step 10" in line for line in lines) == 1
    assert sum('"event": "environment"' in line for line in lines) == 2
    with tarfile.open(done.json["artifacts"]["model"]) as archive:
        assert archive.getnames() == ["model.pt"]


def test_the_first_contact_fails_without_its_checkpoint(cli: Cli) -> None:
    """The proof can fail: with no retry left, the intended failure ends the run."""
    quick = ("--set", "code.args.largest-mb=0.01", "--set", "limits.retries=0")
    done = cli("submit", JOB, "--local", "--follow", "--json", *quick)
    assert done.code == 4
    assert "exit code 75" in done.json["reason"]
    assert done.json["last_checkpoint"]["step"] == 10
