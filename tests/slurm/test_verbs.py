"""Commands about runs on a real Slurm: what they show, and how seldom they ask the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, until
from support.slurm_cluster import Cluster
from support.slurm_fixtures import settings_file

pytestmark = pytest.mark.processes

JOB = """\
name: verbs
code: {script: train.py}
cluster: {processes_per_instance: 1}
limits: {runtime: 10m, hang: null}
"""
SCRIPT = """\
import os, time
print("begins", flush=True)
if os.environ.get("MODE") == "fails":
    raise ValueError("bad label 7")
time.sleep(float(os.environ.get("SLEEP", "0")))
"""
WAITS = ("--set", "code.env.SLEEP=300")

WriteJob = Callable[..., Path]
Submit = Callable[..., str]


@pytest.fixture
def submit(cli: Cli, job: WriteJob, slurm_site: Path) -> Submit:
    """Submit the job with further options; return the run id."""
    path = job(JOB, train_py=SCRIPT)

    def send(*options: str) -> str:
        done = cli(
            "submit", path, "--backend", "slurm", "--json", "--new", "--skip-check", *options
        )
        assert done.code == 0, done.err
        return str(done.json["run"])

    return send


@pytest.fixture
def priced_site(slurm_site: Path) -> Path:
    settings = settings_file()
    settings.write_text(f"{settings.read_text()}usd_per_node_hour = 3600.0\n")
    return slurm_site


def wait_for(cli: Cli, run: str, *states: str) -> None:
    until(lambda: cli("status", f"slurm:{run}", "--json").json["state"] in states, seconds=60)


def job_of(site: Path, run: str) -> str:
    return (site / "runs" / run / "job").read_text().strip()


def test_costs_of_a_site_with_a_price(cli: Cli, submit: Submit, priced_site: Path) -> None:
    run = submit("--instances", "2", "--set", "code.env.MODE=fails")
    wait_for(cli, run, "FAILED")
    status = cli("status", f"slurm:{run}", "--json").json
    assert status["billable_seconds"] > 0
    # A dollar per second on each of two nodes.
    assert status["cost_usd"] == pytest.approx(2 * status["billable_seconds"])
    found = cli("costs", "--backend", "slurm", "--json").json["runs"][0]
    assert found["run"] == f"slurm:{run}"
    assert found["instances"] == 2
    assert found["cost_usd"] == found["failed_usd"] == pytest.approx(status["cost_usd"])


def test_a_list_of_one_backend(cli: Cli, submit: Submit, slurm_site: Path) -> None:
    run = submit("--set", "slurm.sbatch=[--hold]")
    runs = cli("list", "--backend", "slurm", "--json").json["runs"]
    assert (runs[0]["run"], runs[0]["state"]) == (run, "QUEUED")
    assert "scontrol release" in runs[0]["reason"]
    assert cli("list", "--backend", "local", "--json").json["runs"] == []
    assert "held" in cli("explain", f"slurm:{run}").out


def test_a_list_without_a_controller_names_it(
    cli: Cli, submit: Submit, slurm: Cluster, slurm_site: Path
) -> None:
    ended = submit("--set", "code.env.MODE=fails")
    wait_for(cli, ended, "FAILED")
    held = ("--set", "slurm.sbatch=[--hold]")
    waiting = {submit(*held, "--set", f"code.env.NUMBER={number}") for number in range(2)}
    slurm.stop_controller()
    try:
        done = cli("list", "--json")
        assert done.code == 0, done.err
        runs = {each["run"]: each for each in done.json["runs"]}
        assert runs[ended]["state"] == "FAILED"
        for run in waiting:
            assert runs[run]["state"] == "UNKNOWN"
            assert "Slurm's controller does not answer" in runs[run]["reason"]
            assert "Error" not in runs[run]["reason"]
    finally:
        slurm.start_controller()


def test_watched_runs_ask_slurm_seldom(
    submit: Submit, cli: Cli, slurm: Cluster, slurm_site: Path, tmp_path: Path
) -> None:
    runs = [submit(*WAITS, "--set", f"code.env.NUMBER={number}") for number in range(3)]
    for run in runs:
        wait_for(cli, run, "RUNNING")
    asked = tmp_path / "asked"
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("squeue", "scontrol", "sacct"):
        real = subprocess.run(["which", name], capture_output=True, text=True, check=True).stdout
        (programs / name).write_text(
            f'#!/bin/sh\necho {name} >> {asked}\nexec {real.strip()} "$@"\n'
        )
        (programs / name).chmod(0o755)
    watch = (
        "import sys, time, cloudtrain\n"
        "list(cloudtrain.list_runs(backend='slurm'))\n"
        "end = time.monotonic() + 12\n"
        "while time.monotonic() < end:\n"
        "    found = {each.run: str(each.state) for each in cloudtrain.list_runs(backend='slurm')}\n"
        "    assert [found[run] for run in sys.argv[1:]] == ['RUNNING'] * 3, found\n"
        "    time.sleep(0.2)\n"
    )
    path = f"{programs}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path}
    subprocess.run([sys.executable, "-c", watch, *runs], env=environ, check=True)
    calls = asked.read_text().split()
    # Each run without a recorded end once at the beginning; then all together.
    assert calls.count("squeue") == 1
    assert len(runs) <= calls.count("scontrol") <= len(list((slurm_site / "runs").iterdir()))
    slurm.run("scancel", *(job_of(slurm_site, run) for run in runs))


def test_a_cancel_before_the_start_is_remembered(
    cli: Cli, submit: Submit, slurm: Cluster, slurm_site: Path
) -> None:
    run = submit("--set", "slurm.sbatch=[--hold]")
    folder = slurm_site / "runs" / run
    slurm.run("scancel", job_of(slurm_site, run))
    # As it is when the record has been visible for long.
    old = time.time() - 60
    os.utime(folder / "state.json", (old, old))
    status = cli("status", f"slurm:{run}", "--json").json
    assert (status["state"], status["reason"]) == ("STOPPED", "cancelled in Slurm (scancel)")
    # Slurm forgets the job.
    (folder / "job").write_text("999999\n")
    assert cli("status", f"slurm:{run}", "--json").json["state"] == "STOPPED"


def test_rehearse_and_resume_name_where_they_take_place(cli: Cli, job: WriteJob) -> None:
    path = job(JOB, train_py=SCRIPT)
    refused = cli("rehearse", path, "--backend", "slurm")
    assert refused.code == 2
    assert "takes place on this machine, not on Slurm" in refused.err
    elsewhere = cli("resume", "verbs", "--backend", "slurm")
    assert elsewhere.code == 2
    assert "checkpoint.resume" in elsewhere.err
