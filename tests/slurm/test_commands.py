"""The commands of Slurm as cloudtrain calls them, and its words for states, compared with a real Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import until
from support.slurm_cluster import Cluster

from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.queue_states import End, QueueState, describe_job
from cloudtrain.backends.slurm.rejections import RejectedOptionError
from cloudtrain.errors import CloudError, CloudtrainError, UnreachableError, UserError
from cloudtrain.planning.batch_job import BatchJob, BatchOption
from cloudtrain.runs.status import State

SLEEP = "#!/bin/bash\nexec sleep 600\n"


def batch_job(slurm: Cluster, *options: str, script: str = SLEEP) -> BatchJob:
    given = [each.partition("=") for each in options]
    own = [
        BatchOption("--parsable", None, "cloudtrain"),
        BatchOption("--chdir", str(slurm.folder), "cloudtrain"),
    ]
    further = [
        BatchOption(name, value if sign else None, "slurm.sbatch") for name, sign, value in given
    ]
    return BatchJob("site", (*own, *further), script)


def state_of(commands: Slurm, job: str) -> QueueState:
    found = commands.job(job)
    assert found is not None
    return describe_job(found)


def test_a_job_is_submitted_and_found(slurm: Cluster) -> None:
    commands = Slurm()
    options = ("--job-name=a|b JobState=COMPLETED", "--comment=cloudtrain: x = 1", "--nodes=2")
    job = commands.submit(batch_job(slurm, *options))
    slurm.wait_for(job, "RUNNING")
    (queued,) = (each for each in commands.jobs() if each.id == job)
    (same,) = commands.jobs([job, "9999999"])
    shown = commands.job(job)
    assert shown is not None
    assert queued == same
    unknown = {"restarts": None, "exit_status": None, "exit_signal": None, "ends_by": None}
    assert dataclasses.replace(shown, **unknown) == queued
    assert (queued.id, queued.name, queued.comment) == (
        job,
        "a|b JobState=COMPLETED",
        "cloudtrain: x = 1",
    )
    assert queued.start is not None
    assert commands.job_state(job) == "RUNNING"
    addresses = commands.addresses(queued.nodes)
    assert len(addresses) == 2
    assert all(each.startswith("127.") for each in addresses.values())


def test_an_unknown_job_is_none(slurm: Cluster) -> None:
    commands = Slurm()
    assert commands.job("9999999") is None
    assert commands.job_state("9999999") == ""
    assert commands.jobs(["9999999"]) == ()
    assert commands.history("9999999") is None
    commands.cancel("9999999")
    commands.signal("9999999")


def test_the_signal_reaches_the_batch_step_alone(slurm: Cluster) -> None:
    script = (
        "#!/bin/bash\ntrap 'echo batch step >> signals; exit 0' USR1\n"
        "srun bash -c \"trap 'echo task >> signals' USR1; touch ready; while true; do sleep 0.1; done\" &\nwait\n"
    )
    commands = Slurm()
    job = commands.submit(batch_job(slurm, script=script))
    until((slurm.folder / "ready").exists)
    commands.signal(job)
    slurm.wait_for(job, "COMPLETED")
    assert (slurm.folder / "signals").read_text() == "batch step\n"
    ended = state_of(commands, job)
    assert (ended.end, ended.state) == (End.COMPLETED, State.FAILED)


def test_a_requeued_job_says_when_it_starts(slurm: Cluster) -> None:
    commands = Slurm()
    job = commands.submit(batch_job(slurm, "--requeue"))
    slurm.wait_for(job, "RUNNING")
    commands.requeue(job)
    until(lambda: state_of(commands, job).state is State.QUEUED)
    until(
        lambda: re.fullmatch(
            r"queued again; Slurm starts it at \d\d:\d\d \w+ or later",
            state_of(commands, job).reason,
        )
    )
    slurm.start_now(job)
    slurm.wait_for(job, "RUNNING")
    found = commands.job(job)
    assert found is not None
    assert found.restarts == 1


def test_a_job_that_waits_says_for_what(slurm: Cluster) -> None:
    commands = Slurm()
    first = commands.submit(batch_job(slurm, "--nodes=4", "--exclusive", "--time=10"))
    slurm.wait_for(first, "RUNNING")
    waiting = commands.submit(batch_job(slurm, "--nodes=4", "--exclusive", "--time=10"))
    expected = r"waiting for resources; Slurm expects \d\d:\d\d \w+"
    until(lambda: re.fullmatch(expected, state_of(commands, waiting).reason))
    (queued,) = commands.jobs([waiting])
    assert re.fullmatch(expected, describe_job(queued).reason)
    after = commands.submit(batch_job(slurm, f"--dependency=afterok:{first}"))
    until(lambda: state_of(commands, after).reason == "waiting for another job that it depends on")
    commands.cancel(first)
    until(lambda: state_of(commands, after).is_stuck)
    assert "never starts" in state_of(commands, after).reason
    held = commands.submit(batch_job(slurm, "--hold"))
    assert state_of(commands, held).reason == "held by its user"
    assert state_of(commands, held).hint == f"to start it: scontrol release {held}"
    slurm.run("scontrol", "hold", held)
    until(lambda: state_of(commands, held).reason == "held by an administrator")
    later = commands.submit(batch_job(slurm, "--begin=now+1hour"))
    until(lambda: state_of(commands, later).reason.endswith("its begin time"))


@pytest.mark.parametrize(
    ("script", "end_job", "end", "words"),
    [
        ("exit 3", lambda slurm, job: None, End.FAILED, "the batch script failed with exit code 3"),
        ("kill -9 $$", lambda slurm, job: None, End.FAILED, "killed (SIGKILL)"),
        (
            "exec sleep 600",
            lambda slurm, job: slurm.run("scancel", job),
            End.CANCELLED,
            "cancelled in Slurm (scancel)",
        ),
        (
            "exec sleep 600",
            lambda slurm, job: slurm.set_down("n1"),
            End.NODE_FAILED,
            "a node of the job failed",
        ),
    ],
    ids=["exit", "kill", "cancel", "node"],
)
def test_ends_are_told_apart(
    slurm: Cluster, script: str, end_job: Callable[[Cluster, str], object], end: End, words: str
) -> None:
    commands = Slurm()
    options = ("--no-requeue", "--nodelist=n1")
    job = commands.submit(batch_job(slurm, *options, script=f"#!/bin/bash\n{script}\n"))
    if "sleep" in script:
        slurm.wait_for(job, "RUNNING")
    end_job(slurm, job)
    until(lambda: state_of(commands, job).end is not None)
    found = state_of(commands, job)
    assert found.end is end
    assert words in found.reason


def test_a_job_at_its_time_limit_is_told_apart(slurm: Cluster) -> None:
    commands = Slurm()
    job = commands.submit(batch_job(slurm, "--partition=short"))
    slurm.wait_for(job, "TIMEOUT")
    assert state_of(commands, job).end is End.TIME_LIMIT


def test_a_preempted_job_that_is_not_queued_again(slurm: Cluster) -> None:
    commands = Slurm()
    job = commands.submit(
        batch_job(slurm, "--partition=spare-now", "--nodes=4", "--exclusive", "--no-requeue")
    )
    slurm.wait_for(job, "RUNNING")
    commands.submit(batch_job(slurm, "--nodes=4", "--exclusive", script="#!/bin/bash\ntrue\n"))
    slurm.wait_for(job, "PREEMPTED")
    assert state_of(commands, job).end is End.PREEMPTED


@pytest.mark.parametrize(
    ("option", "words", "hint"),
    [
        (
            "--partition=mian",
            "slurm.sbatch: --partition=mian: Slurm has no such partition",
            'did you mean "main"?',
        ),
        ("--constraint=a100", "--constraint=a100: no node has this feature", ""),
        ("--gpus-per-node=9", "--gpus-per-node=9: no nodes of the partition have", "sinfo"),
        (
            "--reservation=x",
            "--reservation=x: Slurm has no such reservation",
            "scontrol show reservation",
        ),
        (
            "--partiton=main",
            "--partiton=main: sbatch has no such option",
            'did you mean "--partition"?',
        ),
        ("--nodelist=n77", "--nodelist=n77: Slurm has no such node", "sinfo"),
        ("--time=abc", "--time=abc: Invalid --time specification", ""),
    ],
)
def test_a_refused_option_is_named(slurm: Cluster, option: str, words: str, hint: str) -> None:
    for call in (Slurm().submit, Slurm().test):
        with pytest.raises(RejectedOptionError) as caught:
            call(batch_job(slurm, option))
        assert words in caught.value.message
        assert hint in caught.value.hint
        assert caught.value.option is not None
        assert caught.value.option.origin == "slurm.sbatch"
    assert slurm.run("squeue", "--noheader") == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--partition=short", "--time=10"),
            "--time=10: a job in the partition short may take 1m",
        ),
        (("--nodes=9",), "--nodes=9: a job in the partition main may have 4 nodes"),
    ],
)
def test_limits_that_slurm_does_not_enforce_are_found(
    slurm: Cluster, options: tuple[str, ...], words: str
) -> None:
    commands = Slurm()
    with pytest.raises(RejectedOptionError, match=re.escape(words)):
        commands.test(batch_job(slurm, *options))
    try:
        job = commands.submit(batch_job(slurm, *options))
    except RejectedOptionError:
        # Slurm 24.11 refuses a job that needs more nodes than there are.
        return
    # Slurm 22.05 accepts such a job and never starts it.
    until(lambda: state_of(commands, job).is_stuck)


def test_a_job_whose_folder_the_node_lacks(slurm: Cluster) -> None:
    commands = Slurm()
    job = commands.submit(batch_job(slurm, "--output=/proc/absent/log"))
    slurm.wait_for(job, "FAILED")
    assert state_of(commands, job).end is End.NOT_STARTED


def test_a_test_says_when_the_job_would_start(slurm: Cluster) -> None:
    assert Slurm().test(batch_job(slurm, "--nodes=2")) is not None
    assert slurm.run("squeue", "--noheader") == ""


def test_a_job_may_wait_for_nodes_that_are_down(slurm: Cluster) -> None:
    slurm.set_down("n1")
    slurm.set_drained("n2", "n3")
    commands = Slurm()
    job = batch_job(slurm, "--nodes=2")
    assert commands.test(job) is None
    queued = commands.submit(job)
    until(lambda: slurm.field(queued, "Reason").startswith("ReqNodeNotAvail"))
    assert not state_of(commands, queued).is_stuck
    with pytest.raises(RejectedOptionError, match="no nodes of the partition have"):
        commands.submit(batch_job(slurm, "--gpus-per-node=9"))


def test_the_cluster_is_described(slurm: Cluster) -> None:
    commands = Slurm()
    limits = {each.name: each.max_seconds for each in commands.partitions()}
    assert limits == {"main": None, "spare": None, "spare-now": None, "short": 60}
    assert [each.name for each in commands.partitions() if each.is_default] == ["main"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", commands.version())
    assert commands.config()["KillWait"] == "10 sec"
    assert commands.accounts() is None
    slurm.set_down("n3")
    assert commands.down_nodes("n[1-4]") == ("n3",)


def test_variables_of_the_user_change_nothing(slurm: Cluster) -> None:
    odd = {
        "SBATCH_PARTITION": "absent",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "CANCELLED",
        "SLURM_TIME_FORMAT": "relative",
        "TZ": "Asia/Tokyo",
    }
    commands = Slurm({**os.environ, **odd})
    job = commands.submit(batch_job(slurm))
    slurm.wait_for(job, "RUNNING")
    ours, theirs = Slurm().jobs([job]), commands.jobs([job])
    assert ours == theirs != ()


def test_without_commands_it_is_no_login_node(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="squeue is not on PATH, so this is not a login node"):
        Slurm({"PATH": str(tmp_path)}).jobs()


def test_without_a_configuration_it_is_no_login_node(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        Slurm({**os.environ, "SLURM_CONF": str(tmp_path / "absent")}).jobs()


def test_a_controller_that_is_down_is_unreachable(slurm: Cluster) -> None:
    slurm.stop_controller()
    try:
        for call in (Slurm().jobs, lambda: Slurm().submit(batch_job(slurm))):
            with pytest.raises(UnreachableError, match="does not answer"):
                call()
    finally:
        slurm.start_controller()


def test_a_lost_answer_leads_to_no_second_job(slurm: Cluster, tmp_path: Path) -> None:
    # A command that submits and then says that the controller was too busy to answer.
    slow = tmp_path / "bin" / "sbatch"
    slow.parent.mkdir()
    slow.write_text(
        f'#!/bin/bash\nPATH="{os.environ["PATH"]}" sbatch "$@" >/dev/null\n'
        'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2\nexit 1\n'
    )
    slow.chmod(0o755)
    commands = Slurm({**os.environ, "PATH": f"{slow.parent}:{os.environ['PATH']}"})
    job = commands.submit(batch_job(slurm, "--job-name=only-one"))
    assert [each.id for each in Slurm().jobs(name="only-one")] == [job]


def test_a_requeue_of_an_ended_job_is_an_error(slurm: Cluster) -> None:
    with pytest.raises(CloudError, match="scontrol requeue: "):
        Slurm().requeue("9999999")


def test_accounts_are_checked(accounting: Cluster) -> None:
    commands = Slurm()
    assert "research" in (commands.accounts() or ())
    assert set(commands.qualities() or ()) == {"normal", "spare", "urgent"}
    for option, words, near in [
        ("--account=reserch", "does not let you charge this account", "research"),
        ("--qos=urgnt", "Slurm has no such QOS", "urgent"),
    ]:
        with pytest.raises(RejectedOptionError, match=words) as caught:
            commands.submit(batch_job(accounting, option))
        assert caught.value.hint == f'did you mean "{near}"?'


def test_accounting_remembers_who_cancelled(accounting: Cluster) -> None:
    commands = Slurm()
    job = commands.submit(batch_job(accounting, "--comment=cloudtrain:1"))
    accounting.wait_for(job, "RUNNING")
    commands.cancel(job)
    until(lambda: (found := commands.history(job)) is not None and found.state == "CANCELLED")
    found = commands.history(job)
    assert found is not None
    assert found.comment == "cloudtrain:1"
    assert describe_job(found).end is End.CANCELLED_BY_USER


def test_errors_are_cloudtrains_own(slurm: Cluster) -> None:
    with pytest.raises(CloudtrainError):
        Slurm().nodes("absent")
