"""The recipes work as written: on two ranks, and over a stop and a resume to the last bit."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import REPOSITORY, Cli
from support.local_runs import LOG_EVERY_STEP
from support.parallel_training import SIX_DIGITS, Outcome, losses, task_of
from torchmetrics.functional.classification import multiclass_f1_score

from cloudtrain_runtime.contract import MlTree, RunConfig, parse_event

PAGE = (REPOSITORY / "docs" / "how-to" / "recipes.md").read_text()
FILES = {
    name: block
    for block, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", PAGE, flags=re.DOTALL)
}
(JOB,) = re.findall(r"```yaml\n(name: .*?)```", PAGE, flags=re.DOTALL)
STEPS = 60
STOPPED_AT = 17
"""Between two evaluations and checkpoints."""


@dataclass(frozen=True)
class Run:
    """A finished run of a recipe.

    Attributes:
        run: Its id.
        config: What its ranks were given.
        events: Those of rank 0.
        weights: The exported model.
    """

    run: str
    config: RunConfig
    events: list[dict[str, Any]]
    weights: Mapping[str, torch.Tensor]

    @property
    def evaluations(self) -> dict[int, tuple[float, float | None]]:
        """Loss and F1 of the validation split by step."""
        return evaluations_of(self.events)


def evaluations_of(events: Sequence[dict[str, Any]]) -> dict[int, tuple[float, float | None]]:
    found = (each for each in events if each["event"] == "evaluation")
    return {each["step"]: (each["loss"], each.get("f1")) for each in found}


def steps_of(events: Sequence[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Return loss and learning rate by step."""
    found = (each for each in events if each["event"] == "step")
    return {each["step"]: (each["loss"], each["learning_rate"]) for each in found}


@pytest.fixture
def folder(job: Callable[..., Path]) -> Path:
    return job(JOB, **FILES).parent


def folder_of(run: str) -> Path:
    return Path(os.environ["CLOUDTRAIN_HOME"], "runs", run)


def submit(cli: Cli, folder: Path, recipe: str) -> Run:
    """Train a recipe as a user does, with one thread for each rank."""
    options = (f"--set=code.task={recipe}:Mine", "--set=code.env.OMP_NUM_THREADS=1")
    done = cli("submit", "--local", "--follow", *options, *LOG_EVERY_STEP, cwd=folder)
    assert done.code == 0, done.err
    run = done.out.partition("\n")[0]
    lines = cli("logs", run, "--json").json["lines"]
    given = MlTree(folder_of(run) / "hosts" / "algo-1" / "opt" / "ml").run_config
    return Run(
        run,
        RunConfig.from_json(given.read_text()),
        [event for event in (parse_event(line["text"]) for line in lines) if event],
        torch.load(folder_of(run) / "model" / "model.pt", weights_only=True),
    )


def resumed(run: Run, recipe: str, folder: Path) -> list[Outcome]:
    """Train the recipe again on ranks of this test, to a step between two checkpoints and from there to the end."""
    assert run.config.train is not None
    saving = replace(run.config.checkpoint, uri=(folder / "checkpoints").as_uri())
    return [
        losses(
            replace(run.config.train, steps=steps),
            run.config.processes_per_instance or 1,
            folder,
            checkpoint=saving,
            task=partial(task_of, f"{recipe}:Mine"),  # type: ignore[arg-type]
        )
        for steps in (STOPPED_AT, STEPS)
    ]


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
    rates = steps_of(run.events)
    for step in range(1, STEPS + 1):
        assert rates[step][1] == rate, step
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
    target = folder_of(run.run) / "exported.pt"
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
    cli: Cli, folder: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    expected = submit(cli, folder, recipe)
    first, rest = resumed(expected, recipe, tmp_path / "resumed")
    assert first.reason is None, first.text
    assert rest.reason is None, rest.text
    assert rest.events[0]["step"] == STOPPED_AT
    events = [*first.events, *rest.events]
    assert steps_of(events) == steps_of(expected.events)
    assert list(steps_of(events)) == list(range(1, STEPS + 1))
    assert {
        step: evaluations_of(events)[step] for step in expected.evaluations
    } == expected.evaluations
    assert rest.weights is not None
    assert rest.weights.keys() == expected.weights.keys()
    assert all(torch.equal(rest.weights[name], value) for name, value in expected.weights.items())
    for name in ("base", recipe):
        monkeypatch.delitem(sys.modules, name, raising=False)
    CHECKS[recipe](cli, importlib.import_module(recipe), expected)
