"""The campaign of faults, short: runs that are submitted, followed and stopped in bad weather by clients that die."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.jobs import REPOSITORY, Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]


def test_a_short_campaign_finds_no_fault() -> None:
    campaign = [sys.executable, str(REPOSITORY / "benchmarks" / "campaign.py"), "--runs", "6", "--at-once", "3"]
    done = subprocess.run(campaign, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| duplicate jobs | 0 |" in done.stdout


@pytest.mark.parametrize("operation", ["DescribeTrainingJob", "DescribeLogStreams", "ListTrainingJobs"])
def test_an_answer_that_is_cut_short_is_asked_for_again(sandbox: Served, cli: Cli, operation: str) -> None:
    """Half a JSON document would be read as an answer without fields."""
    run = "torn-261120-101500-1a2b3c"
    if not sandbox.client("sagemaker").list_training_jobs(NameContains=run)["TrainingJobSummaries"]:
        sandbox.create(run, "echo said")
        sandbox.end_of(run)
    sandbox.set_faults(torn={operation: 2})
    for command in (["status", run], ["logs", run], ["list", "--sagemaker"]):
        done = cli(*command, environ=sandbox.environment)
        assert done.code == 0, done.err
        assert "said" in done.out or run in done.out
