"""Several submits of the same request create one job, also with lost responses and from several machines."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, command, until
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

JOB = """\
name: NAME
code: {script: train.py}
cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}
limits: {runtime: 10m}
"""
TRAIN = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def environ(sandbox: Served) -> dict[str, str]:
    """Environment variables of a client."""
    return {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}


@pytest.fixture
def long_job(job: Any, sandbox: Served) -> Iterator[Path]:
    """Write a job that trains for minutes. Its runs are stopped after the test."""
    name = f"once-{secrets.token_hex(4)}"
    yield job(JOB.replace("NAME", name), train_py=TRAIN)
    for run in jobs_of(sandbox, name):
        if sandbox.describe(run)["TrainingJobStatus"] == "InProgress":
            sandbox.client("sagemaker").stop_training_job(TrainingJobName=run)


def jobs_of(sandbox: Served, name: str) -> list[str]:
    """Return the training jobs with a name."""
    found = sandbox.client("sagemaker").list_training_jobs(NameContains=name, MaxResults=100)
    return [job["TrainingJobName"] for job in found["TrainingJobSummaries"]]


def name_of(path: Path) -> str:
    """Return the name in a job file."""
    return path.read_text().partition("\n")[0].removeprefix("name: ")


def test_a_second_submit_attaches_to_the_live_run(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    first = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert first.code == 0, first.err
    run = first.json["run"]
    again = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert again.code == 0, again.err
    assert again.json["run"] == run
    assert f"sagemaker:{run} is the same request and code, so nothing was started" in again.err
    tags = sandbox.client("sagemaker").list_tags(
        ResourceArn=sandbox.describe(run)["TrainingJobArn"]
    )["Tags"]
    identity = {tag["Key"]: tag["Value"] for tag in tags}["cloudtrain:request"]
    assert run.endswith(identity[:6])
    # The other transport sends the same request.
    other = cli(
        "submit",
        long_job,
        "--skip-check",
        "--json",
        environ={**environ, "CLOUDTRAIN_TRANSPORT": "estimator"},
    )
    assert other.json["run"] == run
    assert cli("submit", long_job, "--skip-check", environ=environ).out == f"{run}\n"
    assert jobs_of(sandbox, name_of(long_job)) == [run]


def test_a_different_job_is_submitted(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    def submit(*more: str) -> str:
        done = cli("submit", long_job, "--skip-check", "--json", *more, environ=environ)
        assert done.code == 0, done.err
        return str(done.json["run"])

    runs = [submit(), submit("--set", "code.env.A=b"), submit("--new")]
    (long_job.parent / "train.py").write_text(TRAIN + "# changed\n")
    runs.append(submit())
    assert len(set(runs)) == 4
    assert sorted(jobs_of(sandbox, name_of(long_job))) == sorted(runs)


def test_several_new_runs_start_within_one_second(
    sandbox: Served, long_job: Path, environ: dict[str, str]
) -> None:
    submit = [str(command()), "submit", str(long_job), "--skip-check", "--new"]
    several = [
        subprocess.Popen(submit, stderr=subprocess.PIPE, text=True, env=environ) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300)[1] for process in several]
    assert [process.returncode for process in several] == [0] * 3, outputs
    assert len(jobs_of(sandbox, name_of(long_job))) == 3


def test_a_failed_new_run_does_not_hide_the_active_one(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    first = cli("submit", long_job, "--skip-check", "--json", environ=environ).json["run"]
    sandbox.set_faults(errors={"CreateTrainingJob": 50})
    assert cli("submit", long_job, "--skip-check", "--new", environ=environ).code == 3
    sandbox.set_faults()
    again = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert again.json["run"] == first
    assert jobs_of(sandbox, name_of(long_job)) == [first]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"run": ""}', b'{"run": "a b"}'])
def test_a_submit_lock_without_run_is_replaced(
    body: bytes, sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    first = cli("submit", long_job, "--skip-check", "--json", environ=environ).json["run"]
    s3, bucket = sandbox.client("s3"), environ["CLOUDTRAIN_BUCKET"]
    (claim,) = [
        key
        for key in sandbox.keys("cloudtrain/requests/")
        if first.encode() in s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    ]
    s3.put_object(Bucket=bucket, Key=claim, Body=body)
    again = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert again.code == 0, again.err
    assert again.json["run"].encode() in s3.get_object(Bucket=bucket, Key=claim)["Body"].read()


def test_broken_links_in_data_are_skipped(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    data = long_job.parent.parent / "numbers"
    data.mkdir()
    (data / "a.txt").write_text("1")
    (data / "gone").symlink_to("nowhere")
    long_job.write_text(f"{long_job.read_text()}data: {{train: ../numbers}}\n")
    done = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert done.code == 0, done.err
    assert [
        key.rpartition("/")[2] for key in sandbox.keys(f"cloudtrain/{done.json['run']}/data/")
    ] == ["a.txt"]


def test_an_ended_run_does_not_block_a_submit(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    first = cli("submit", long_job, "--skip-check", "--json", environ=environ).json["run"]
    sandbox.secondary(first, "Training")
    assert cli("stop", first, environ=environ).code == 0
    second = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert second.code == 0, second.err
    assert second.json["run"] != first
    assert second.json["run"][-6:] == first[-6:]


@pytest.mark.promise
def test_concurrent_submits_create_one_job(
    sandbox: Served, long_job: Path, environ: dict[str, str]
) -> None:
    submit = [str(command()), "submit", str(long_job), "--skip-check"]
    several = [
        subprocess.Popen(
            submit, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ
        )
        for _ in range(6)
    ]
    outputs = [process.communicate(timeout=300)[1] for process in several]
    assert [process.returncode for process in several] == [0] * 6, outputs
    (run,) = jobs_of(sandbox, name_of(long_job))
    assert all(f"sagemaker:{run}" in text for text in outputs)
    assert sum("submitted" in text for text in outputs) == 1


@pytest.mark.promise
@pytest.mark.parametrize("transport", ["boto3", "estimator"])
def test_a_lost_response_creates_no_second_job(
    transport: str, sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    """The response is lost, and botocore sends the request again with the same job name."""
    sandbox.set_faults(resets={"CreateTrainingJob": 1})
    environ = {**environ, "CLOUDTRAIN_TRANSPORT": transport}
    done = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert done.code == 0, done.err
    assert jobs_of(sandbox, name_of(long_job)) == [done.json["run"]]
    assert f"sagemaker:{done.json['run']} submitted" in done.err


def test_a_submit_without_response_can_be_repeated(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    sandbox.set_faults(resets={"CreateTrainingJob": 50, "DescribeTrainingJob": 50})
    lost = cli("submit", long_job, "--skip-check", environ=environ)
    assert lost.code == 3
    assert "Traceback" not in lost.err
    sandbox.set_faults()
    again = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert again.code == 0, again.err
    assert jobs_of(sandbox, name_of(long_job)) == [again.json["run"]]


@pytest.mark.promise
def test_a_killed_submit_can_be_repeated(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str]
) -> None:
    """The first submit is killed between its submit lock and its job. A second submit takes over the lock."""
    sandbox.set_faults(slow_seconds={"CreateTrainingJob": 600})
    submit = [str(command()), "submit", str(long_job), "--skip-check"]
    first = subprocess.Popen(
        submit, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
    )
    claims = until(lambda: sandbox.keys("cloudtrain/requests/"))
    first.kill()
    first.wait()
    sandbox.set_faults()
    again = cli("submit", long_job, "--skip-check", "--json", environ=environ)
    assert again.code == 0, again.err
    assert jobs_of(sandbox, name_of(long_job)) == [again.json["run"]]
    assert len(claims) >= 1


def test_every_command_works_from_another_machine(
    sandbox: Served, cli: Cli, long_job: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    """The other machine has only the run id, the region and credentials."""
    run = cli("submit", long_job, "--skip-check", "--json", environ=environ).json["run"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    bare = {name: value for name, value in environ.items() if not name.startswith("CLOUDTRAIN_")}
    bare |= {
        "HOME": str(elsewhere),
        "CLOUDTRAIN_TEST_GUARD": "1",
        "AWS_REGION": environ["AWS_DEFAULT_REGION"],
    }

    def there(*arguments: str) -> Any:
        done = subprocess.run(
            [str(command()), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=bare,
            cwd=elsewhere,
        )
        assert done.returncode == 0, done.stderr
        return done

    sandbox.secondary(run, "Training")
    until(lambda: "begun" in there("logs", run).stdout)
    assert run in there("list", "--sagemaker").stdout
    assert "RUNNING" in there("status", run).stdout
    assert "STOPPED" in there("stop", run).stdout
    assert "stopped by request" in there("explain", run).stdout
