"""Which runs have a model that can be served or loaded."""

from __future__ import annotations

import pytest

from cloudtrain.errors import UserError
from cloudtrain.runs.saved_model import task_of


def test_model_of_a_task() -> None:
    plan = {"config": {"task": "a:B", "args": {"size": 3}}}
    assert task_of("run-1", plan, "loaded", "") == ("a:B", {"size": 3})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"script": "train.py"},
            "run-1 trained a script, and only the model of a Task can be loaded",
        ),
        ({"task": "a:B", "evaluation": {"run": "local:run-0"}}, "evaluates local:run-0"),
        (None, "trained a script"),
    ],
)
def test_run_without_a_model(config: object, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        task_of("run-1", {"config": config}, "loaded", "download its files")
