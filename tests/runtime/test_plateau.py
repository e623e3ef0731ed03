"""`ReduceLROnPlateau` as a Task's schedule, and metrics of `after_evaluation`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.loops import job, run
from support.parallel_training import TRAIN
from support.plateaus import Falling

from cloudtrain_runtime.contract import EarlyStopping
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.training.schedules import make_schedule

RISING = EarlyStopping("validation/rising", 9, mode="max")


@pytest.mark.processes
def test_every_rank_follows_the_metric_of_rank_0(tmp_path: Path) -> None:
    """The metric rises on rank 1 and falls on rank 0, so both optimizers of both ranks halve their rates."""
    train = job(2, steps=6, evaluate_every_steps=2, early_stopping=RISING)
    found = run(train, 2, tmp_path, Falling, arguments={"validates": 5})
    evaluations = [
        (each["step"], each["rising"]) for each in found.events if each["event"] == "evaluation"
    ]
    assert evaluations == [(2, -1), (4, -2), (6, -3)]
    rates = [each["learning_rate"] for each in found.events if each["event"] == "step"]
    assert rates == [0.02, 0.02, 0.02, 0.02, 0.01, 0.01]
    seen = re.findall(r"rank (\d) in evaluation (\d): (\S+)", found.text)
    in_turn = {"1": "0.02,0.01", "2": "0.02,0.01", "3": "0.01,0.005"}
    assert sorted(seen) == [
        (rank, number, rates) for rank in "01" for number, rates in in_turn.items()
    ]


@pytest.mark.parametrize(
    ("splits", "rule", "expected"),
    [
        ({"train"}, RISING, "needs a validation split, and datasets() has none"),
        ({"train", "validation"}, None, "follows validation/loss: expected mode='min', got 'max'"),
    ],
)
def test_a_plateau_that_cannot_work_is_refused(
    splits: set[str], rule: EarlyStopping | None, expected: str
) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(TaskError) as caught:
        make_schedule(Falling(1), optimizer, replace(TRAIN, early_stopping=rule), splits, lambda: 9)
    assert re.fullmatch(
        rf".*plateaus\.py:\d+:5  schedule\(\): ReduceLROnPlateau {re.escape(expected)}",
        str(caught.value),
    )
