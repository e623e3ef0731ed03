"""Patterns for metrics that a program prints and its job does not read."""

from __future__ import annotations

import re

import pytest
import yaml

from cloudtrain.runs.progress import Progress
from cloudtrain.runs.status import State, Status
from cloudtrain.runs.unread_metrics import format_patterns, suggest_patterns
from cloudtrain_runtime.launcher.output import MetricReader

PRINTED = {
    "epoch 1 iter {}0/30 loss 0.{}": {"step", "epoch", "loss"},
    "[rank0]: Epoch: {} | Loss: 0.{} | Acc: 91.2%": {"epoch", "loss", "acc"},
    "{{'loss': {}.5, 'grad_norm': 1.{}}}": {"loss"},
    "val_loss={}.0 loss=-1e-3 step={}": {"step", "val_loss", "loss"},
    "Average loss: 0.{}, Accuracy: {}/10000 (98%)": {"loss"},
    "step {}: loss tensor(0.{})": set(),
    "the weather is {} degrees, or {}": set(),
}


@pytest.mark.parametrize(("line", "names"), PRINTED.items())
def test_patterns_find_what_was_printed(line: str, names: set[str]) -> None:
    lines = [line.format(number, number) for number in (1, 2, 3)]
    patterns = suggest_patterns(lines)
    assert set(patterns) == names
    for text in lines:
        for pattern in patterns.values():
            float(re.search(pattern, text).group(1))  # type: ignore[union-attr]  # it is found


def test_the_line_can_be_pasted(capfd: pytest.CaptureFixture[str]) -> None:
    patterns = suggest_patterns(["iter 1 val_loss: 0.5", "iter 2 val_loss: 0.25"])
    pasted = yaml.safe_load(format_patterns(patterns))["metrics"]
    assert pasted == patterns
    reader = MetricReader(pasted)
    reader.feed(b"iter 2 val_loss: 0.25\n")
    reader.end()
    assert '"val_loss": 0.25' in capfd.readouterr().out


def test_one_line_and_other_ranks_suggest_nothing() -> None:
    assert suggest_patterns(["final loss 0.3"]) == {}
    assert suggest_patterns(["[rank1]: loss 0.3", "[rank1]: loss 0.2"]) == {}


def test_the_status_has_the_line_where_no_metric_was_read() -> None:
    unread = Progress(unread_metrics={"loss": r"\bloss\W+?([\d.e+-]+)"})
    warnings = Status("r", "local", State.SUCCEEDED, progress=unread).host_warnings()
    assert any("metrics: {loss: '" in each for each in warnings)
    read = Progress(unread_metrics=unread.unread_metrics, metrics={"train/loss": 0.5})
    assert Status("r", "local", State.SUCCEEDED, progress=read).host_warnings() == ()
