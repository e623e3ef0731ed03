"""Comparisons of runs: which data are the same, and what a page is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cloudtrain.runs.comparison import Comparison
from cloudtrain.runs.history import MetricHistory

RUNS = ("local:one", "local:two", "local:three")


def plan_of(epochs: int = 1, **job: Any) -> dict[str, Any]:
    code = {"task": "digits:Digits"}
    return {"job": {"code": code, "train": {"epochs": epochs, "seed": 7}, **job}}


def history_of(loss: float, samples: int = 10) -> MetricHistory:
    history = MetricHistory()
    event = {"event": "evaluation", "split": "validation", "step": 1, "samples": samples}
    history.add({**event, "loss": loss})
    return history


def compare(*runs: tuple[Mapping[str, Any], MetricHistory]) -> Comparison:
    return Comparison.of(RUNS[: len(runs)], [each[0] for each in runs], [each[1] for each in runs])


def test_runs_of_the_same_data_have_a_winner() -> None:
    found = compare((plan_of(1), history_of(2.0)), (plan_of(2), history_of(1.0)))
    assert found.metrics[0].winner == 1
    assert (found.note, found.no_winner) == ("", {})


def test_changed_code_of_a_task_has_the_same_data() -> None:
    plans = [{**plan_of(), "bundle": {"digest": digest * 64}} for digest in "ab"]
    found = compare((plans[0], history_of(2.0)), (plans[1], history_of(1.0)))
    assert found.metrics[0].winner == 1


@pytest.mark.parametrize(
    ("one", "two", "reason"),
    [
        (
            plan_of(data={"training": "s3://a/x"}),
            plan_of(data={"training": {"uri": "s3://b/y"}}),
            "the runs differ in their data training (s3://a/x, s3://b/y)",
        ),
        (
            plan_of(data={"training": "s3://a/x"}),
            plan_of(),
            "the runs differ in their data training (s3://a/x, none)",
        ),
        (
            plan_of(),
            plan_of(code={"task": "gpt:GPT"}),
            "the runs differ in their code (digits:Digits, gpt:GPT)",
        ),
        (
            plan_of(code={"script": "train.py", "args": {"data": "/data/one", "layers": 2}}),
            plan_of(code={"script": "train.py", "args": {"data": "/data/two", "layers": 3}}),
            "the runs differ in their argument data (/data/one, /data/two)",
        ),
        (plan_of(), {}, "the data of a run without a plan are unknown"),
    ],
)
def test_runs_of_other_data_have_no_winner(
    one: Mapping[str, Any], two: Mapping[str, Any], reason: str
) -> None:
    found = compare((one, history_of(2.0)), (two, history_of(1.0)))
    assert found.metrics[0].winner is None
    assert found.no_winner == {"validation/loss": reason}
    assert found.note == f"No run is the best of all: {reason}."


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (
            plan_of(data={"training": "s3://a/x"}),
            plan_of(data={"training": {"uri": "s3://a/x", "mode": "FastFile"}}),
        ),
        (
            plan_of(code={"script": "train.py", "args": ["--lr", "0.1"]}),
            plan_of(code={"script": "train.py", "args": ["--lr", "0.2"]}),
        ),
    ],
)
def test_how_data_are_read_does_not_matter(one: Mapping[str, Any], two: Mapping[str, Any]) -> None:
    assert compare((one, history_of(2.0)), (two, history_of(1.0))).metrics[0].winner == 1


def test_other_numbers_of_samples_are_other_data() -> None:
    found = compare((plan_of(), history_of(2.0, 10)), (plan_of(), history_of(1.0, 2000)))
    assert found.metrics[0].winner is None
    assert found.note.endswith("the validation data have different numbers of samples (10, 2,000).")


def test_a_run_without_the_metric_has_no_say() -> None:
    other = plan_of(data={"training": "s3://b/y"})
    runs = ((plan_of(), history_of(2.0)), (plan_of(), history_of(1.0)), (other, MetricHistory()))
    assert compare(*runs).metrics[0].winner == 1


def test_the_json_of_the_command_has_no_new_keys() -> None:
    found = compare((plan_of(1), history_of(2.0)), (plan_of(2), history_of(1.0)))
    content = found.to_json()
    assert [*content] == ["runs", "settings", "metrics"]
    assert [*content["metrics"][0]] == ["metric", "last", "best", "winner"]


def test_a_page_is_given_what_is_common_and_better() -> None:
    found = compare((plan_of(1), history_of(2.0)), (plan_of(2), history_of(1.0))).to_page()
    assert [each["path"] for each in found["settings"]] == ["train.epochs"]
    assert [each["path"] for each in found["common"]] == ["code.task", "train.seed"]
    assert found["main"] == "validation/loss"
    assert found["metrics"][0]["direction"] == "min"
    assert "train/data_seconds" in found["speed"]
