"""`submit` and `resume` print the run id to standard output and warnings to standard error."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, command, until

import cloudtrain

pytestmark = pytest.mark.processes

JOB = """\
name: quick
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, processes_per_instance: 1, queue: nightly}
checkpoint: {keep: 2}
"""
TRAIN = """\
import os
with open(os.environ["CLOUDTRAIN_ML_ROOT"] + "/checkpoints/state", "w") as file:
    file.write("1")
print("trained")
"""
WARNINGS = (
    "cluster.queue is ignored: a local run has no queue",
    (
        "checkpoint.keep has an effect only where the script saves by cloudtrain_runtime.checkpoint or an attached "
        "trainer (cloudtrain_runtime.integrations)"
    ),
)


@pytest.fixture
def quick(job: Callable[..., Path]) -> Path:
    path = job(JOB, train_py=TRAIN)
    # A cloned repository may contain account settings; local runs neither use nor ask about them.
    account = (
        "role = 'arn:aws:iam::210987654321:role/theirs'\nbucket = 'theirs'\nregion = 'us-west-2'\n"
    )
    (path.parent / "cloudtrain.toml").write_text(account)
    return path


@pytest.mark.promise
def test_submit_prints_only_the_run_id_to_stdout(cli: Cli, quick: Path) -> None:
    shell = subprocess.run(
        [
            "sh",
            "-c",
            f"RUN=$({command()} submit {quick} --local) && echo $RUN && {command()} follow $RUN >&2",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    run = shell.stdout.strip()
    assert "theirs" not in shell.stderr
    assert shell.stdout == f"{run}\n"
    assert cli("status", run, "--json").json["run"] == run
    assert f"local:{run} submitted\n" in shell.stderr
    resumed = cli("resume", run)
    assert resumed.code == 0, resumed.err
    again = resumed.out.strip()
    assert resumed.out == f"{again}\n"
    assert cli("follow", again, "--json").json["state"] == "SUCCEEDED"
    followed = cli("submit", quick, "--local", "--follow").out.splitlines()
    assert cli("status", followed[0], "--json").json["state"] == "SUCCEEDED"
    assert "algo-1  trained" in followed[1:]


def test_submit_prints_warnings_to_stderr(cli: Cli, quick: Path) -> None:
    plan = cli("plan", quick, "--local")
    done = cli("submit", quick, "--local", "--follow", "--json")
    for result in (plan, done):
        for warning in WARNINGS:
            assert f"warning: {warning}\n" in result.err
    assert all(warning not in plan.out for warning in WARNINGS)
    assert "warning:" not in plan.out
    assert set(WARNINGS) <= set(done.json["warnings"])
    resumed = cli("resume", done.json["run"], "--json")
    # The code is not read again by a resume, so only what the job says is a reason for a warning.
    assert WARNINGS[0] in resumed.json["warnings"]
    assert f"warning: {WARNINGS[0]}\n" in resumed.err
    assert WARNINGS[1] not in resumed.json["warnings"]
    cli("follow", resumed.json["run"])


def test_output_may_go_to_a_file_in_the_code_folder(cli: Cli, quick: Path) -> None:
    words = f"cd {quick.parent} && {command()} submit job.yaml --local --follow > log 2>&1"
    done = subprocess.run(["sh", "-c", words], check=False, env=dict(os.environ))
    log = (quick.parent / "log").read_text()
    assert done.returncode == 0, log
    assert all(f"warning: {warning}\n" in log for warning in WARNINGS)


def test_a_setting_writes_a_report_of_each_run(cli: Cli, quick: Path) -> None:
    (quick.parent / "cloudtrain.toml").write_text("report = true\n")
    done = cli("submit", quick, "--local", "--follow", "--json")
    report = Path(done.json["artifacts"]["folder"]) / "report.html"
    until(report.is_file)
    assert done.json["run"] in report.read_text()


def test_logs_of_an_unknown_host_are_refused(cli: Cli, quick: Path) -> None:
    run = cli("submit", quick, "--local", "--follow", "--json").json["run"]
    assert "trained" in cli("logs", run, "--host", "algo-1").out
    refused = cli("logs", run, "--host", "algo-7")
    assert (refused.code, 'did you mean "algo-1"?' in refused.err) == (2, True)
    assert "no line of the log matches" in cli("logs", run, "--grep", "absent").err


def test_the_sdk_returns_the_warnings_of_the_plan(quick: Path) -> None:
    plans: list[cloudtrain.Plan] = []
    observer = cloudtrain.Observer()
    observer.on_plan = plans.append  # type: ignore[method-assign]
    run = cloudtrain.submit(quick, local=True, observer=observer)
    assert set(WARNINGS) <= set(run.warnings)
    assert run.warnings == plans[0].warnings
    run.wait(300)
