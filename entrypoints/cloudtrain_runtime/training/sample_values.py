"""Values of single samples in an evaluation, from which intervals, calibration and residuals are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from cloudtrain_runtime.distributed.pipeline import BatchEvaluation
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context
from cloudtrain_runtime.training.bootstrap import Measured, bootstrap_means

_BINS = 10
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_MOST_FOR_QUANTILES = 1_000_000
_LOSS = "loss sum"
_LOSS_COUNT = "loss count"
_PREDICTED = "predicted"
_TRUE = "true"
_CONFIDENCE = "confidence"
_METRIC = "metric "


class SampleValues:
    """The values of the samples that this rank counts; after `gather`, those of all ranks."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._columns: dict[str, torch.Tensor] = {}

    def add(self, batch: BatchEvaluation, samples: int) -> None:
        """Add a batch. Tensors stay on their device, so that nothing waits for it."""
        for name, value in batch.values.items():
            if name != "loss":
                self._append(f"{_METRIC}{name}", value)
                continue
            count = batch.count
            weight = 1
            if count is None:
                # The loss is a mean over the samples, and else the sum over what the Task counts.
                count = torch.as_tensor(samples, dtype=torch.float64)
                weight = samples
            self._append(_LOSS, value.double() * weight)
            self._append(_LOSS_COUNT, count)
        if batch.prediction is not None:
            self._append(_PREDICTED, batch.prediction.predicted)
            self._append(_TRUE, batch.prediction.true)
            if batch.prediction.confidence is not None:
                self._append(_CONFIDENCE, batch.prediction.confidence)

    def gather(self, context: Context) -> None:
        """Collect the values of all ranks, in the order of the ranks. All ranks call this together."""
        own = {name: torch.cat(parts).cpu() for name, parts in self._parts.items()}
        shares = gather(own, context)
        names = dict.fromkeys(name for share in shares for name in share)
        self._columns = {
            name: torch.cat([share[name] for share in shares if name in share]) for name in names
        }

    def measure(self, means: Mapping[str, float], seed: int) -> dict[str, Measured]:
        """Return metrics with intervals, and the accuracy or the root mean square error of the predictions.

        The intervals of the loss come from batches, of which the Task returns one loss each; all others come from
        samples. A metric that is no mean of samples has none.

        Args:
            means: The exact means of the evaluation.
            seed: Seed of the bootstrap.
        """
        samples = {
            name.removeprefix(_METRIC): each
            for name, each in self._columns.items()
            if name.startswith(_METRIC)
        }
        if self.is_classified and "accuracy" not in means:
            samples["accuracy"] = self._hits
        elif self._has_numbers and "rmse" not in means:
            squares = self._residuals.square()
            samples["rmse"] = squares if squares.dim() == 1 else squares.flatten(1).mean(dim=1)
        sizes = {len(each) for each in samples.values()}
        found: dict[str, Measured] = {}
        for size in sizes:
            group = {name: each for name, each in samples.items() if len(each) == size}
            found |= bootstrap_means(group, torch.ones(size), seed)
        if _LOSS in self._columns:
            found |= bootstrap_means(
                {"loss": self._columns[_LOSS]}, self._columns[_LOSS_COUNT], seed
            )
        if self._has_numbers and "rmse" in samples:
            found["rmse"] = found["rmse"].map(math.sqrt)
        exact = {name: Measured(value) for name, value in means.items()}
        bounded = {
            name: Measured(means.get(name, each.value), each.low, each.high)
            for name, each in found.items()
            if name in means or name in ("accuracy", "rmse")
        }
        return {**exact, **bounded}

    @property
    def is_classified(self) -> bool:
        """Whether the samples have predicted classes."""
        return _TRUE in self._columns and not self._columns[_TRUE].is_floating_point()

    def calibration(self) -> dict[str, Any] | None:
        """Return how often predictions of a confidence are right; None without probabilities.

        Raises:
            TaskError: the Task has returned something else than probabilities.
        """
        if _CONFIDENCE not in self._columns:
            return None
        confidence = self._columns[_CONFIDENCE].double()
        hits = self._hits
        kept = self._columns[_TRUE] >= 0
        confidence = confidence[kept]
        hits = hits[kept]
        if len(confidence):
            low = float(confidence.min())
            high = float(confidence.max())
            # Rounding may give a little more than 1.
            if not 0 <= low <= high <= 1 + 1e-4:
                raise TaskError(
                    "predict() must return probabilities from 0 to 1: apply softmax to the model's scores"
                )
        bins = list[dict[str, Any]]()
        error = 0.0
        index = (confidence * _BINS).long().clamp(0, _BINS - 1)
        for number in range(_BINS):
            inside = index == number
            count = int(inside.sum())
            if count == 0:
                continue
            mean = float(confidence[inside].mean())
            share = float(hits[inside].mean())
            error += count / len(hits) * abs(mean - share)
            bounds = {"low": number / _BINS, "high": (number + 1) / _BINS}
            bins.append({**bounds, "samples": count, "confidence": mean, "accuracy": share})
        return {"expected_error": error, "bins": bins}

    def residuals(self) -> dict[str, Any] | None:
        """Return the distribution of predicted minus true numbers; None for other predictions."""
        if not self._has_numbers:
            return None
        errors = self._residuals.flatten()
        true = self._columns[_TRUE].double().flatten()
        spread = float((true - true.mean()).square().sum())
        # torch.quantile limits the number of its values.
        every = max(1, len(errors) // _MOST_FOR_QUANTILES)
        few = errors[::every]
        quantiles = torch.quantile(few, torch.tensor(_QUANTILES, dtype=torch.float64)).tolist()
        # Without a spread, there is no variance that the predictions could explain.
        r2 = None
        if spread:
            r2 = 1 - float(errors.square().sum()) / spread
        return {
            "values": len(errors),
            "mean": float(errors.mean()),
            "mean_absolute": float(errors.abs().mean()),
            "rmse": math.sqrt(float(errors.square().mean())),
            "r2": r2,
            "quantiles": {
                f"{share:g}": value for share, value in zip(_QUANTILES, quantiles, strict=True)
            },
        }

    @property
    def _has_numbers(self) -> bool:
        return _TRUE in self._columns and self._columns[_TRUE].is_floating_point()

    @property
    def _residuals(self) -> torch.Tensor:
        return self._columns[_PREDICTED].double() - self._columns[_TRUE].double()

    @property
    def _hits(self) -> torch.Tensor:
        return (self._columns[_PREDICTED] == self._columns[_TRUE]).double()

    def _append(self, name: str, value: torch.Tensor) -> None:
        self._parts.setdefault(name, []).append(
            value.detach().reshape(1) if value.dim() == 0 else value.detach()
        )
