"""The metric by which runs of a job are compared."""

from __future__ import annotations

import re
from collections.abc import Iterable

TRAINING_LOSS = "train/loss"
_LOWER = re.compile(r"(?:^|_)(?:loss|error|perplexity|ppl|nll|mse|rmse|mae|wer|cer)(?:_|$)")
_HIGHER = re.compile(
    r"(?:^|_)(?:acc|accuracy|top1|top5|f1|auc|auroc|precision|recall|bleu|iou|map|r2|psnr|ssim)(?:_|$)"
)
_SCRIPT_EVALUATION = re.compile(r"train/(?:val|valid|validation|eval|test)_")
"""A metric of a script, whose output names no split."""


def main_metric(metrics: Iterable[str]) -> str | None:
    """Return the metric that matters most: `validation/loss`, else one of another evaluation, else `train/loss`.

    Args:
        metrics: Names such as `validation/accuracy`. Those of which it is unknown whether a higher or a lower value is
            better, such as `validation/score`, are left out.
    """
    candidates = [name for name in metrics if name == TRAINING_LOSS or _is_evaluation(name)]
    return min(candidates, key=_order, default=None)


def is_higher_better(metric: str) -> bool:
    """Return whether a higher value of a metric is better, by its name; of `f1_loss` a lower one is."""
    return _HIGHER.search(metric.rpartition("/")[2]) is not None and not is_lower_better(metric)


def is_lower_better(metric: str) -> bool:
    """Return whether a lower value of a metric is better, by its name."""
    return _LOWER.search(metric.rpartition("/")[2]) is not None


def _is_evaluation(name: str) -> bool:
    split, _, part = name.rpartition("/")
    has_direction = (_LOWER.search(part) is None) != (_HIGHER.search(part) is None)
    return has_direction and (split != "train" or _SCRIPT_EVALUATION.match(name) is not None)


def _order(name: str) -> tuple[bool, bool, bool, bool, str]:
    split, _, part = name.rpartition("/")
    return name == TRAINING_LOSS, split != "validation", part != "loss", "loss" not in part, name
