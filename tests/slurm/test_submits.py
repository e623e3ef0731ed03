"""Submits to a real Slurm: one job for each request, found again from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, command, until
from support.slurm_cluster import Cluster
from support.slurm_fixtures import settings_file

JOB = """\
name: %s
code: {script: train.py}
cluster: {processes_per_instance: 1}
limits: {runtime: 10m, hang: null}
"""
SCRIPT = "import os, time\nprint('begins', flush=True)\ntime.sleep(float(os.environ.get('SLEEP', '0')))\n"
WAITS = ("--set", "code.env.SLEEP=120")

WriteJob = Callable[..., Path]


def submit(cli: Cli, path: Path, *options: str) -> str:
    done = cli("submit", path, "--backend", "slurm", "--json", *options)
    assert done.code == 0, done.err
    return str(done.json["run"])


def state_of(cli: Cli, run: str) -> str:
    return str(cli("status", f"slurm:{run}", "--json").json["state"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("count", "is_same", "options", "expected"),
    [(15, True, (), 1), (20, False, (), 20), (8, True, ("--new",), 8)],
    ids=["same", "different", "new"],
)
def test_submits_at_the_same_time_start_each_request_once(
    job: WriteJob,
    slurm: Cluster,
    slurm_site: Path,
    tmp_path: Path,
    count: int,
    is_same: bool,
    options: tuple[str, ...],
    expected: int,
) -> None:
    paths = [job(JOB % "same", train_py=SCRIPT)] * count
    if not is_same:
        paths = []
        for number in range(count):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "train.py").write_text(SCRIPT)
            (folder / "job.yaml").write_text(JOB % f"job{number}")
            paths.append(folder / "job.yaml")
    started = [
        subprocess.Popen(
            [command(), "submit", path, "--backend", "slurm", "--skip-check", *WAITS, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CLOUDTRAIN_HOME": str(tmp_path / f"home{number}")},
        )
        for number, path in enumerate(paths)
    ]
    ended = [(*each.communicate(timeout=300), each.returncode) for each in started]
    assert [code for _, _, code in ended] == [0] * count, [error for _, error, _ in ended]
    runs = {out.split()[-1] for out, _, _ in ended}
    jobs = slurm.run("squeue", "--noheader", "--format=%j").split()
    assert sorted(jobs) == sorted(runs)
    assert len(jobs) == expected
    assert {each.name for each in (slurm_site / "runs").iterdir() if each.name in runs} == runs


@pytest.mark.processes
def test_a_submit_that_was_interrupted_is_found_again(
    cli: Cli, job: WriteJob, slurm: Cluster, slurm_site: Path
) -> None:
    blocker = slurm.submit("sleep 600", "--exclusive", "--nodes=4")
    path = job(JOB % "lost", train_py=SCRIPT)
    run = submit(cli, path, "--skip-check", *WAITS)
    folder = slurm_site / "runs" / run
    number = (folder / "job").read_text()
    # As it is when the submit was killed after sbatch.
    (folder / "job").unlink()
    assert state_of(cli, run) == "QUEUED"
    again = cli("submit", path, "--backend", "slurm", "--json", "--skip-check", *WAITS)
    assert again.json["run"] == run
    slurm.run("scancel", str(blocker))
    until(lambda: state_of(cli, run) == "RUNNING")
    assert (folder / "job").read_text() == number
    assert cli("stop", f"slurm:{run}", "--json").code == 0
    until(lambda: state_of(cli, run) == "STOPPED")


@pytest.mark.processes
def test_a_run_is_found_from_a_folder_without_settings(
    cli: Cli, job: WriteJob, slurm: Cluster, slurm_site: Path, tmp_path: Path
) -> None:
    run = submit(cli, job(JOB % "elsewhere", train_py=SCRIPT))
    settings = settings_file()
    content = settings.read_text()
    settings.write_text("")
    try:
        until(lambda: state_of(cli, run) == "SUCCEEDED")
        assert run in cli("list", cwd=tmp_path).out
        resumed = cli("resume", f"slurm:{run}")
        assert resumed.code == 2
        assert "cloudtrain.toml" in resumed.err
    finally:
        settings.write_text(content)


@pytest.mark.processes
def test_a_refused_submit_leaves_no_run(
    cli: Cli, job: WriteJob, slurm: Cluster, slurm_site: Path
) -> None:
    path = job(JOB % "refused", train_py=SCRIPT)
    for check in ((), ("--skip-check",)):
        done = cli("submit", path, "--backend", "slurm", "--set", "slurm.partition=mian", *check)
        assert done.code in (2, 3), done.err
        assert "main" in done.err
        assert "Traceback" not in done.err
    assert list((slurm_site / "runs").glob("refused-*")) == []


@pytest.mark.processes
def test_a_controller_that_is_down_is_named(
    cli: Cli, job: WriteJob, slurm: Cluster, slurm_site: Path
) -> None:
    path = job(JOB % "down", train_py=SCRIPT)
    run = submit(cli, path, *WAITS)
    slurm.stop_controller()
    try:
        done = cli("status", f"slurm:{run}")
        assert done.code == 3, done.err
        assert "Slurm" in done.err
        assert "Traceback" not in done.err
    finally:
        slurm.start_controller()
    until(lambda: state_of(cli, run) in ("STARTING", "RUNNING"))


@pytest.mark.processes
def test_missing_data_are_named_at_once(
    cli: Cli, job: WriteJob, slurm: Cluster, slurm_site: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.csv").write_text("1")
    blocker = slurm.submit("sleep 600", "--exclusive", "--nodes=4")
    path = job(JOB % "nodata" + f"data: {{train: {data}}}\n", train_py=SCRIPT)
    run = submit(cli, path, "--skip-check")
    shutil.rmtree(data)
    slurm.run("scancel", str(blocker))
    until(lambda: state_of(cli, run) == "FAILED", seconds=60)
    assert "there is nothing at" in cli("status", f"slurm:{run}", "--json").json["reason"]
