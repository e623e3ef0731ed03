"""A resumed Task uses the settings of its optimizer and schedule that the job has now, and is exact without changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.checkpoint_folders import process_group
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime.contract import CheckpointConfig, EarlyStopping, TrainConfig, parse_event
from cloudtrain_runtime.contract.manifest import Manifest
from cloudtrain_runtime.process import run_context
from cloudtrain_runtime.process.run_context import read_context
from cloudtrain_runtime.task import Task
from cloudtrain_runtime.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

TRAIN = TrainConfig(
    epochs=None,
    steps=4,
    batch_size=4,
    accumulate=1,
    precision="fp32",
    compile=False,
    clip_grad_norm=None,
    learning_rate=0.1,
    seed=3,
    evaluate_every_steps=None,
    early_stopping=None,
)
LONGER = replace(TRAIN, steps=8)


class Line(Task):
    """Fits a line. Its optimizer and schedule are those of the test."""

    def __init__(self, optimizer: Any = None, schedule: Any = None) -> None:
        self.make_optimizer, self.make_schedule = optimizer, schedule

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        return {"train": data, "validation": data}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.make_optimizer is None:
            return super().optimizer(model)
        return self.make_optimizer(model.parameters())  # type: ignore[no-any-return]

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.make_schedule and self.make_schedule(optimizer)


class Trained(NamedTuple):
    """What a start has shown: the rate of each step, its output, and the trainer at its end."""

    rates: dict[int, float]
    text: str
    trainer: Trainer

    @property
    def group(self) -> dict[str, Any]:
        """The options of the optimizer."""
        return self.trainer.optimizer.param_groups[0]


Train = Callable[..., Trained]


@pytest.fixture
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Train:
    """Return a function that trains in this process, from the newest checkpoint of the test if there is one."""
    monkeypatch.setenv("CLOUDTRAIN_LOG_EVERY_STEPS", "1")
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path / "ml"))
    (tmp_path / "ml" / "output").mkdir(parents=True)
    runs = iter("abcdefgh")

    def run(config: TrainConfig, task: Task, *, job: object, folder: str = "saved") -> Trained:
        uri = (tmp_path / folder).as_uri()
        found = replace(
            read_context({}),
            seed=config.seed,
            train=config,
            run=f"run-{next(runs)}",
            training={"train": job},
            model_dir=tmp_path / "model",
            output_dir=tmp_path / "output",
        )
        monkeypatch.setattr(run_context, "_current", found)
        capfd.readouterr()
        # A uri is used for any training, as `checkpoint.resume: RUN` uses it.
        resume = uri if (tmp_path / folder).exists() else "auto"
        with process_group(found):
            trainer = Trainer(task, config, CheckpointConfig(uri, None, None, 9, resume), found)
            try:
                trainer.run()
            finally:
                trainer.checkpoints.wait_for_save()
        text = capfd.readouterr().out
        events = [each for each in map(parse_event, text.splitlines()) if each is not None]
        rates = {each["step"]: each["learning_rate"] for each in events if each["event"] == "step"}
        return Trained(rates, text, trainer)

    return run


def sgd(rate: float, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, **options)


def test_a_new_learning_rate_is_used(train: Train) -> None:
    train(TRAIN, Line(), job={"workers": 0})
    found = train(replace(LONGER, learning_rate=1e-5), Line(), job={"workers": 1})
    assert found.rates == dict.fromkeys(range(5, 9), 1e-5)
    assert "optimizer: lr was 0.1 and is 1e-05 from step 4 on" in found.text


SCHEDULES = {
    "constant to cosine": (TRAIN, replace(LONGER, schedule="cosine")),
    "cosine to constant": (replace(TRAIN, schedule="cosine"), LONGER),
    "cosine with more steps": (
        replace(TRAIN, schedule="cosine"),
        replace(LONGER, schedule="cosine"),
    ),
    "another rate with a warm-up": (
        replace(TRAIN, schedule="linear", warmup_steps=6),
        replace(LONGER, schedule="linear", warmup_steps=6, learning_rate=0.3),
    ),
    "no warm-up any more": (
        replace(TRAIN, warmup_steps=6),
        LONGER,
    ),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_new_schedule_counts_from_the_start(train: Train, case: str) -> None:
    """From the first step on, the rates are those of a run that has had the new job from its start."""
    first, second = SCHEDULES[case]
    train(first, Line(), job={"workers": 0})
    found = train(second, Line(), job={"workers": 1})
    expected = train(second, Line(), job={"workers": 1}, folder="another")
    assert found.rates == {
        step: pytest.approx(rate, rel=1e-12) for step, rate in expected.rates.items() if step > 4
    }


OWN = {
    "StepLR": lambda rate: (sgd(rate), lambda each: lr_scheduler.StepLR(each, 3, gamma=rate)),
    "cosine": lambda rate: (sgd(rate), lambda each: lr_scheduler.CosineAnnealingLR(each, 9)),
    "one cycle": lambda rate: (
        sgd(rate, momentum=0.9),
        lambda each: lr_scheduler.OneCycleLR(each, max_lr=rate, total_steps=9),
    ),
    "sequence": lambda rate: (
        sgd(rate),
        lambda each: lr_scheduler.SequentialLR(
            each,
            [
                lr_scheduler.LinearLR(each, 0.1, total_iters=2),
                lr_scheduler.ExponentialLR(each, 0.5),
            ],
            milestones=[2],
        ),
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_schedule_of_the_task_gets_new_settings(train: Train, kind: str) -> None:
    train(TRAIN, Line(*OWN[kind](0.1)), job={"workers": 0})
    found = train(LONGER, Line(*OWN[kind](0.02)), job={"workers": 1})
    expected = train(LONGER, Line(*OWN[kind](0.02)), job={"workers": 1}, folder="another")
    assert found.rates == {
        step: pytest.approx(rate, rel=1e-9) for step, rate in expected.rates.items() if step > 4
    }


def test_a_plateau_keeps_its_best_value(train: Train) -> None:
    def plateau(patience: int) -> Callable[..., Any]:
        return lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=patience, threshold=9.0)

    train(replace(TRAIN, evaluate_every_steps=2), Line(sgd(0.1), plateau(7)), job={"workers": 0})
    found = train(LONGER, Line(sgd(0.02), plateau(3)), job={"workers": 1})
    assert found.rates[5] == 0.02
    schedule = found.trainer.schedules[""]
    assert (schedule.patience, schedule.last_epoch) == (3, 1)  # type: ignore[union-attr]


def test_other_options_of_the_optimizer_are_used(train: Train) -> None:
    train(TRAIN, Line(sgd(0.1, momentum=0.9, weight_decay=0.1)), job={"workers": 0})
    found = train(LONGER, Line(sgd(0.1, momentum=0.5, weight_decay=0.1)), job={"workers": 1})
    assert (found.group["momentum"], found.group["weight_decay"]) == (0.5, 0.1)
    assert "optimizer: momentum was 0.9 and is 0.5 from step 4 on" in found.text


def test_another_optimizer_has_its_own_options(train: Train) -> None:
    train(TRAIN, Line(), job={"workers": 0})
    found = train(LONGER, Line(sgd(0.01, nesterov=False)), job={"workers": 1})
    assert set(found.rates.values()) == {0.01}
    assert found.group["momentum"] == 0


def test_ranks_alone_do_not_change_the_optimizer(train: Train, tmp_path: Path) -> None:
    """A rate that a Task computes from the number of ranks stays, because the global batch does."""
    train(TRAIN, Line(sgd(0.1)), job={"workers": 0})
    for manifest in tmp_path.glob("saved/step-*/manifest.json"):
        saved = Manifest.from_json(manifest.read_bytes())
        manifest.write_text(replace(saved, world_size=2).to_json())
    found = train(LONGER, Line(sgd(0.05)), job={"workers": 0})
    assert set(found.rates.values()) == {0.1}
    assert (
        "lr was 0.1 and is 0.05 with another number of ranks: the checkpoint's value is used"
        in found.text
    )


def test_fields_that_the_task_does_not_read_are_named(train: Train) -> None:
    task = Line(sgd(0.1), lambda each: lr_scheduler.StepLR(each, 3))
    train(TRAIN, task, job={})
    changed = replace(LONGER, learning_rate=1e-5, schedule="cosine")
    found = train(changed, task, job={"learning_rate": 1e-5, "schedule": "cosine"})
    warning = "warning: train.{} has changed, and {}() of the Task does not use it"
    assert warning.format("learning_rate", "optimizer") in found.text
    assert warning.format("schedule", "schedule") in found.text


def test_fp16_after_fp32_scales_anew(train: Train) -> None:
    train(TRAIN, Line(), job={"workers": 0})
    assert len(train(replace(LONGER, precision="fp16"), Line(), job={"workers": 1}).rates) == 4


def test_another_metric_stops_by_its_own_values(train: Train) -> None:
    rule = EarlyStopping("validation/loss", 3)
    train(replace(TRAIN, early_stopping=rule, evaluate_every_steps=2), Line(), job={"workers": 0})
    task = Line()
    task.metrics = lambda _, batch: {"large": torch.ones(len(batch[0]))}  # type: ignore[method-assign]
    other = replace(LONGER, evaluate_every_steps=1, early_stopping=EarlyStopping("large", 9))
    found = train(other, task, job={"workers": 1})
    assert found.trainer.early_stopping.best == 1.0
