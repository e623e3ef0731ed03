"""Log reading: constant memory, any order of hosts, damaged lines."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from cloudtrain.failure_rules import FailureClass, explain_run
from cloudtrain.failure_rules.collectives import CollectiveTimeouts
from cloudtrain.failure_rules.error_groups import ProgressTracker
from cloudtrain.failure_rules.facts import read_facts
from cloudtrain.failure_rules.rules import RULES, Source
from cloudtrain.runs.log_lines import LogLine
from cloudtrain.runs.status import State, Status

FAILED = Status("r", "sagemaker", State.FAILED)
LINES = 200_000


def long_log() -> Iterator[LogLine]:
    """Yield a log of four hosts with many different handled exceptions."""
    for number in range(LINES):
        kind = number % 10
        if kind == 0:
            text = f'CLOUDTRAIN {{"event": "step", "step": {number}, "loss": 2.1, "time": {number / 1000}}}'
        elif kind == 1:
            text = "Traceback (most recent call last):"
        elif kind == 2:
            text = f'  File "/opt/ml/code/part{number}.py", line 3, in read'
        elif kind == 3:
            text = (
                f"ValueError: {'abcdefghij'[number // 10 % 10] * (number // 100 % 60)} is no sample"
            )
        else:
            text = f"epoch 0 batch {number} loss 2.13 lr 3e-4 and what else is said in a line of ordinary length"
        yield LogLine(f"algo-{number % 4 + 1}", text, number / 1000)
    for number in range(4 * ProgressTracker.LINES):
        yield LogLine(f"algo-{number % 4 + 1}", "nothing new", LINES / 1000)
    for text in (
        "Traceback (most recent call last):",
        '  File "/opt/ml/code/train.py", line 3, in main',
        "KeyError: 'x'",
    ):
        yield LogLine("algo-3", text, LINES / 1000)


def test_memory_does_not_grow_with_the_log() -> None:
    tracemalloc.start()
    try:
        found = explain_run(FAILED, long_log())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000
    assert found.message == "KeyError: 'x'"


def test_a_flood_of_different_errors_at_the_end_keeps_the_first() -> None:
    def flood() -> Iterator[LogLine]:
        for number in range(2000):
            yield LogLine("algo-1", "Traceback (most recent call last):", float(number))
            words = "".join("abcdefghij"[int(digit)] for digit in str(number))
            yield LogLine("algo-1", f"{words.capitalize()}Error: went wrong", float(number))

    assert explain_run(FAILED, flood()).message == "AError: went wrong"


def test_each_line_rule_is_found_by_its_needles() -> None:
    for rule in RULES:
        assert bool(rule.needles) == (Source.LINE in rule.sources), rule.pattern.pattern


def test_a_job_that_goes_on_has_survived() -> None:
    tail = [LogLine("algo-1", f"epoch {number} done") for number in range(ProgressTracker.LINES)]
    error = [LogLine("algo-1", "ERROR: No matching distribution found for numpyy")]
    assert explain_run(FAILED, [*error, *tail]).failure is FailureClass.UNKNOWN
    assert explain_run(FAILED, [*error, *tail[1:]]).failure is FailureClass.DEPENDENCY_INSTALL


def test_damage_is_no_bug() -> None:
    lines = [
        "Traceback (most recent call last):",
        "CLOUDTRAIN {not json",
        'CLOUDTRAIN {"event": "failed"}',
        'CLOUDTRAIN {"event": "failed", "rank": "one", "failed_at": "then", "message": 3}',
        "[rank99]: Traceback (most recent call last):",
        '[rank99]:   File "x',
        "\x1b[31m\r\r",
        "During handling of the above exception, another exception occurred:",
        "x" * 1_000_000,
        "[rank1]: ",
    ]
    found = explain_run(FAILED, [LogLine("algo-1", text) for text in lines])
    assert found.failure is FailureClass.UNKNOWN
    assert len(found.message) <= 400


@pytest.mark.parametrize(
    ("lines", "world", "missing"),
    [
        ([], 4, ()),
        (
            ["[1, 3] finished collective #4, but didn't join collective #5 (count from 1)"],
            4,
            (1, 3),
        ),
    ],
)
def test_who_is_missing(lines: list[str], world: int, missing: tuple[int, ...]) -> None:
    collectives = CollectiveTimeouts()
    for line in lines:
        collectives.read(line)
    assert collectives.missing_ranks(world) == missing


def test_nobody_is_accused_when_only_few_have_reported() -> None:
    collectives = CollectiveTimeouts()
    collectives.read(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=1) "
        "ran for 600000 milliseconds before timing out."
    )
    assert collectives.missing_ranks(16) == ()


def test_facts_are_read_from_what_was_sent() -> None:
    request = {
        "RoleArn": "arn:aws:iam::123456789012:role/service-role/training",
        "ResourceConfig": {
            "InstanceType": "ml.p4d.24xlarge",
            "InstanceCount": 2,
            "VolumeSizeInGB": 200,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 129600},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1", "sg-2"]},
    }
    config = {
        "train": {"batch_size": 16, "clip_grad_norm": None},
        "checkpoint": {"keep": 3},
        "script": None,
    }
    assert read_facts(request, config) == {
        "cluster.instance_type": "ml.p4d.24xlarge",
        "cluster.instances": "2",
        "cluster.volume": "200GB",
        "cluster.network.subnets": "subnet-1",
        "cluster.network.security_groups": "sg-1, sg-2",
        "cluster.spot.max_wait": "36h",
        "limits.runtime": "1d",
        "role": "training",
        "train.batch_size": "16",
        "checkpoint.keep": "3",
    }
    assert read_facts({}, {}) == {}


LEFT = 'CLOUDTRAIN {"event": "left", "host": "algo-2", "ranks": [2, 3], "step": 9, "time": 5.0}'
LOST = "rank 0 on algo-1 (local rank 0) failed: RuntimeError: Connection closed by peer"


def test_ranks_that_left_are_the_cause_of_a_lost_peer() -> None:
    failed = LogLine("algo-1", LOST, 6.0)
    found = explain_run(FAILED, [LogLine("algo-2", LEFT, 5.0), failed])
    assert found.message == "ranks 2, 3 on algo-2 ended with exit code 0 after step 9"
    assert (found.rank, found.host, found.failure) == (2, "algo-2", FailureClass.USER_CODE)
    everyone = [LogLine(host, LEFT.replace("algo-2", host), 5.0) for host in ("algo-1", "algo-2")]
    assert "ended" not in explain_run(FAILED, [*everyone, failed]).message


def test_an_equal_error_of_all_ranks_names_all() -> None:
    status = Status("r", "sagemaker", State.FAILED, world_size=2)
    lines = [
        LogLine("algo-1", f"[rank{rank}]: {text}", 6.0)
        for rank in (0, 1)
        for text in (
            "Traceback (most recent call last):",
            '  File "t.py", line 3, in f',
            "KeyError: 'x'",
        )
    ]
    assert explain_run(status, lines).where == "all 2 ranks"
    assert explain_run(status, lines[:3]).where == "rank 0, algo-1"


def test_a_channel_that_the_job_lacks_is_added_to_data() -> None:
    text = "the job has no channel 'train' (it has no channels). Add to the job file: data: {train: FOLDER}"
    lines = [
        "Traceback (most recent call last):",
        '  File "t.py", line 3, in f',
        f'KeyError: "{text}"',
    ]
    found = explain_run(FAILED, [LogLine("algo-1", line, 6.0) for line in lines])
    assert found.failure is FailureClass.DATA
    assert found.action.startswith("Add to the job file a line data: {train: FOLDER}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["ValueError:", "the value is too large"], "ValueError: the value is too large"),
        (["ValueError:", "", "    the value is too large"], "ValueError: the value is too large"),
        (["ValueError: bad values:", "lr is missing"], "ValueError: bad values:"),
        (["ValueError: 3", "lr is missing"], "ValueError: 3"),
        (["ValueError:"], "ValueError:"),
    ],
)
def test_a_message_can_begin_on_the_next_line(lines: list[str], message: str) -> None:
    head = ["Traceback (most recent call last):", '  File "/opt/ml/code/train.py", line 3, in main']
    found = explain_run(FAILED, [LogLine("algo-1", text) for text in (*head, *lines)])
    assert found.message == message


def test_a_message_does_not_swallow_another_error() -> None:
    head = ["Traceback (most recent call last):", '  File "/opt/ml/code/train.py", line 3, in main']
    lines = [*head, "Warning: these were lost:", "Memory cgroup out of memory: Killed process 31"]
    found = explain_run(FAILED, [LogLine("algo-1", text) for text in (*lines, "end")])
    assert "Memory cgroup" not in "".join(found.traceback)
