"""Ends and waits of runs on a real Slurm are told apart: state, reason in words, and what to do."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, until
from support.slurm_cluster import Cluster, cluster, missing_memory_limits, require_slurm
from support.slurm_fixtures import settings_file

from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.queue_states import End, describe_job
from cloudtrain_runtime.contract.attempts import read_attempt

pytestmark = pytest.mark.processes

JOB = """\
name: ends
code: {script: train.py}
cluster: {processes_per_instance: 1}
limits: {runtime: 10m, hang: null}
"""
SCRIPT = """\
import os, time
print("begins", flush=True)
held = []
while os.environ.get("MODE") == "eats":
    held.append(b"x" * 50_000_000)
if os.environ["CLOUDTRAIN_ATTEMPT"] == "1":
    time.sleep(float(os.environ.get("SLEEP", "0")))
"""
WAITS = ("--set", "code.env.SLEEP=300")
HELD = ("--set", 'slurm.sbatch=["--hold"]')
NO_REQUEUE = ("--set", 'slurm.sbatch=["--no-requeue"]')
SPARE = ("--set", "slurm.partition=spare-now")
NOBODY = 65534

WriteJob = Callable[..., Path]


@dataclass
class Runs:
    """Runs of a script that ends at once, or waits in its first attempt."""

    cli: Cli
    slurm: Cluster
    path: Path

    @property
    def site(self) -> Path:
        return self.slurm.folder / "cloudtrain"

    def submit(self, *options: str) -> str:
        done = self.cli(
            "submit", self.path, "--backend", "slurm", "--json", "--new", "--skip-check", *options
        )
        assert done.code == 0, done.err
        return str(done.json["run"])

    def start(self, *options: str) -> str:
        """Submit a run, and wait until its script waits."""
        run = self.submit(*WAITS, *options)
        until(lambda: "begins" in self.cli("logs", f"slurm:{run}", "--raw").out)
        return run

    def job(self, run: str) -> str:
        return (self.site / "runs" / run / "job").read_text().strip()

    def status(self, run: str) -> dict[str, Any]:
        return dict(self.cli("status", f"slurm:{run}", "--json").json)

    def wait_for(self, run: str, state: str, words: str = "") -> str:
        """Wait until a run is in a state for a reason with these words; return the reason."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(self.status(run))
            return found["state"] == state and words in (found["reason"] or "")

        try:
            until(reached, seconds=90)
        except AssertionError:
            raise AssertionError(found) from None
        return str(found["reason"])

    def explain(self, run: str) -> dict[str, Any]:
        return dict(self.cli("explain", f"slurm:{run}", "--json").json)


@pytest.fixture
def make_runs(cli: Cli, job: WriteJob) -> Iterator[Callable[[Cluster], Runs]]:
    settings = settings_file()

    def make(slurm: Cluster) -> Runs:
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(f'[slurm.test]\nfolder = "{slurm.folder / "cloudtrain"}"\n')
        return Runs(cli, slurm, job(JOB, train_py=SCRIPT))

    yield make
    settings.unlink()


@pytest.fixture
def runs(slurm: Cluster, make_runs: Callable[[Cluster], Runs]) -> Runs:
    return make_runs(slurm)


@pytest.fixture
def counted(accounting: Cluster, make_runs: Callable[[Cluster], Runs]) -> Runs:
    """Runs on a cluster with accounting."""
    return make_runs(accounting)


def test_a_run_that_waits_for_somebody_says_so(runs: Runs, slurm: Cluster) -> None:
    failed = slurm.submit("exit 3", "--output=/dev/null")
    slurm.wait_for(failed, "FAILED")
    dependent = runs.submit("--set", f'slurm.sbatch=["--dependency=afterok:{failed}"]')
    held = runs.submit(*HELD)
    slurm.run("scontrol", "update", "PartitionName=spare", "State=DOWN")
    try:
        waiting = runs.submit("--set", "slurm.partition=spare")
        runs.wait_for(waiting, "QUEUED", "its partition is down; another partition (see: sinfo)")
    finally:
        slurm.run("scontrol", "update", "PartitionName=spare", "State=UP")
    runs.wait_for(dependent, "QUEUED", "so it never starts; stop it, and submit it without")
    held_by_user = f"held by its user; to start it: scontrol release {runs.job(held)}"
    assert runs.wait_for(held, "QUEUED", "held") == held_by_user
    assert runs.explain(held)["message"] == held_by_user
    slurm.run("scontrol", "hold", runs.job(held))
    runs.wait_for(held, "QUEUED", "held by an administrator; ask the cluster's administrators")


def test_a_closed_partition_is_named_at_the_submit(runs: Runs, slurm: Cluster) -> None:
    slurm.run("scontrol", "update", "PartitionName=spare", "State=INACTIVE")
    try:
        done = runs.cli(
            "submit", runs.path, "--backend", "slurm", "--new", "--set", "slurm.partition=spare"
        )
    finally:
        slurm.run("scontrol", "update", "PartitionName=spare", "State=UP")
    assert done.code == 2
    assert "slurm.partition: --partition=spare: the partition accepts no jobs now" in done.err


def test_a_run_that_is_queued_again_and_held_says_so(runs: Runs, slurm: Cluster) -> None:
    run = runs.start()
    slurm.run("scontrol", "requeuehold", runs.job(run))
    reason = runs.wait_for(run, "QUEUED", "held when it was queued again")
    assert reason.endswith(f"to start it: scontrol release {runs.job(run)}")
    # It has ended this attempt only.
    assert "Slurm ended the job" not in reason


def test_a_run_that_is_cancelled_before_its_start(runs: Runs, slurm: Cluster) -> None:
    run = runs.submit(*HELD)
    slurm.run("scancel", runs.job(run))
    # At once: nothing can have recorded anything else.
    assert runs.wait_for(run, "STOPPED") == "cancelled in Slurm (scancel)"
    assert "submit it again" in runs.explain(run)["action"]


def test_accounting_says_who_has_cancelled(counted: Runs, accounting: Cluster) -> None:
    name = pwd.getpwuid(NOBODY).pw_name
    accounting.run(
        "sacctmgr", "--immediate", "add", "user", name, "Account=research", "AdminLevel=Operator"
    )
    mine, other = counted.submit(*HELD), counted.start()
    accounting.run("scancel", counted.job(mine))
    accounting.run_as(NOBODY, "scancel", counted.job(other))
    counted.wait_for(mine, "STOPPED", "cancelled by you (scancel)")
    assert counted.wait_for(other, "STOPPED", "cancelled") == f"cancelled by {name} (scancel)"
    assert counted.explain(other)["action"].startswith("The job was cancelled in Slurm; ")


def starts_what_was_forbidden() -> bool:
    """Return whether this Slurm starts a queued job whose QOS or account was taken away since its submit."""
    return int(Slurm().version().partition(".")[0]) >= 24


def test_a_qos_that_was_taken_away_is_named(counted: Runs, accounting: Cluster) -> None:
    manager = ("sacctmgr", "--immediate")
    run = counted.submit("--set", "slurm.qos=urgent", *HELD)
    accounting.run(*manager, "remove", "qos", "urgent")
    try:
        accounting.run("scontrol", "release", counted.job(run))
        if starts_what_was_forbidden():
            counted.wait_for(run, "SUCCEEDED")
        else:
            counted.wait_for(run, "QUEUED", "its QOS is not valid any more; see: sacctmgr show qos")
    finally:
        accounting.run(*manager, "add", "qos", "urgent")
        accounting.run(*manager, "modify", "user", "root", "set", "qos=normal,spare,urgent")


def test_an_account_that_the_partition_excludes_is_named(
    counted: Runs, accounting: Cluster
) -> None:
    run = counted.submit("--set", "slurm.partition=spare", *HELD)
    accounting.run("scontrol", "update", "PartitionName=spare", "AllowAccounts=others")
    try:
        accounting.run("scontrol", "release", counted.job(run))
        if starts_what_was_forbidden():
            counted.wait_for(run, "SUCCEEDED")
        else:
            counted.wait_for(run, "QUEUED", "its account may not use its partition; another")
    finally:
        accounting.run("scontrol", "update", "PartitionName=spare", "AllowAccounts=ALL")


def requeue(runs: Runs, run: str) -> None:
    runs.slurm.requeue(runs.job(run))


def preempt(runs: Runs, run: str) -> None:
    del run
    runs.slurm.preempt()


def lose_a_node(runs: Runs, run: str) -> None:
    runs.slurm.set_down(runs.slurm.field(runs.job(run), "BatchHost"))


@pytest.mark.parametrize(
    ("interrupt", "options"),
    [(requeue, ()), (preempt, SPARE), (lose_a_node, ())],
    ids=["requeue", "preempted", "node down"],
)
def test_interrupted_runs_continue_with_accounting(
    counted: Runs, interrupt: Callable[[Runs, str], None], options: tuple[str, ...]
) -> None:
    run = counted.start(*options)
    interrupt(counted, run)
    counted.wait_for(run, "QUEUED", "Slurm starts it at")
    counted.slurm.start_now(counted.job(run))
    counted.wait_for(run, "SUCCEEDED")
    assert read_attempt(counted.site / "runs" / run / "attempt") == 2


@pytest.mark.parametrize(
    ("interrupt", "options", "reason"),
    [
        (preempt, SPARE, "preempted by a job of a higher priority, and not queued again"),
        (lose_a_node, (), "a node of the job failed, and Slurm did not queue it again"),
    ],
    ids=["preempted", "node down"],
)
def test_runs_that_are_not_queued_again_say_why(
    counted: Runs,
    interrupt: Callable[[Runs, str], None],
    options: tuple[str, ...],
    reason: str,
) -> None:
    run = counted.start(*options, *NO_REQUEUE)
    interrupt(counted, run)
    assert counted.wait_for(run, "STOPPED") == reason
    action = counted.explain(run)["action"]
    assert "Without --no-requeue, Slurm queues such a run again" in action
    assert "submit it again" in action


def test_too_little_memory_is_named_with_evidence(
    tmp_path_factory: pytest.TempPathFactory,
    make_runs: Callable[[Cluster], Runs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_slurm()
    if (reason := missing_memory_limits()) is not None:
        pytest.skip(reason)
    # The path of a socket has 107 characters at most, and a test's own folder has a long name.
    folder = tmp_path_factory.mktemp("limited")
    with cluster(folder, 1, memory_limits=True) as slurm:
        monkeypatch.setenv("SLURM_CONF", slurm.environ["SLURM_CONF"])
        runs = make_runs(slurm)
        run = runs.submit("--set", "code.env.MODE=eats", "--set", 'slurm.sbatch=["--mem=600M"]')
        reason = runs.wait_for(run, "FAILED")
        assert "was killed by SIGKILL; the kernel has ended 1 process for lack of memory" in reason
        explained = runs.explain(run)
        assert explained["class"] == "host_memory"
        assert "ask Slurm for more memory (--mem=0 in slurm.sbatch" in explained["action"]
        # The batch script itself.
        job = slurm.submit(
            "x=$(tr '\\0' x < /dev/zero | head -c 300M)", "--mem=50M", "--output=/dev/null"
        )
        slurm.wait_for(job, "OUT_OF_MEMORY")
        found = Slurm().job(str(job))
        assert found is not None
        assert describe_job(found).end is End.OUT_OF_MEMORY
