"""Checkpoints from GPU memory, and exact resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import TRAIN, train

from cloudtrain_runtime.contract import ParallelConfig

STEPS = replace(TRAIN, steps=12, deterministic=True)


@pytest.mark.parametrize("start", ["forked", "fresh"])
@pytest.mark.parametrize("data", ["ddp", "fsdp", "offload"])
def test_resume_is_bit_exact(tmp_path: Path, data: str, start: str) -> None:
    """One run is killed at step 7 and restarts from the checkpoint of step 5, the other is not."""
    parallel = ParallelConfig(data="ddp" if data == "ddp" else "fsdp", offload=data == "offload")
    chosen = replace(STEPS, parallel=parallel)
    environ = {"CLOUDTRAIN_WORKER_START": "fresh"} if start == "fresh" else {}
    runs = []
    saved = tmp_path / "killed" / "checkpoints" / "step-00000005"
    for fails in ({}, {"rank": 0, "step": 7, "how": "kill", "after": str(saved)}):
        folder = tmp_path / ("killed" if fails else "whole")
        done = train(
            folder,
            chosen,
            restarts=1,
            checkpoint_every=5,
            environ=environ,
            dropout=0.1,
            optimizer="fused",
            fails=fails,
        )
        assert done.code == 0, done.log
        assert done.seen()["is_forked"] == (start == "forked")
        runs.append(done)
    whole, killed = runs
    assert killed.events("started")[-1]["resumed_from"].endswith("step-00000005")
    assert killed.losses[-5:] == whole.losses[-5:]
    for name, value in whole.weights.items():
        assert torch.equal(killed.weights[name], value), name


def test_a_notice_to_stop_saves_and_the_next_start_resumes(tmp_path: Path) -> None:
    chosen = replace(STEPS, steps=60)
    whole = train(tmp_path / "whole", chosen, dropout=0.1)
    stopped = train(
        tmp_path / "stopped", chosen, dropout=0.1, fails={"rank": 0, "step": 20, "how": "stop"}
    )
    assert stopped.events("stopped"), stopped.log
    resumed = train(tmp_path / "stopped", chosen, dropout=0.1)
    assert resumed.code == 0, resumed.log
    assert resumed.started["step"] == stopped.events("stopped")[0]["step"]
    assert resumed.losses[-1] == whole.losses[-1]
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name


def test_saves_do_not_change_the_training(tmp_path: Path) -> None:
    """Each step's state is copied to pinned memory while the next steps change the weights."""
    sizes = {"width": 512, "blocks": 4, "heads": 8}
    chosen = replace(STEPS, steps=20)
    plain = train(tmp_path / "plain", chosen, **sizes)
    saving = train(tmp_path / "saving", chosen, checkpoint_every=1, **sizes)
    assert saving.code == 0, saving.log
    assert saving.losses == plain.losses
    assert len(saving.events("checkpoint")) > 1
    for name, value in plain.weights.items():
        assert torch.equal(saving.weights[name], value), name
