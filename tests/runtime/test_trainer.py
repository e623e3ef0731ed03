"""The training loop in one process: what it computes, saves and resumes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_folders import process_group
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cloudtrain_runtime import context
from cloudtrain_runtime.contract import CheckpointConfig, EarlyStopping, TrainConfig, parse_event
from cloudtrain_runtime.errors import JobError, TaskError
from cloudtrain_runtime.process import run_context
from cloudtrain_runtime.process.run_context import Context, read_context
from cloudtrain_runtime.task import Task
from cloudtrain_runtime.training.early_stopping import EarlyStoppingState
from cloudtrain_runtime.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's own

TRAIN = TrainConfig(
    epochs=2,
    steps=None,
    batch_size=4,
    accumulate=1,
    precision="fp32",
    compile=False,
    clip_grad_norm=None,
    learning_rate=0.05,
    seed=3,
    evaluate_every_steps=None,
    early_stopping=None,
)


class Regression(Task):
    """Fit a line through 22 points, with dropout so that random states matter."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(30, 3, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True)
        data = {"train": slice(0, 22), "validation": slice(22, 26), "test": slice(26, 30)}
        return {split: TensorDataset(inputs[part], targets[part]) for split, part in data.items()}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"error": (model(batch[0]) - batch[1]).abs().flatten()}

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)


Events = list[dict[str, Any]]
Run = Callable[..., Events]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Train in this process and return the events."""
    monkeypatch.setenv("CLOUDTRAIN_LOG_EVERY_STEPS", "1")
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path / "ml"))
    (tmp_path / "ml" / "output").mkdir(parents=True)

    def run(config: TrainConfig = TRAIN, *, task: Task | None = None, **checkpoint: Any) -> Events:
        saving = {"uri": str(tmp_path / "checkpoints"), "every_seconds": None, "every_steps": None, "keep": 3}
        folders = {"model_dir": tmp_path / "model", "output_dir": tmp_path / "output"}
        context: Context = replace(read_context({}), seed=config.seed, train=config, run="demo", **folders)
        monkeypatch.setattr(run_context, "_current", context)
        capfd.readouterr()
        with process_group(context):
            settings = CheckpointConfig(**{**saving, "resume": "auto", **checkpoint})
            trainer = Trainer(task or Regression(), config, settings, context)
            try:
                trainer.run()
            finally:
                trainer.checkpoints.wait_for_save()  # or the next start would meet the save of one that is long dead
        events = [parse_event(line) for line in capfd.readouterr().out.splitlines()]
        return [event for event in events if event is not None]

    return run


def losses(events: Events) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def weights(tmp_path: Path) -> Any:
    return torch.load(tmp_path / "model" / "model.pt", weights_only=True)


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_tells_its_story_and_leaves_a_model(train: Run, tmp_path: Path) -> None:
    events = train(every_steps=5)
    names = [event["event"] for event in events]
    assert names[0] == "started"
    assert names[-1] == "finished"
    assert events[0]["total_steps"] == 12  # 22 samples, 4 a step: 6 steps an epoch, the last with 2 samples
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [5, 10, 12]
    evaluated = [(event["split"], event["step"]) for event in events if event["event"] == "evaluation"]
    assert evaluated == [("validation", 6), ("validation", 12), ("test", 12)]
    final = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert set(final["test"]) == {"loss", "error"}
    model = Regression().model()
    model.load_state_dict(weights(tmp_path))
    inputs, targets = Regression().datasets()["test"].tensors  # type: ignore[attr-defined]
    assert float(F.mse_loss(model.eval()(inputs), targets)) == pytest.approx(final["test"]["loss"], rel=1e-5)


class _Killed(Exception):  # noqa: N818 (not an error: a stand-in for SIGKILL)
    pass


class Fragile(Regression):
    """Dies in the n-th call of its loss."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            self.left -= 1
            if self.left < 0:
                raise _Killed
        return super().loss(model, batch)


@pytest.mark.parametrize("killed_at", [1, 4, 6, 7, 11])
def test_a_run_that_was_killed_and_one_that_was_not_are_the_same(train: Run, tmp_path: Path, killed_at: int) -> None:
    whole = train(uri=str(tmp_path / "whole"))
    expected = weights(tmp_path)
    with pytest.raises(_Killed):
        train(task=Fragile(killed_at), every_steps=1)
    rest = train(every_steps=1)
    assert rest[0]["step"] == killed_at
    assert {step: loss for step, loss in losses(whole).items() if step > killed_at} == losses(rest)
    assert equal(weights(tmp_path), expected)


class Odd(Fragile):
    """A schedule with milestones (its state has whole numbers as keys), a tensor as learning rate, a spare layer."""

    def model(self) -> nn.Module:
        model = super().model()
        model.spare = nn.Linear(2, 2)  # never has a gradient, so the optimizer never has a state for it
        model.forward = lambda x: nn.Sequential.forward(model[:3], x)  # type: ignore[index]
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 8], gamma=0.1)


def test_odd_optimizers_and_schedules_resume_exactly(train: Run, tmp_path: Path) -> None:
    whole = train(task=Odd(1000), uri=str(tmp_path / "whole"))
    with pytest.raises(_Killed):
        train(task=Odd(5), every_steps=1)
    rest = train(task=Odd(1000), every_steps=1)
    assert {step: loss for step, loss in losses(whole).items() if step > 5} == losses(rest)
    rates = [event["learning_rate"] for event in rest if event["event"] == "step"]
    assert rates[0] == pytest.approx(0.005)
    assert rates[-1] == pytest.approx(0.0005)


def test_a_finished_run_resumed_does_nothing_more(train: Run, tmp_path: Path) -> None:
    train()
    expected = weights(tmp_path)
    again = train()
    assert losses(again) == {}
    assert again[0]["resumed_from"].endswith("step-00000012")
    assert equal(weights(tmp_path), expected)


def test_accumulation_makes_the_same_steps(train: Run, tmp_path: Path) -> None:
    class Plain(Regression):
        def model(self) -> nn.Module:
            return nn.Linear(3, 1)

    whole = train(replace(TRAIN, batch_size=8), task=Plain(), uri=str(tmp_path / "a"))
    parts = train(replace(TRAIN, batch_size=2, accumulate=4), task=Plain(), uri=str(tmp_path / "b"))
    assert losses(whole).keys() == losses(parts).keys()
    assert list(losses(parts).values()) == pytest.approx(list(losses(whole).values()), rel=1e-5)


def test_steps_may_end_in_the_middle_of_an_epoch(train: Run) -> None:
    events = train(replace(TRAIN, epochs=None, steps=8))
    assert max(losses(events)) == 8
    assert events[-1]["epochs"] == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains(train: Run, precision: str) -> None:
    events = train(replace(TRAIN, precision=precision, epochs=6))
    values = list(losses(events).values())
    assert values[-1] < values[0]


def test_the_gradient_norm_is_bounded_and_shown(train: Run) -> None:
    events = train(replace(TRAIN, clip_grad_norm=0.01))
    assert all(event["grad_norm"] > 0 for event in events if event["event"] == "step")


def test_evaluation_in_steps(train: Run) -> None:
    events = train(replace(TRAIN, evaluate_every_steps=5))
    steps = [event["step"] for event in events if event["event"] == "evaluation" and event["split"] == "validation"]
    assert steps == [5, 10, 12]


def test_patience_ends_a_run_and_survives_a_resume(train: Run) -> None:
    rule = EarlyStopping("validation/error", patience=2, min_delta=100.0, mode="min")
    events = train(replace(TRAIN, epochs=50, early_stopping=rule))
    assert max(losses(events)) == 3 * 6  # one evaluation sets the mark, two do not beat it
    patience = EarlyStoppingState()
    assert [patience.should_stop(replace(rule, min_delta=0.0, mode="max"), value) for value in (1, 2, 2, 1)] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("killed_at", [6, 7, 12, 13])
def test_patience_counts_each_evaluation_once_across_kills(train: Run, killed_at: int) -> None:
    """Killed right before and right after the evaluation at the end of an epoch of 6 steps."""
    rule = EarlyStopping("validation/error", patience=2, min_delta=100.0, mode="min")
    config = replace(TRAIN, epochs=50, early_stopping=rule)
    with pytest.raises(_Killed):
        train(config, task=Fragile(killed_at), every_steps=1)
    assert max(losses(train(config, every_steps=1))) == 3 * 6
    assert losses(train(config, every_steps=1)) == {}  # it has ended, and stays ended


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(train: Run, tmp_path: Path) -> None:
    notice = tmp_path / "ml" / "output" / "stop-notice"

    class Noticed(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if context().step == 5:
                notice.touch()
            return super().loss(model, batch)

    events = train(task=Noticed())
    assert events[-1] == {**events[-1], "event": "stopped", "step": 6}
    assert not any(event["event"] == "evaluation" for event in events)
    notice.unlink()
    evaluated = [event["step"] for event in train() if event["event"] == "evaluation"]
    assert evaluated == [6, 12, 12]


def test_stop_notice_keeps_a_partial_profile(train: Run, tmp_path: Path) -> None:
    notice = tmp_path / "ml" / "output" / "stop-notice"

    class Noticed(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if context().step == 4:
                notice.touch()
            return super().loss(model, batch)

    config = replace(TRAIN, profile_at=3, profile_steps=6)
    *_, saved, profile, stopped = train(config, task=Noticed())
    assert [saved["event"], stopped["event"], stopped["step"]] == ["checkpoint", "stopped", 5]
    assert (profile["first_step"], profile["last_step"]) == (3, 5)
    notice.unlink()
    (rest,) = [event for event in train(config) if event["event"] == "profile"]
    assert (rest["first_step"], rest["last_step"]) == (6, 8)


def test_a_profile_that_cannot_be_stored_ends_no_run(train: Run, tmp_path: Path) -> None:
    (tmp_path / "output").write_text("no folder")
    events = train(replace(TRAIN, profile_at=3, profile_steps=2))
    assert events[-1]["event"] == "finished"
    assert not any(event["event"] == "profile" for event in events)


def test_a_notice_saves_and_leaves(train: Run, tmp_path: Path) -> None:
    notice = tmp_path / "ml" / "output" / "stop-notice"

    class Noticed(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            notice.touch()
            return super().loss(model, batch)

    events = train(task=Noticed())
    assert [event["event"] for event in events][-2:] == ["checkpoint", "stopped"]
    assert not (tmp_path / "model").exists()
    notice.unlink()
    assert train()[0]["step"] == 1


def test_a_loss_that_is_not_finite_is_null(train: Run) -> None:
    class Broken(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * float("nan")

    events = train(replace(TRAIN, epochs=None, steps=2, export_nonfinite=True), task=Broken(), every_steps=1)
    assert set(losses(events).values()) == {None}
    assert not any(event["event"] == "checkpoint" for event in events), "lost weights were saved"
    with pytest.raises(JobError, match=r"not finite at 3 logged steps in a row, the last is step 3"):
        train(task=Broken())


@pytest.mark.parametrize("length", [{"epochs": 2}, {"epochs": None, "steps": 9}])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_of_the_job_goes_on_after_a_resume(
    train: Run, tmp_path: Path, schedule: str, length: dict[str, int | None]
) -> None:
    class Plain(Fragile):
        def schedule(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002 (the Task's signature)
            return None

    config = replace(TRAIN, schedule=schedule, warmup_steps=3, **length)  # type: ignore[arg-type]
    whole = train(config, task=Plain(1000), uri=str(tmp_path / "whole"))
    with pytest.raises(_Killed):
        train(config, task=Plain(5), every_steps=1)
    rest = train(config, task=Plain(1000), every_steps=1)
    expected, found = rates(whole), rates(rest)
    steps = max(expected)
    assert found == {step: rate for step, rate in expected.items() if step > 5}
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 5}
    # An event tells the rate of the step that follows.
    assert [expected[step] for step in (1, 2, 3)] == pytest.approx([0.05 * 2 / 3, 0.05, 0.05])
    assert expected[steps] == pytest.approx(0.0, abs=1e-9)
    assert steps == (9 if length["epochs"] is None else 12)


def rates(events: Events) -> dict[int, float]:
    return {event["step"]: event["learning_rate"] for event in events if event["event"] == "step"}


def test_a_task_without_training_data_says_so(train: Run) -> None:
    class Nothing(Regression):
        def datasets(self) -> Mapping[str, Dataset[Any]]:
            return {"test": super().datasets()["test"]}

    with pytest.raises(TaskError, match=r"must have train, and may have validation and test; it has test"):
        train(task=Nothing())


def test_an_early_stopping_metric_that_is_not_measured_says_so(train: Run) -> None:
    rule = EarlyStopping("validation/accuracy", patience=2)
    with pytest.raises(TaskError, match="the Task measures loss, error"):
        train(replace(TRAIN, early_stopping=rule))


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("datasets", lambda: (1, 2), "must return a mapping .* returned a tuple"),
        ("datasets", lambda: {"train": [1], "val": [1]}, "it has train, val"),
        ("datasets", lambda: {"train": [1], "test": []}, "the test dataset is empty"),
        ("datasets", lambda: {"train": iter(())}, "the train dataset needs __len__"),
        ("loss", lambda model, batch: None, "must return a scalar tensor.*returned None"),
        ("loss", lambda model, batch: 0.5, "must return a scalar tensor.*returned a float"),
        ("loss", lambda model, batch: model(batch[0]), r"must return a scalar tensor.*shape \[4, 1\]"),
        ("metrics", lambda model, batch: {"loss": torch.ones(4)}, "must not have a metric called loss"),
        ("metrics", lambda model, batch: {"error": torch.ones(())}, r"one value per sample: error .* expected \[4\]"),
        ("metrics", lambda model, batch: {"error": 0.5}, "one value per sample: error .* float"),
    ],
)
def test_a_task_that_breaks_its_promise_is_told_how(train: Run, method: str, value: Any, expected: str) -> None:
    task = Regression()
    setattr(task, method, value)
    with pytest.raises(TaskError, match=expected):
        train(task=task)


def test_epochs_are_counted_in_samples_at_any_batch_size(train: Run) -> None:
    train(replace(TRAIN, epochs=2))
    events = train(replace(TRAIN, epochs=4, batch_size=8))
    assert events[0]["step"] == 12
    assert events[0]["total_steps"] == 12 + 2 * 3
    assert (events[-1]["step"], events[-1]["epochs"]) == (18, 4)


def test_to_resume_at_the_end_says_that_nothing_is_left(train: Run, capfd: pytest.CaptureFixture[str]) -> None:
    train(replace(TRAIN, epochs=2))
    assert losses(train(replace(TRAIN, epochs=1))) == {}


@pytest.mark.parametrize("asked", [True, False])
def test_curves_are_written_where_they_are_asked_for(asked: bool, train: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = train(replace(TRAIN, tensorboard=asked, steps=8, epochs=None))
    folder = tmp_path / "ml" / "output" / "tensorboard"
    assert folder.exists() == asked
    if asked:
        curves = EventAccumulator(str(folder))
        curves.Reload()
        told = {each.step: each.value for each in curves.Scalars("train/loss")}
        assert told == pytest.approx(losses(events), rel=1e-5)  # events have 6 digits
        assert {each.step for each in curves.Scalars("validation/error")} == {6, 8}
        assert len(curves.Scalars("split/backward")) == 8
