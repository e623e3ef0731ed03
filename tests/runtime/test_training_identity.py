"""Runs that share a checkpoint location: which checkpoints a run resumes from, and which it deletes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.manager import CheckpointManager, Resumed
from cloudtrain_runtime.checkpoint.storage import open_storage
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.contract.training_identity import describe_differences, is_same_training
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

OURS = {
    "entry": "small:Small",
    "args": {"width": 3},
    "data": {"train": "data"},
    "train": {"learning_rate": 0.1},
}
OTHER = {**OURS, "train": {"learning_rate": 0.2, "seed": 1}}
FIRST, SECOND, THIRD = (
    "demo-261122-101500-aaaaaa",
    "demo-261122-111500-bbbbbb",
    "other-261122-101500-cccccc",
)


def checkpoints_of(
    run: str, training: Mapping[str, Any], root: Path, context: Context, resume: str = "auto"
) -> CheckpointManager:
    config = CheckpointConfig(root.as_uri(), None, None, 2, resume)
    return CheckpointManager(config, replace(context, run=run, training=training))


def save(checkpoints: CheckpointManager, *steps: int, weight: float = 0.0) -> None:
    model, optimizer = pair()
    nn.init.constant_(model.weight, weight)
    for step in steps:
        assert checkpoints.save(step, model, [optimizer], {}, {}, wait=True)


def pair() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def resumed(checkpoints: CheckpointManager) -> tuple[Resumed, float]:
    model, optimizer = pair()
    nn.init.constant_(model.weight, -1.0)
    found = checkpoints.resume(model, [optimizer])
    return found, float(model.weight[0, 0])


def steps_by_run(root: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in list_checkpoints(open_storage(root.as_uri())):
        assert record.manifest is not None
        found.setdefault(record.manifest.run, []).append(record.step)
    return found


def test_a_checkpoint_of_another_training_is_rejected(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, OTHER, tmp_path, context), 4)
    checkpoints = checkpoints_of(SECOND, OURS, tmp_path, context)
    with pytest.raises(CheckpointError) as caught:
        resumed(checkpoints)
    with pytest.raises(CheckpointError):
        checkpoints.peek_state()
    message = str(caught.value)
    assert f"step 4 of run {FIRST}" in message
    assert (
        "train.learning_rate is 0.2 there and 0.1 here, train.seed is 1 there and the default here"
        in message
    )
    assert f"checkpoint.resume={FIRST}" in message


def test_a_run_resumes_from_the_same_training(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, OURS, tmp_path, context), 4, weight=3.0)
    save(checkpoints_of(THIRD, OTHER, tmp_path, context), 9, weight=9.0)
    found, weight = resumed(checkpoints_of(SECOND, json.loads(json.dumps(OURS)), tmp_path, context))
    assert (found.step, weight) == (4, 3.0), "the newer checkpoint of another training is ignored"


def test_a_restarted_run_prefers_its_own_checkpoints(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, OURS, tmp_path, context), 4, weight=1.0)
    save(checkpoints_of(SECOND, OURS, tmp_path, context), 8, weight=2.0)
    found, weight = resumed(checkpoints_of(FIRST, OURS, tmp_path, context))
    assert (found.step, weight) == (4, 1.0)


def test_an_explicit_resume_accepts_another_training(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, OTHER, tmp_path / "first", context), 4, weight=3.0)
    uri = (tmp_path / "first").as_uri()
    found, weight = resumed(checkpoints_of(SECOND, OURS, tmp_path / "second", context, resume=uri))
    assert (found.step, weight) == (4, 3.0)


def test_retention_keeps_checkpoints_of_other_runs(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, OURS, tmp_path, context), 1, 2)
    second = checkpoints_of(SECOND, OURS, tmp_path, context)
    resumed(second)
    save(second, 3, 4, 5, 6)
    save(checkpoints_of(THIRD, OTHER, tmp_path, context), 10, 11, 12)
    assert steps_by_run(tmp_path) == {FIRST: [1, 2], SECOND: [5, 6], THIRD: [11, 12]}


def test_two_runs_keep_separate_weights_of_the_same_step(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, OURS, tmp_path, context), 4, weight=1.0)
    second = checkpoints_of(SECOND, OTHER, tmp_path, context)
    save(second, 4, weight=2.0)
    for run, training, expected in ((FIRST, OURS, 1.0), (SECOND, OTHER, 2.0)):
        checkpoints = checkpoints_of(run, training, tmp_path, context)
        model, _ = pair()
        assert checkpoints.load_weights(4, model)
        assert float(model.weight[0, 0]) == expected
        assert resumed(checkpoints)[1] == expected
    third = checkpoints_of(THIRD, {"entry": "other:Task"}, tmp_path, context)
    assert not third.load_weights(4, pair()[0])


def test_checkpoints_of_01_are_accepted_with_a_warning(
    context: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    golden = Path(__file__).parent.parent / "golden_checkpoints" / "cloudtrain-0.1"
    shutil.copytree(golden, tmp_path / "saved")
    model = nn.Linear(3, 1)
    checkpoints = checkpoints_of(SECOND, OURS, tmp_path / "saved", context)
    found = checkpoints.resume(model, [torch.optim.AdamW(model.parameters())])
    assert (found.step, found.state["data"]["step"]) == (4, 4)
    assert "does not name its training (cloudtrain 0.1 saved it)" in capfd.readouterr().out
    assert model.weight.abs().sum() > 0


def test_a_manifest_contains_its_training(context: Context, tmp_path: Path) -> None:
    save(checkpoints_of(FIRST, {**OURS, "args": {"rate": float("inf")}}, tmp_path, context), 1)
    text = (tmp_path / "step-00000001" / "manifest.json").read_bytes()
    assert Manifest.from_json(text).training == {**OURS, "args": {"rate": float("inf")}}


@pytest.mark.parametrize(
    ("saved", "own", "expected"),
    [
        (OURS, OURS, ""),
        ({}, OURS, ""),
        (OURS, {}, ""),
        ({"args": {"rate": float("nan")}}, {"args": {"rate": float("nan")}}, ""),
        (
            {"args": ["--seed", "1"]},
            {"args": ["--seed", "2"]},
            "args is ['--seed', '1'] there and ['--seed', '2'] here",
        ),
        (
            {"data": {"a": "\x1b[2J"}},
            {"data": {"a": "x"}},
            "data.a is '\\x1b[2J' there and 'x' here",
        ),
        (
            {"train": {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}},
            {"train": {"a": 2, "b": 2, "c": 2, "d": 2, "e": 2}},
            "train.a is 1 there and 2 here, train.b is 1 there and 2 here, train.c is 1 there and 2 here and 2 more",
        ),
    ],
)
def test_differences_are_named(saved: dict[str, Any], own: dict[str, Any], expected: str) -> None:
    assert is_same_training(saved, own) == (not expected)
    assert expected in describe_differences(saved, own)
