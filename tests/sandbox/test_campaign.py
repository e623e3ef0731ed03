"""A short fault campaign: clients that submit, follow and stop runs while calls fail and clients are killed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.jobs import REPOSITORY, Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]


def test_a_short_fault_campaign_succeeds() -> None:
    campaign = [
        sys.executable,
        str(REPOSITORY / "benchmarks" / "campaign.py"),
        "--runs",
        "6",
        "--at-once",
        "3",
    ]
    done = subprocess.run(campaign, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| duplicate jobs | 0 |" in done.stdout


@pytest.mark.parametrize(
    "operation", ["DescribeTrainingJob", "DescribeLogStreams", "ListTrainingJobs"]
)
def test_truncated_responses_are_requested_again(sandbox: Served, cli: Cli, operation: str) -> None:
    """A truncated JSON document is not parsed as a response with missing fields."""
    run = "torn-261120-101500-1a2b3c"
    if not sandbox.client("sagemaker").list_training_jobs(NameContains=run)["TrainingJobSummaries"]:
        sandbox.create(run, "echo printed")
        sandbox.end_of(run)
    sandbox.set_faults(torn={operation: 2})
    for command in (["status", run], ["logs", run], ["list", "--sagemaker"]):
        done = cli(*command, environ=sandbox.environment)
        assert done.code == 0, done.err
        assert "printed" in done.out or run in done.out
