"""Following runs to their end: reason, exit code and hint for each kind of end, and the state of the terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Terminal, command, until
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

JOB = """\
name: follow
code: {script: job.py}
cluster: {instance_type: ml.g5.xlarge, CLUSTER}
limits: {runtime: RUNTIME}
"""
WAITS = """
import time
print('CLOUDTRAIN {"event": "step", "step": 1}', flush=True)
time.sleep(100)
"""
BREAKS = """
raise KeyError("no such column")
"""

WriteJob = Callable[..., Path]


@pytest.fixture
def write(job: WriteJob) -> WriteJob:
    def write(script: str = WAITS, cluster: str = "instances: 1", runtime: str = "10m") -> Path:
        return job(JOB.replace("CLUSTER", cluster).replace("RUNTIME", runtime), job_py=script)

    return write


@dataclass
class Following:
    """A running `submit --follow --json`."""

    process: subprocess.Popen[str]
    errors: Path
    sandbox: Served
    name: str = ""

    def reaches(self, *secondary: str) -> None:
        """Wait until the job has one of these secondary statuses, and set `name`."""
        client = self.sandbox.client("sagemaker")

        def is_there() -> bool:
            newest = client.list_training_jobs(SortBy="CreationTime", SortOrder="Descending")[
                "TrainingJobSummaries"
            ]
            found = [each for each in newest if each["TrainingJobName"].startswith("follow-")]
            self.name = found[0]["TrainingJobName"] if found else ""
            return (
                bool(self.name) and self.sandbox.describe(self.name)["SecondaryStatus"] in secondary
            )

        until(is_there)

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Wait for the end; return the exit code, the JSON object and the text on standard error."""
        out, _ = self.process.communicate(timeout=300)
        return self.process.returncode, json.loads(out), self.messages

    @property
    def messages(self) -> str:
        """The text on standard error so far."""
        return self.errors.read_text(encoding="utf-8")


@contextmanager
def following(sandbox: Served, path: Path) -> Iterator[Following]:
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    arguments = [str(command()), "submit", str(path), "--skip-check", "--follow", "--json"]
    before = {each["TrainingJobName"] for each in _jobs(sandbox)}
    errors = path.parent.with_name("errors")
    with errors.open("w") as file:
        process = subprocess.Popen(
            arguments,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    until(
        lambda: (
            process.poll() is not None
            or {each["TrainingJobName"] for each in _jobs(sandbox)} - before
        )
    )
    try:
        yield Following(process, errors, sandbox)
    finally:
        process.kill()
        process.communicate()


def _jobs(sandbox: Served) -> list[dict[str, Any]]:
    newest = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 100}
    found: list[dict[str, Any]] = sandbox.client("sagemaker").list_training_jobs(**newest)[
        "TrainingJobSummaries"
    ]
    return found


def test_time_limit_is_reported_despite_aws_errors(sandbox: Served, write: WriteJob) -> None:
    with following(sandbox, write(runtime="1m")) as run:
        run.reaches("Training")
        sandbox.set_faults(errors={"DescribeTrainingJob": 10**6})
        until(lambda: "(retrying; the run continues)" in run.messages)
        sandbox.set_faults()
        code, status, err = run.end()
    assert (code, status["state"]) == (5, "STOPPED")
    assert status["reason"].startswith("MaxRuntimeExceeded: the run reached its limit (1m)")
    assert "resume from the last checkpoint" in status["reason"]
    assert status["billable_seconds"] >= 60
    assert err.count("(retrying; the run continues)") == 1
    assert "recovered after " in err


def test_spot_run_without_capacity_ends(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(capacity_after_seconds=3600, waited_seconds=45)
    with following(sandbox, write(cluster="spot: {max_wait: 1m}", runtime="1m")) as run:
        code, status, err = run.end()
    assert (code, status["state"]) == (5, "STOPPED")
    assert status["reason"].startswith(
        "MaxWaitTimeExceeded: no spot capacity within cluster.spot.max_wait (1m)"
    )
    assert (
        "QUEUED (Pending): Training job waiting for capacity; for 1 x ml.g5.xlarge, gives up in"
        in err
    )
    assert (status["billable_seconds"], status["cost_usd"]) == (0, 0.0)


@pytest.mark.promise
def test_interrupted_spot_run_without_capacity_ends(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(waited_seconds=15)
    with following(sandbox, write(cluster="spot: {max_wait: 1m}", runtime="1m")) as run:
        run.reaches("Training")
        sandbox.set_faults(capacity_after_seconds=3600, interrupt_at_step=[1])
        code, status, err = run.end()
    assert (code, status["state"]) == (5, "STOPPED")
    assert status["reason"].startswith(
        "MaxWaitTimeExceeded: waiting and training together reached cluster.spot.max_wait (1m), after 1 interruption; "
        "raise it"
    )
    assert "Interrupted" in [phase["name"] for phase in status["phases"]]
    assert "INTERRUPTED (Pending): Training job waiting for capacity" in err


def test_run_ends_after_max_pending(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(capacity_after_seconds=10**6, waited_seconds=1775)
    with following(sandbox, write(cluster="max_pending: 30m")) as run:
        code, status, err = run.end()
    assert (code, status["state"]) == (5, "STOPPED")
    assert status["reason"].startswith(
        "MaxPendingTimeExceeded: no capacity within cluster.max_pending (30m)"
    )
    assert "cluster.prefer" in status["reason"]
    assert re.search(r"gives up in \d+s \(cluster.max_pending\)", err)
    assert status["started"] is None


def test_stopped_run_is_reported(sandbox: Served, write: WriteJob) -> None:
    with following(sandbox, write()) as run:
        run.reaches("Training")
        sandbox.client("sagemaker").stop_training_job(TrainingJobName=run.name)
        code, status, _ = run.end()
    assert (code, status["state"]) == (5, "STOPPED")
    assert status["reason"] == "stopped by request"


def test_run_stopped_while_waiting_is_reported(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(capacity_after_seconds=3600)
    with following(sandbox, write(cluster="max_pending: 30m")) as run:
        run.reaches("Pending")
        sandbox.client("sagemaker").stop_training_job(TrainingJobName=run.name)
        code, status, _ = run.end()
    assert (code, status["reason"]) == (5, "stopped by request")


def test_capacity_errors_are_failures(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(capacity_error_after_seconds=1)
    with following(sandbox, write()) as run:
        code, status, err = run.end()
    assert (code, status["state"]) == (4, "FAILED")
    assert status["reason"].startswith("CapacityError: ")
    assert re.search(r"\ncause +no capacity for this instance type\n", err)


def test_internal_errors_are_failures(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(dead_instance={"host": "algo-1", "step": 1})
    with following(sandbox, write()) as run:
        code, status, err = run.end()
    assert (code, status["state"]) == (4, "FAILED")
    assert status["reason"].startswith("InternalServerError: ")
    assert "\naction " in err


def test_a_script_that_breaks_is_explained(sandbox: Served, write: WriteJob) -> None:
    with following(sandbox, write(BREAKS)) as run:
        code, status, err = run.end()
    assert (code, status["exit_code"], status["state"]) == (4, 4, "FAILED")
    assert "KeyError: 'no such column'" in err.partition("next: ")[0]
    assert "job.py" in err.partition("next: ")[0]


@pytest.mark.parametrize("columns", [80, 40])
def test_ctrl_c_restores_the_terminal_and_detaches(
    sandbox: Served, write: WriteJob, columns: int
) -> None:
    environment = {
        **os.environ,
        **sandbox.environment,
        "CLOUDTRAIN_TRANSPORT": "boto3",
        "TERM": "xterm-256color",
    }
    arguments = [str(command()), "submit", str(write()), "--skip-check", "--follow"]
    terminal = Terminal(arguments, environment, columns)
    until(lambda: terminal.shows("RUNNING ") and terminal.shows("checkpoint"))
    run = re.search(rb"sagemaker:(follow-[0-9a-f-]+)", terminal.written)
    assert run is not None
    terminal.press(b"\x03\x03")
    assert terminal.end() == 130
    assert terminal.written.rindex(b"\x1b[?25h") > terminal.written.rindex(
        b"\x1b[?25l"
    )  # the cursor is visible again
    assert f"To attach again: {command()} follow sagemaker:{run[1].decode()}" in terminal.text
    assert "Traceback" not in terminal.text
    name = run[1].decode()
    assert sandbox.describe(name)["TrainingJobStatus"] == "InProgress"

    back = Terminal([str(command()), "follow", name], environment, columns)
    until(lambda: back.shows("RUNNING "))
    sandbox.client("sagemaker").stop_training_job(TrainingJobName=name)
    assert back.end() == 5
    assert "stopped by request" in back.text
    assert back.written.rindex(b"\x1b[?25h") > back.written.rindex(b"\x1b[?25l")


def test_no_color_disables_colours(sandbox: Served, write: WriteJob) -> None:
    sandbox.set_faults(capacity_error_after_seconds=2)
    environment = {
        **os.environ,
        **sandbox.environment,
        "CLOUDTRAIN_TRANSPORT": "boto3",
        "TERM": "xterm-256color",
    }
    arguments = [str(command()), "submit", str(write()), "--skip-check", "--follow"]
    written = {}
    for name, more in (("plain", {"NO_COLOR": "1"}), ("coloured", {})):
        terminal = Terminal(arguments, {**environment, **more})
        assert terminal.end() == 4
        written[name] = terminal.written
    coloured = re.compile(rb"\x1b\[[0-9;]*3[0-7]m")
    assert coloured.search(written["coloured"])
    assert not coloured.search(written["plain"])
