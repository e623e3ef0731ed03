"""Failures: a stuck kernel, a rank that is lost in a collective, and running out of memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from running import GPUS, TRAIN, train


def test_a_stuck_kernel_is_a_hang(tmp_path: Path) -> None:
    fails = {"rank": 0, "step": 4, "how": "hang"}
    done = train(tmp_path, replace(TRAIN, steps=50), hang_seconds=5.0, fails=fails)
    assert done.code != 0
    assert "hang" in done.failure or "no progress" in done.failure, done.log
    assert "probe.py" in done.log  # the stack of the rank that hangs


def test_a_hang_between_ranks_names_the_rank(tmp_path: Path) -> None:
    fails = {"rank": 1, "step": 4, "how": "hang"}
    done = train(tmp_path, replace(TRAIN, steps=50), ranks=2, hang_seconds=5.0, fails=fails)
    assert done.code != 0
    assert "rank 1" in done.failure, done.log


def test_the_loss_of_a_rank_is_the_cause(tmp_path: Path) -> None:
    fails = {"rank": 1, "step": 4, "how": "kill"}
    done = train(tmp_path, replace(TRAIN, steps=50), ranks=2, fails=fails)
    assert done.code == 1
    assert done.failure.startswith("rank 1 on algo-1"), done.log
    assert "was killed by SIGKILL" in done.failure


@pytest.mark.parametrize("start", ["forked", "fresh"])
def test_ranks_recover_from_the_loss_of_one(tmp_path: Path, start: str) -> None:
    fails = {"rank": 1, "step": 7, "how": "kill"}
    environ = {"CLOUDTRAIN_WORKER_START": "fresh"} if start == "fresh" else {}
    done = train(
        tmp_path, TRAIN, ranks=2, restarts=1, checkpoint_every=2, environ=environ, fails=fails
    )
    assert done.code == 0, done.log
    assert done.started["restarts"] == 1
    assert done.started["step"] > 0
    assert done.events("finished")[0]["step"] == TRAIN.steps


@pytest.mark.cuda
def test_out_of_memory_is_named(tmp_path: Path) -> None:
    done = train(tmp_path, fails={"rank": 0, "step": 4, "how": "memory"})
    assert done.code == 1
    assert "OutOfMemoryError" in done.failure, done.log
    assert GPUS >= 1
