"""The cluster of the tests does what a cluster does, before anything is tested on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from support.jobs import REPOSITORY, until
from support.slurm_cluster import Cluster, cluster

SLEEP = "exec sleep 600"


def test_a_job_runs_on_two_nodes(slurm: Cluster) -> None:
    job = slurm.submit("srun hostname; srun printenv SLURMD_NODENAME", "--nodes=2", "--output=out")
    slurm.wait_for(job, "COMPLETED")
    names = (slurm.folder / "out").read_text().split()[-2:]
    assert len(set(names)) == 2
    assert set(names) <= set(slurm.nodes)


def test_a_requeued_job_starts_again(slurm: Cluster) -> None:
    job = slurm.submit(f"printenv SLURM_RESTART_COUNT >> restarts; {SLEEP}", "--requeue")
    slurm.wait_for(job, "RUNNING")
    slurm.requeue(job)
    slurm.wait_for(job, "PENDING")
    assert slurm.field(job, "Reason") == "BeginTime"
    slurm.start_now(job)
    slurm.wait_for(job, "RUNNING")
    assert until((slurm.folder / "restarts").read_text) == "1\n"


def test_a_job_of_high_priority_preempts_another(slurm: Cluster) -> None:
    spare = slurm.submit(SLEEP, "--partition=spare-now", "--nodes=4", "--exclusive", "--requeue")
    slurm.wait_for(spare, "RUNNING")
    urgent = slurm.submit("true", "--nodes=4", "--exclusive")
    slurm.wait_for(urgent, "COMPLETED")
    assert slurm.state(spare) == "PENDING"
    assert slurm.field(spare, "Restarts") == "1"


def test_a_job_of_a_node_that_is_down_ends(slurm: Cluster) -> None:
    job = slurm.submit(SLEEP, "--nodes=2", "--no-requeue", "--nodelist=n3,n4")
    slurm.wait_for(job, "RUNNING")
    slurm.set_down("n4")
    slurm.wait_for(job, "NODE_FAIL")
    assert slurm.node_state("n4") == "down"
    slurm.set_up("n4")
    until(lambda: slurm.node_state("n4") == "idle")


def test_processes_outlive_the_daemon_of_their_node(slurm: Cluster) -> None:
    job = slurm.submit("srun sleep 600", "--nodes=2", "--requeue", "--nodelist=n1,n2")
    slurm.wait_for(job, "RUNNING")
    until(lambda: len([each for each in slurm.processes(job) if each.name() == "sleep"]) == 2)
    slurm.kill_slurmd("n2")
    slurm.wait_for(job, "PENDING")
    assert slurm.node_state("n2") == "down"
    nodes = [
        each.environ()["SLURMD_NODENAME"] for each in slurm.processes(job) if each.name() == "sleep"
    ]
    assert "n2" in nodes
    slurm.kill_node("n2")
    slurm.start_slurmd("n2")


def test_a_lost_node_has_no_processes(slurm: Cluster) -> None:
    job = slurm.submit("srun sleep 600", "--nodes=2", "--no-requeue", "--nodelist=n1,n2")
    until(lambda: len([each for each in slurm.processes(job) if each.name() == "sleep"]) == 2)
    slurm.kill_node("n2")
    assert not [each for each in slurm.processes(job) if each.environ()["SLURMD_NODENAME"] == "n2"]


def test_gpus_are_handed_out(slurm: Cluster) -> None:
    job = slurm.submit("echo $SLURM_GPUS_ON_NODE", "--gpus-per-node=2", "--output=out")
    slurm.wait_for(job, "COMPLETED")
    assert (slurm.folder / "out").read_text() == "2\n"


def test_the_partition_with_a_limit_has_it(slurm: Cluster) -> None:
    job = slurm.submit(SLEEP, "--partition=short")
    assert slurm.field(job, "TimeLimit") == "00:01:00"


def test_the_end_leaves_no_process(tmp_path: Path) -> None:
    with cluster(tmp_path, nodes=1) as small:
        job = small.submit("trap '' TERM; setsid sleep 600 & setsid sleep 600")
        until(lambda: len(small.processes(job)) == 3)
    left = [each for each in psutil.process_iter() if str(tmp_path) in _environment(each)]
    assert left == []


def test_ctrl_c_ends_a_cluster_that_was_started_by_hand(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.slurm_cluster", str(tmp_path), "--nodes=1"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "tests")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as started:
        assert started.stdout is not None
        name, _, path = started.stdout.readline().strip().partition("=")
        assert name == "export SLURM_CONF"
        nodes = subprocess.run(
            ["sinfo", "--noheader", "--partition=main", "--format=%T"],
            env={**os.environ, "SLURM_CONF": path}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert nodes == "idle\n"
        started.send_signal(signal.SIGINT)
    left = [each for each in psutil.process_iter() if path in _environment(each)]
    assert left == []


def test_accounting_has_accounts_and_finished_jobs(accounting: Cluster) -> None:
    job = accounting.submit("exit 3", "--account=research", "--qos=urgent")
    accounting.wait_for(job, "FAILED")
    until(
        lambda: (
            "FAILED" in accounting.run("sacct", "--noheader", "--jobs", str(job), "--format=State")
        )
    )


def _environment(process: psutil.Process) -> str:
    try:
        return str(process.environ())
    except psutil.Error:
        return ""
