"""Results of `evaluate`: parsing, ranking, comparison, and the choice of data, checkpoint and splits."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from cloudtrain.errors import UserError
from cloudtrain.features.evaluation.evaluating import EvaluationOptions, parse_data
from cloudtrain.runs.comparison import compare_evaluations
from cloudtrain.runs.evaluations import (
    EvaluatedSplit,
    Evaluation,
    Measurement,
    parse_evaluation,
    rank_evaluations,
)

NOW = datetime(2026, 11, 20, tzinfo=UTC)


def evaluation(run: str, accuracy: float | None, samples: int = 100, **fields: Any) -> Evaluation:
    metrics = {"loss": Measurement(1.0), "accuracy": Measurement(accuracy, 0.1, 0.2)}
    return Evaluation(
        f"{run}-evaluation", run, NOW, {"test": EvaluatedSplit(samples, metrics)}, **fields
    )


def test_a_stored_result_survives_the_round_trip() -> None:
    found = {
        "version": 1,
        "run": "b",
        "evaluated": "local:a",
        "created": NOW.timestamp(),
        "step": 7,
        "weights": "s3://bucket/model.tar.gz",
        "data": {"new": "s3://bucket/new"},
        "splits": {
            "test": {
                "samples": 3,
                "metrics": {"loss": {"value": None}},
                "own": {"texts": ["a b"]},
                "residuals": None,
            }
        },
    }
    parsed = parse_evaluation(json.dumps(found).encode())
    assert parsed == Evaluation(
        "b",
        "local:a",
        NOW,
        {"test": EvaluatedSplit(3, {"loss": Measurement(None)}, {"own": {"texts": ["a b"]}})},
        7,
        "s3://bucket/model.tar.gz",
        {"new": "s3://bucket/new"},
    )
    assert str(parsed.metrics["test/loss"]) == "not finite"
    for damaged in (b"", b"[]", b'{"run": "b"}', json.dumps({**found, "splits": 1}).encode()):
        assert parse_evaluation(damaged) is None


def test_runs_are_ranked_by_quality_before_loss() -> None:
    ranking = rank_evaluations([evaluation("a", 0.5), evaluation("b", 0.9), evaluation("c", None)])
    assert ranking.metric == "test/accuracy"
    assert [each.evaluated for each in ranking.evaluations] == ["b", "a", "c"]
    assert ranking.warnings == ()
    assert rank_evaluations(ranking.evaluations, "test/loss").metric == "test/loss"
    with pytest.raises(UserError, match="test/accurcy"):
        rank_evaluations(ranking.evaluations, "test/accurcy")


def test_a_ranking_warns_where_the_data_differ() -> None:
    other = evaluation("b", 0.9, 200, data={"new": "s3://bucket/new"})
    assert rank_evaluations([evaluation("a", 0.5), other]).warnings == (
        "the evaluations read different data, so their values are not comparable",
        "the test splits have different numbers of samples: 100, 200",
    )


def test_compare_shows_the_newest_evaluation() -> None:
    loss, accuracy = compare_evaluations(
        [[evaluation("a", 0.5), evaluation("a", 0.4)], [evaluation("b", 0.9)]]
    )
    assert (accuracy.metric, accuracy.best, accuracy.winner) == (
        "evaluated test/accuracy",
        (0.5, 0.9),
        1,
    )
    assert loss.metric == "evaluated test/loss"


def test_compare_has_no_winner_where_the_data_differ() -> None:
    others = (evaluation("b", 0.9, data={"new": "s3://bucket/new"}), evaluation("b", 0.9, 200))
    for other in others:
        _, accuracy = compare_evaluations([[evaluation("a", 0.5)], [other]])
        assert (accuracy.best, accuracy.winner) == ((0.5, 0.9), None)


def test_compare_ignores_the_weights_that_a_run_started_with() -> None:
    newest_first = [evaluation("a", 0.1, step=0), evaluation("a", 0.5, step=7)]
    _, accuracy = compare_evaluations([newest_first, [evaluation("b", 0.9, step=7)]])
    assert accuracy.best == (0.5, 0.9)


def test_data_is_given_for_one_channel_or_by_name() -> None:
    assert parse_data(["s3://bucket/a=b"]) == {"": "s3://bucket/a=b"}
    assert parse_data(["train=s3://bucket/a", "test=/data"]) == {
        "train": "s3://bucket/a",
        "test": "/data",
    }


def test_a_wrong_checkpoint_is_refused() -> None:
    with pytest.raises(UserError, match="'bets' is no checkpoint"):
        EvaluationOptions(checkpoint="bets")
    with pytest.raises(UserError, match="'inital' is no checkpoint") as checkpoint:
        EvaluationOptions(checkpoint="inital")
    assert checkpoint.value.hint == 'did you mean "initial"?'
