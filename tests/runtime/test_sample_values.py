"""Intervals, calibration and residuals of an evaluation, from the values of its samples."""

from __future__ import annotations

import pytest
import torch

from cloudtrain_runtime.distributed.pipeline import BatchEvaluation
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.metrics.predictions import Prediction
from cloudtrain_runtime.process.run_context import context
from cloudtrain_runtime.training.bootstrap import bootstrap_means
from cloudtrain_runtime.training.sample_values import SampleValues


def gathered(*batches: BatchEvaluation) -> SampleValues:
    values = SampleValues()
    for batch in batches:
        values.add(batch, 4)
    values.gather(context())
    return values


def test_a_bootstrap_interval_is_that_of_the_mean() -> None:
    sample = torch.randn(2_000, generator=torch.Generator().manual_seed(1)) + 3
    found = bootstrap_means({"metric": sample}, torch.ones(2_000), seed=0)["metric"]
    assert found.value == pytest.approx(float(sample.mean()))
    assert found.low is not None
    assert found.high is not None
    half = 1.96 * float(sample.std()) / 2_000**0.5  # the normal approximation
    assert (found.low, found.high) == pytest.approx(
        (found.value - half, found.value + half), abs=half / 8
    )
    assert bootstrap_means({"metric": sample}, torch.ones(2_000), seed=0)["metric"] == found
    assert bootstrap_means({"metric": sample[:1]}, torch.ones(1), seed=0)["metric"].low is None


def test_classes_with_probabilities_are_calibrated() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.55, 0.55])
    prediction = Prediction(torch.tensor([1, 0, 1, 2]), torch.tensor([1, 0, 1, 1]), confidence)
    batch = BatchEvaluation({"loss": torch.tensor(0.5)}, prediction)
    values = gathered(batch, batch)
    calibration = values.calibration()
    assert calibration is not None
    assert [(each["samples"], each["accuracy"]) for each in calibration["bins"]] == [
        (4, 0.5),
        (4, 1.0),
    ]
    assert calibration["expected_error"] == pytest.approx(0.05)
    measured = values.measure({"loss": 0.5}, seed=0)
    assert measured["accuracy"].value == 0.75
    assert (measured["loss"].value, measured["loss"].low) == (
        0.5,
        0.5,
    )  # both batches have this loss
    assert values.residuals() is None


def test_a_probability_can_be_0_or_1() -> None:
    prediction = Prediction(torch.tensor([1, 0]), torch.tensor([1, 0]), torch.tensor([0.0, 1.0]))
    calibration = gathered(BatchEvaluation({}, prediction)).calibration()
    assert calibration is not None
    assert calibration["expected_error"] == pytest.approx(0.5)


def test_scores_in_place_of_probabilities_are_refused() -> None:
    prediction = Prediction(torch.tensor([1]), torch.tensor([1]), torch.tensor([3.5]))
    with pytest.raises(TaskError, match="apply softmax"):
        gathered(BatchEvaluation({}, prediction)).calibration()


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_numbers_have_residuals(shape: tuple[int, ...]) -> None:
    true = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(shape)
    error = torch.tensor([1.0, -1.0, 1.0, -1.0]).reshape(shape)
    values = gathered(BatchEvaluation({}, Prediction(true + error, true)))
    residuals = values.residuals()
    assert residuals is not None
    assert (residuals["mean"], residuals["mean_absolute"], residuals["rmse"]) == (0.0, 1.0, 1.0)
    assert residuals["r2"] == pytest.approx(1 - 4 / 5)
    assert values.measure({}, seed=0)["rmse"].value == 1.0
    assert values.calibration() is None
