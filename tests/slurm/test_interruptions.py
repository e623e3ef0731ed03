"""Runs on a real Slurm that are interrupted continue under the same id, exactly, or end as their user wanted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, until
from support.slurm_cluster import Cluster
from support.slurm_fixtures import settings_file
from support.slurm_runs import HOLDS, Trainings

pytestmark = pytest.mark.processes


@pytest.fixture
def trainings(cli: Cli, slurm: Cluster, slurm_site: Path) -> Trainings:
    return Trainings(cli, slurm, slurm_site)


@pytest.fixture(scope="module")
def known_weights() -> dict[str, str]:
    return {}


@pytest.fixture
def expected_weights(trainings: Trainings, known_weights: dict[str, str]) -> str:
    """The weights of a training that nothing has interrupted."""
    if not known_weights:
        run = trainings.submit()
        status = trainings.wait_for_end(run)
        assert status["state"] == "SUCCEEDED", status
        known_weights["digits"] = trainings.weights(run)
    return known_weights["digits"]


def requeue(trainings: Trainings, run: str) -> None:
    trainings.slurm.requeue(trainings.job(run))


def last_node(trainings: Trainings, run: str) -> str:
    nodes = trainings.slurm.field(trainings.job(run), "NodeList")
    return f"n{nodes.rstrip(']')[-1]}"


def lose_a_node(trainings: Trainings, run: str) -> None:
    trainings.slurm.set_down(last_node(trainings, run))


def preempt(trainings: Trainings, run: str) -> None:
    del run
    trainings.slurm.submit("sleep 3", "--partition=main", "--exclusive", "--nodes=4")


@pytest.mark.parametrize(
    ("options", "interrupt"),
    [
        ((), requeue),
        ((), lose_a_node),
        (("--set", "slurm.partition=spare"), preempt),
        (("--set", "slurm.partition=spare-now"), preempt),
    ],
    ids=["requeue", "node down", "preempted with grace", "preempted"],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    trainings: Trainings,
    expected_weights: str,
    options: tuple[str, ...],
    interrupt: Callable[[Trainings, str], None],
) -> None:
    run = trainings.submit_and_hold(*options)
    interrupt(trainings, run)
    status = trainings.wait_for_end(run)
    assert status["state"] == "SUCCEEDED", status
    assert trainings.attempts(run) == 2
    assert trainings.weights(run) == expected_weights
    require_the_queue_is_waiting(trainings, run, status)


def require_the_queue_is_waiting(trainings: Trainings, run: str, status: dict[str, Any]) -> None:
    """Compare a run's ledger and phases with the recorded times of its attempts."""
    first, second = json.loads((trainings.folder(run) / "attempts.json").read_text())
    on_nodes = sum(each["ended"] - each["started"] for each in (first, second))
    found = trainings.cli("costs", f"slurm:{run}", "--json").json
    assert found["seconds"] == pytest.approx(on_nodes, abs=0.01)
    paid = [each["seconds"] for each in found["entries"] if each["kind"] != "waiting"]
    assert sum(paid) == pytest.approx(on_nodes, abs=0.01)
    second_spans = found["attempts"][1]["spans"]
    assert [each["kind"] for each in second_spans[:2]] == ["waiting", "restart"]
    queued = second["started"] - first["ended"]
    assert second_spans[0]["seconds"] == pytest.approx(queued, abs=0.01)
    started = datetime.fromisoformat(status["started"]).timestamp()
    assert started == pytest.approx(first["started"], abs=0.01)
    (phases,) = re.findall(
        r"^phases +(.*)$", trainings.cli("status", f"slurm:{run}").out, re.MULTILINE
    )
    # The first phases of many are summed up.
    assert re.search(r"-> training \S+ -> waiting \S+ -> restarting \S+ -> training ", phases)


def newest_step(trainings: Trainings, run: str) -> int:
    return max((int(each["step"]) for each in trainings.checkpoints(run)), default=0)


def test_a_lost_node_is_replaced(trainings: Trainings, expected_weights: str) -> None:
    run = trainings.submit_and_hold()
    lost = last_node(trainings, run)
    trainings.slurm.kill_node(lost)
    status = trainings.wait_for_end(run)
    assert status["state"] == "SUCCEEDED", status
    assert trainings.attempts(run) == 2
    assert trainings.weights(run) == expected_weights
    until(lambda: not trainings.processes(run), seconds=60)


def test_ranks_of_a_lost_node_save_no_more(trainings: Trainings) -> None:
    run = trainings.submit("--instances", "1", "--set", "train.epochs=4000")
    trainings.wait_for_step(run, 300)
    job = trainings.job(run)
    trainings.slurm.kill_slurmd(last_node(trainings, run))
    until(lambda: trainings.slurm.field(job, "Reason") == "BeginTime")
    # Slurm has lost the node, and no other attempt begins.
    trainings.slurm.run("scancel", job)
    assert trainings.wait_for_end(run)["state"] == "STOPPED"
    until(lambda: not trainings.processes(run), seconds=60)
    newest = newest_step(trainings, run)
    time.sleep(3)
    assert newest_step(trainings, run) == newest


def test_a_run_that_has_ended_is_not_started_again(trainings: Trainings) -> None:
    run = trainings.submit("--set", "train.epochs=2")
    before = trainings.wait_for_end(run)
    assert before["state"] == "SUCCEEDED"
    job = trainings.job(run)
    until(lambda: trainings.slurm.state(job) == "COMPLETED")
    trainings.slurm.requeue(job)
    time.sleep(2)
    trainings.slurm.start_now(job)
    until(lambda: trainings.slurm.state(job) == "COMPLETED")
    assert trainings.status(run)["state"] == "SUCCEEDED"
    assert trainings.attempts(run) == 1
    assert (trainings.folder(run) / "output" / "model.tar.gz").is_file()


def test_a_stop_before_the_batch_step_is_no_failure(
    trainings: Trainings, slurm_site: Path, cli: Cli
) -> None:
    settings = settings_file()
    settings.write_text(f'[slurm.test]\nfolder = "{slurm_site}"\nsetup = ["sleep 8"]\n')
    run = trainings.submit()
    until(lambda: trainings.slurm.state(trainings.job(run)) == "RUNNING")
    assert cli("stop", f"slurm:{run}", "--json").code == 0
    status = trainings.wait_for_end(run)
    assert (status["state"], status["reason"]) == ("STOPPED", "stopped by request")


def test_a_job_that_is_not_the_runs_gets_no_signal(trainings: Trainings, cli: Cli) -> None:
    other = trainings.slurm.submit("sleep 600", "--job-name=precious")
    run = trainings.submit()
    trainings.wait_for_step(run, 1)
    own = trainings.job(run)
    (trainings.folder(run) / "job").write_text(f"{other}\n")
    cli("stop", f"slurm:{run}", "--json")
    assert trainings.slurm.state(other) == "RUNNING"
    (trainings.folder(run) / "job").write_text(f"{own}\n")
    assert trainings.wait_for_end(run)["state"] == "STOPPED"


def test_a_cancelled_run_stays_cancelled(trainings: Trainings, cli: Cli) -> None:
    run = trainings.submit_and_hold()
    job = trainings.job(run)
    trainings.slurm.run("scancel", job)
    status = trainings.wait_for_end(run)
    assert status["state"] == "STOPPED", status
    assert "cancelled in Slurm" in status["reason"]
    assert status["last_checkpoint"]["step"] >= status["last_step"] - 1
    until(lambda: trainings.slurm.state(job) == "CANCELLED")
    explained = cli("explain", f"slurm:{run}", "--json").json
    assert explained["state"] == "STOPPED"
    # Slurm forgets a job; what the run has recorded stays.
    assert trainings.attempts(run) == 1


def test_a_stop_saves_and_ends(trainings: Trainings, cli: Cli) -> None:
    run = trainings.submit_and_hold()
    assert cli("stop", f"slurm:{run}", "--json").code == 0
    status = trainings.wait_for_end(run)
    assert (status["state"], status["reason"]) == ("STOPPED", "stopped by request")
    assert status["last_checkpoint"]["step"] == status["last_step"]
    until(lambda: trainings.slurm.state(trainings.job(run)) == "COMPLETED")


def test_a_run_in_the_queue_is_stopped_at_once(trainings: Trainings, cli: Cli) -> None:
    trainings.slurm.submit("sleep 600", "--exclusive", "--nodes=4")
    run = trainings.submit()
    until(lambda: "waiting for resources" in trainings.status(run)["reason"])
    assert cli("stop", f"slurm:{run}", "--json").code == 0
    status = trainings.status(run)
    assert (status["state"], status["reason"]) == (
        "STOPPED",
        "stopped by request before it started",
    )
    assert not trainings.slurm.processes(trainings.job(run))


def test_a_limit_of_the_partition_is_a_chain(
    trainings: Trainings, slurm_site: Path, expected_weights: str
) -> None:
    settings = settings_file()
    settings.write_text(
        f'[slurm.test]\nfolder = "{slurm_site}"\npartition = "short"\ntime = "1m"\n'
    )
    # Slurm's signal may come before the step at which the training waits.
    run = trainings.submit(*HOLDS)
    status = trainings.wait_for_end(run)
    assert status["state"] == "SUCCEEDED", status
    assert trainings.weights(run) == expected_weights
    assert trainings.attempts(run) > 1


def lose_again(trainings: Trainings, run: str, node: str) -> None:
    """Lose a node in an attempt, and return it to service."""
    attempt = trainings.attempts(run)
    trainings.slurm.set_down(node)
    until(lambda: trainings.status(run)["state"] == "QUEUED")
    until(lambda: trainings.recorded(run)[attempt - 1]["lost"] == [node])
    trainings.slurm.set_up(node)


def test_a_node_that_was_lost_twice_is_avoided(trainings: Trainings) -> None:
    slurm = trainings.slurm
    run = trainings.submit("--set", "train.epochs=4000")
    trainings.wait_for_step(run, 100)
    job, bad = trainings.job(run), last_node(trainings, run)
    others = [each for each in slurm.nodes if each not in trainings.nodes(run)]
    slurm.set_drained(*others)
    lose_again(trainings, run, bad)
    # It would wait for ever without the bad node.
    assert slurm.field(job, "ExcNodeList") == "(null)"
    trainings.start_again(run)
    assert bad in trainings.nodes(run)
    slurm.set_up(*others)
    lose_again(trainings, run, bad)
    until(lambda: slurm.field(job, "ExcNodeList") == bad)
    trainings.start_again(run)
    assert bad not in trainings.nodes(run)
    assert trainings.status(run)["reason"] == f"{bad} was lost in attempts 1 and 2"
    trainings.cli("stop", f"slurm:{run}")
    assert trainings.wait_for_end(run)["state"] == "STOPPED"
