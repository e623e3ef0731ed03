"""The recipes work as written: on two ranks, and over a stop and a resume to the last bit."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import REPOSITORY, Cli, until
from support.local_runs import LOG_EVERY_STEP
from support.parallel_training import SIX_DIGITS
from torchmetrics.functional.classification import multiclass_f1_score

from cloudtrain_runtime.contract import parse_event

PAGE = (REPOSITORY / "docs" / "how-to" / "recipes.md").read_text()
FILES = {
    name: block
    for block, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", PAGE, flags=re.DOTALL)
}
(JOB,) = re.findall(r"```yaml\n(name: .*?)```", PAGE, flags=re.DOTALL)
STEPS = 60
SLOW = """
import time
from cloudtrain_runtime import context
from {recipe} import Mine as Recipe


class Mine(Recipe):
    def loss(self, model, batch):
        time.sleep(0.2 if model.training and context().step >= 17 else 0)
        return super().loss(model, batch)
"""


@dataclass(frozen=True)
class Run:
    """A finished run of a recipe."""

    run: str
    first_step: int
    steps: dict[int, tuple[float, float]]  # loss and learning rate by step
    evaluations: dict[
        int, tuple[float, float | None]
    ]  # loss and F1 of the validation split by step
    weights: dict[str, torch.Tensor]


@pytest.fixture
def folder(job: Callable[..., Path]) -> Path:
    return job(JOB, **FILES).parent


def checkpoints(run: str) -> Path:
    return Path(os.environ["CLOUDTRAIN_HOME"], "runs", run, "checkpoints")


def train(cli: Cli, folder: Path, recipe: str, *options: str, before: str = "") -> Run:
    """Train a recipe; the steps and evaluations of the run `before` precede those of the run."""
    options = ("--follow", "--set", f"code.task={recipe}:Mine", *options, *LOG_EVERY_STEP)
    done = cli("submit", "--local", *options, cwd=folder)
    assert done.code == 0, done.err
    run = done.out.partition("\n")[0]
    lines = [
        line["text"]
        for each in (before, run)
        if each
        for line in cli("logs", each, "--json").json["lines"]
    ]
    events = [event for event in map(parse_event, lines) if event]
    return Run(
        run,
        cli("status", run, "--json").json["first_step"],
        {
            each["step"]: (each["loss"], each["learning_rate"])
            for each in events
            if each["event"] == "step"
        },
        {
            each["step"]: (each["loss"], each.get("f1"))
            for each in events
            if each["event"] == "evaluation"
        },
        torch.load(checkpoints(run).parent / "model" / "model.pt", weights_only=True),
    )


def train_with_stop(cli: Cli, folder: Path, recipe: str) -> Run:
    """Stop a run between two evaluations and checkpoints, and resume it."""
    (folder / "slow.py").write_text(SLOW.format(recipe=recipe))
    slow = cli(
        "submit", "--local", "--set", "code.task=slow:Mine", *LOG_EVERY_STEP, cwd=folder
    ).out.strip()
    until(lambda: list(checkpoints(slow).glob("step-00000015*/manifest.json")))
    stopped = cli("stop", slow, "--json").json
    assert stopped["state"] == "STOPPED"
    assert 15 < stopped["last_step"] < STEPS
    found = train(cli, folder, recipe, "--set", f"checkpoint.resume={slow}", before=slow)
    assert found.first_step == stopped["last_step"]
    return found


def test_each_recipe_has_a_file() -> None:
    assert set(FILES) == {"base.py", *(f"{recipe}.py" for recipe in CHECKS)}
    assert PAGE.count("```python") == len(FILES)


def check_mixture(cli: Cli, module: Any, run: Run) -> None:
    """Each epoch has the datasets' shares, and repeats no sample before its dataset is exhausted."""
    task = module.Mine()
    sizes = [len(part) for part in task.datasets()["train"].datasets]
    shares = torch.zeros(len(sizes))
    for _ in range(100):
        drawn = torch.tensor(list(task.sampler(task.datasets()["train"])))
        for number, counts in enumerate(drawn.bincount(minlength=sum(sizes)).split(sizes)):
            assert counts.max() - counts.min() <= 1
            shares[number] += counts.sum() / len(drawn) / 100
    assert shares.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    assert run.evaluations[STEPS][0] < run.evaluations[5][0]


def check_plateau(cli: Cli, module: Any, run: Run) -> None:
    """The rate is halved after each second evaluation in a row without an improvement by 10 %."""
    best, waited, rate = float("inf"), 0, 0.5
    for step in range(1, STEPS + 1):
        assert run.steps[step][1] == rate, step
        if step % 5 == 0:
            loss = run.evaluations[step][0]
            best, waited = (loss, 0) if loss < best * 0.9 else (best, waited + 1)
            if waited > 1:
                rate, waited = rate / 2, 0
    assert rate < 0.2


def check_f1(cli: Cli, module: Any, run: Run) -> None:
    """The metric is that of one process that evaluates the exported weights."""
    task = module.Mine()
    model = task.model().eval()
    model.load_state_dict(run.weights)
    inputs, classes = task.datasets()["validation"].tensors
    expected = multiclass_f1_score(model(inputs), classes, num_classes=3)
    assert run.evaluations[STEPS][1] == pytest.approx(float(expected), rel=SIX_DIGITS)
    assert (
        cli("status", run.run, "--json").json["metrics"]["validation/f1"]
        == run.evaluations[STEPS][1]
    )


def check_adapter(cli: Cli, module: Any, run: Run) -> None:
    """Neither checkpoints nor the model have frozen weights, and they fit the model that the Task builds."""
    target = checkpoints(run.run).parent / "exported.pt"
    assert cli("checkpoints", "export", run.run, "--to", "torch", "-o", target).code == 0
    for weights in (torch.load(target, weights_only=True), run.weights):
        assert {name.partition(".")[0] for name in weights} == {"adapter"}
    assert all(
        torch.equal(run.weights[name], value)
        for name, value in torch.load(target, weights_only=True).items()
    )
    model = module.Mine().model()
    model.load_state_dict(run.weights)
    assert torch.equal(model.adapter[0].weight, run.weights["adapter.0.weight"])


CHECKS = {
    "mixture": check_mixture,
    "plateau": check_plateau,
    "f1": check_f1,
    "adapter": check_adapter,
}


@pytest.mark.processes
@pytest.mark.parametrize("recipe", CHECKS)
def test_a_recipe_resumes_to_the_last_bit(
    cli: Cli, folder: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(cli, folder, recipe)
    found = train_with_stop(cli, folder, recipe)
    assert list(expected.steps) == list(range(1, STEPS + 1))
    assert found.steps == expected.steps
    assert found.evaluations == expected.evaluations
    assert found.weights.keys() == expected.weights.keys()
    assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
    monkeypatch.syspath_prepend(folder)
    for name in ("base", recipe):
        monkeypatch.delitem(sys.modules, name, raising=False)
    CHECKS[recipe](cli, importlib.import_module(recipe), expected)
