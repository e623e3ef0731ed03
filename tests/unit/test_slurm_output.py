"""What Slurm's commands print, as jobs, partitions and nodes. The texts are those of 22.05; tests/slurm/ reads real ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from support.sizes import tries

from cloudtrain.backends.slurm.node_ping import parse_reports
from cloudtrain.backends.slurm.slurm_output import (
    FIELD,
    RECORD,
    SlurmJob,
    parse_config,
    parse_duration,
    parse_expected_start,
    parse_history,
    parse_job,
    parse_nodes,
    parse_partitions,
    parse_queue,
    parse_time,
)

JOB = """\
JobId=17 JobName=digits-261130-101500-1a2b3c
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=3:0
   RunTime=00:00:10 TimeLimit=00:05:00 TimeMin=N/A
   SubmitTime=2026-11-30T10:15:00 EligibleTime=2026-11-30T10:15:00
   StartTime=2026-11-30T10:15:02 EndTime=2026-11-30T10:15:12 Deadline=N/A
   Partition=main AllocNode:Sid=login:120
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,node=2,billing=4
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=(null)
   WorkDir=/data/my runs/JobState=COMPLETED
   Comment=cloudtrain:1234
   StdErr=/data/my runs/slurm.log

"""
PARTITIONS = (
    "PartitionName=main AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=NONE "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=n[1-4] State=UP TotalCPUs=8 TotalNodes=4\n"
    "PartitionName=short AllowAccounts=research,teaching Default=NO DefaultTime=00:00:30 MaxNodes=2 "
    "MaxTime=1-02:00:00 State=DOWN TotalNodes=4\n"
)
NODES = (
    "NodeName=n1 Arch=x86_64 NodeAddr=127.0.0.11 NodeHostName=host Version=22.05.8 OS=Linux 6.1 #1 SMP State=X "
    "RealMemory=4000 State=IDLE ThreadsPerCore=1\n"
    "NodeName=n2 NodeAddr=127.0.0.12 State=DOWN*+DRAIN ThreadsPerCore=1 Reason=Not responding [slurm@2026]\n"
)
CONFIG = "Configuration data as of 2026-11-30T10:15:00\nKillWait                = 30 sec\n\nSlurmctld(primary) at host is UP\n"
HISTORY = (
    FIELD.join(
        ("17", "CANCELLED by 1000", "0:15", "2026-11-30T10:15:12", "n[1-2]", "digits", "cloudtrain:1234")
    )
    + "\n"
)  # fmt: skip


def queue_line(*fields: str) -> str:
    return RECORD + FIELD.join(fields) + FIELD + "\n"


QUEUE = queue_line(
    "17", "PENDING", "Resources", "2026-11-30T14:05:00", "", "a|b", "two\nlines = one"
) + queue_line("18", "RUNNING", "None", "N/A", "n[1-2]", "name", "(null)")


def test_the_queue_keeps_odd_names_and_comments() -> None:
    first, second = parse_queue(QUEUE)
    assert (first.id, first.name, first.comment) == ("17", "a|b", "two\nlines = one")
    assert first.start == datetime(2026, 11, 30, 14, 5, tzinfo=UTC)
    assert second == SlurmJob(id="18", name="name", comment="", state="RUNNING", nodes="n[1-2]")


def test_a_job_has_the_values_of_its_own_fields() -> None:
    assert parse_job(JOB) == SlurmJob(
        id="17",
        name="digits-261130-101500-1a2b3c",
        comment="cloudtrain:1234",
        state="FAILED",
        reason="NonZeroExitCode",
        start=datetime(2026, 11, 30, 10, 15, 2, tzinfo=UTC),
        ended=datetime(2026, 11, 30, 10, 15, 12, tzinfo=UTC),
        nodes="n[1-2]",
        restarts=2,
        exit_status=3,
        exit_signal=0,
    )


@pytest.mark.parametrize(
    "name", ["x JobState=COMPLETED", "", "a = b", "x   JobState=COMPLETED ExitCode=0:0"]
)
def test_a_name_does_not_change_a_state(name: str) -> None:
    job = parse_job(JOB.replace("JobName=digits-261130-101500-1a2b3c", f"JobName={name}"))
    assert job is not None
    assert (job.name, job.state) == (name, "FAILED")


@pytest.mark.parametrize("state", ["COMPLETING+RUNNING", "RUNNING,COMPLETING"])
def test_states_of_newer_versions_have_flags(state: str) -> None:
    job = parse_job(JOB.replace("JobState=FAILED", f"JobState={state}"))
    assert job is not None
    assert {job.state, *job.flags} == {"RUNNING", "COMPLETING"}


def test_partitions_have_their_limits() -> None:
    main, short = parse_partitions(PARTITIONS)
    assert (main.is_default, main.is_up, main.max_seconds, main.max_nodes, main.nodes) == (
        True,
        True,
        None,
        None,
        4,
    )
    assert (short.is_up, short.max_seconds, short.default_seconds, short.max_nodes) == (
        False,
        93600,
        30,
        2,
    )
    assert short.accounts == ("research", "teaching")


def test_nodes_have_addresses_and_states() -> None:
    first, second = parse_nodes(NODES)
    assert (first.address, first.is_down) == ("127.0.0.11", False)
    assert (second.state, second.flags, second.is_silent, second.is_down) == (
        "DOWN",
        {"DRAIN"},
        True,
        True,
    )


def test_the_configuration_is_read() -> None:
    assert parse_config(CONFIG) == {"KillWait": "30 sec"}


def test_accounting_says_who_cancelled() -> None:
    job = parse_history(HISTORY)
    assert job is not None
    assert (job.state, job.cancelled_by, job.exit_signal, job.comment) == (
        "CANCELLED",
        1000,
        15,
        "cloudtrain:1234",
    )
    assert job.ended == datetime(2026, 11, 30, 10, 15, 12, tzinfo=UTC)
    assert parse_history("") is None
    # Of a job that has never started.
    waited = parse_history(HISTORY.replace("n[1-2]", "None assigned"))
    assert waited is not None
    assert waited.nodes == ""


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "RUNNING,COMPLETING"])
def test_a_job_that_has_not_ended_has_no_end(state: str) -> None:
    # Slurm gives the end of its time limit.
    job = parse_job(JOB.replace("JobState=FAILED", f"JobState={state}"))
    assert job is not None
    assert job.ended is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300),
        ("30:00", 1800),
        ("01:00:00", 3600),
        ("2-00:00:30", 172830),
        ("1-12", 129600),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert parse_duration(text) == seconds


def test_times() -> None:
    text = "sbatch: Job 5 to start at 2026-11-30T02:00:00 using 2 processors on nodes n1 in partition main"
    assert parse_expected_start(text) == datetime(2026, 11, 30, 2, tzinfo=UTC)
    assert parse_expected_start("nothing") is None
    assert parse_time("N/A") is None


REPORTS = (
    "Loading module cuda\ncloudtrain-ping n1 time 1796000000.123456789\ncloudtrain-ping n1 folder yes\n"
    "cloudtrain-ping n2 problem ModuleNotFoundError: No module named 'cloudtrain'\ncloudtrain-ping n1 writes yes\n"
    "cloudtrain-ping n1 cloudtrain 0.1.0\n"
)


def test_nodes_report_in_any_order() -> None:
    first, second = parse_reports(REPORTS)
    assert (first.node, first.time, first.sees_folder, first.writes) == (
        "n1",
        1796000000.1234567,
        True,
        True,
    )
    assert (first.cloudtrain, first.problem) == ("0.1.0", "")
    assert (second.node, second.time, second.sees_folder) == ("n2", None, False)
    assert second.problem.startswith("ModuleNotFoundError")


PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "queue": (parse_queue, QUEUE),
    "job": (parse_job, JOB),
    "history": (parse_history, HISTORY),
    "partitions": (parse_partitions, PARTITIONS),
    "nodes": (parse_nodes, NODES),
    "config": (parse_config, CONFIG),
    "reports": (parse_reports, REPORTS),
    "duration": (parse_duration, "1-02:00:00"),
    "time": (parse_time, "2026-11-30T02:00:00"),
    "start": (parse_expected_start, "to start at 2026-11-30T02:00:00"),
}
ODD = (
    "",
    "\x00",
    RECORD,
    FIELD,
    "=",
    "\n",
    " ",
    "(null)",
    "9" * 6000,
    "\ud800",
    "٣",
    "²",
    "-",
    ":",
    "+",
    "*",
    "Ω",
)


@pytest.mark.parametrize("name", PARSERS)
def test_no_damaged_output_breaks_a_parser(name: str) -> None:
    parse, valid = PARSERS[name]
    source = random.Random(name)  # noqa: S311 (the same inputs each time)
    for _ in range(tries(400)):
        text = valid
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(text) + 1)
            text = text[:at] + source.choice(ODD) + text[at + source.randint(0, 8) :]
        parse(text)
