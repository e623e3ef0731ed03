"""Real runs that really fail, explained from what they have left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

import cloudtrain

pytestmark = pytest.mark.processes

JOB = """\
name: boom
code: {script: train.py, args: ARGS}
cluster: {instance_type: ml.g5.xlarge, instances: 2, processes_per_instance: 1}
"""
SCRIPT = """\
import os
import signal
import sys

import torch
import torch.distributed as dist

def work(step):
    if step == 2 and dist.get_rank() == 1:
        if "raise" in sys.argv:
            raise KeyError("label_17")
        if "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if "data" in sys.argv:
            open(os.environ.get("SM_CHANNEL_TRAIN", "/opt/ml/input/data/train") + "/part-1.csv").close()
    dist.all_reduce(torch.ones(3))


if "module" in sys.argv:
    import package_that_is_not_there

dist.init_process_group("gloo")
print("error: 0.5 is the error of this step, no Error at all")
for step in range(4):
    work(step)
"""

Boom = Callable[[str], Path]


@pytest.fixture
def boom(job: Callable[..., Path]) -> Boom:
    """Write a job of two ranks on two hosts that fails in one of several ways."""
    return lambda how: job(JOB.replace("ARGS", f"[{how}]"), train_py=SCRIPT)


@pytest.mark.promise
def test_an_exception_of_one_rank(cli: Cli, boom: Boom) -> None:
    done = cli("submit", boom("raise"), "--local", "--follow", "--json")
    assert done.code == 4
    assert done.json["exit_code"] == 4
    shown = done.err[done.err.index("cause      an error in the job's code") :].splitlines()
    assert shown[1] == "where      rank 1, algo-2"
    assert "action     Fix train.py:11." in shown
    found = cli("explain", done.json["run"], "--json").json
    assert found == {
        "run": done.json["run"],
        "state": "FAILED",
        "class": "user_code",
        "rank": 1,
        "host": "algo-2",
        "step": None,
        "place": "train.py:11",
        "message": "KeyError: 'label_17'",
        "traceback": [
            '  File "train.py", line 25, in <module>',
            "    work(step)",
            '  File "train.py", line 11, in work',
            '    raise KeyError("label_17")',
            "KeyError: 'label_17'",
        ],
        "ranks": [1],
        "hosts": ["algo-2"],
        "is_of_all_ranks": False,
        "last_lines": [],
        "advice": [],
        "action": "Fix train.py:11.",
    }
    explained = cli("explain", done.json["run"]).out.splitlines()
    assert explained[0] == "state      FAILED: KeyError: 'label_17'"
    assert explained[1:3] == shown[:2]


@pytest.mark.parametrize(
    ("how", "failure", "ranks", "action"),
    [
        ("kill", "killed", [1], "Find out who sent SIGKILL"),
        ("data", "data", [1], "Check that the channel "),
        (
            "module",
            "dependency_install",
            [0, 1],
            "Install it here (pip install package_that_is_not_there)",
        ),
    ],
)
def test_other_ends(boom: Boom, how: str, failure: str, ranks: list[int], action: str) -> None:
    run = cloudtrain.submit(boom(how), local=True)
    assert run.wait(300).exit_code == 4
    found = cloudtrain.explain(run)
    assert found.failure == failure
    assert set(found.ranks) <= set(ranks)
    assert found.rank in ranks
    assert action in found.action
    assert found == cloudtrain.explain(run.reference)


def test_an_exit_without_traceback_quotes_the_last_lines(cli: Cli, boom: Boom) -> None:
    path = boom("exit")
    path.with_name("train.py").write_text(
        "print('first')\nprint('no licence')\nraise SystemExit(3)\n"
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4
    found = cli("explain", done.json["run"], "--json").json
    assert "exit code 3" in found["message"]
    assert "no licence" in found["last_lines"]
    assert "--local" not in found["action"]
    assert "no licence" in cli("explain", done.json["run"]).out


def test_a_file_that_an_ignore_rule_left_behind_is_named(cli: Cli, boom: Boom) -> None:
    path = boom("well")
    path.with_name("train.py").write_text("open('configs/base.txt')\n")
    (path.parent / "configs").mkdir()
    (path.parent / "configs" / "base.txt").write_text("x")
    path.with_name(".gitignore").write_text("configs/\n")
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4
    action = cli("explain", done.json["run"], "--json").json["action"]
    assert action.startswith("configs/ is not in the bundle (.gitignore:1")
    assert "!/configs/" in action


def test_what_has_not_failed_is_not_explained_away(cli: Cli, boom: Boom) -> None:
    run = cloudtrain.submit(boom("well"), local=True)
    assert run.wait(300).exit_code == 0
    found = cli("explain", run.id, "--json")
    assert found.code == 0
    assert found.json["class"] is None
    # The script writes no model, which is said, but is no failure.
    assert found.json["message"] == "the run has succeeded, with a warning"
    assert found.json["action"].startswith("the model folder is empty")
    assert cli("explain", "boom-261121-075712-4008c0").code == 2
