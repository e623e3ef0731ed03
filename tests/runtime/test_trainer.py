"""The training loop in one process: steps, evaluation, checkpoints, resume, early stopping and errors of a Task."""

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
from cloudtrain_runtime.training.best_checkpoint import EarlyStoppingState
from cloudtrain_runtime.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

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
    """Fit a line through 22 points, with dropout so that the losses depend on random states."""

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
def train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that trains in this process and returns the events."""
    monkeypatch.setenv("CLOUDTRAIN_LOG_EVERY_STEPS", "1")
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path / "ml"))
    (tmp_path / "ml" / "output").mkdir(parents=True)

    def run(config: TrainConfig = TRAIN, *, task: Task | None = None, **checkpoint: Any) -> Events:
        saving = {
            "uri": str(tmp_path / "checkpoints"),
            "every_seconds": None,
            "every_steps": None,
            "keep": 3,
        }
        folders = {"model_dir": tmp_path / "model", "output_dir": tmp_path / "output"}
        own: Context = replace(
            read_context({}), seed=config.seed, train=config, run="demo", **folders
        )
        monkeypatch.setattr(
            run_context, "_current", own
        )  # context() caches the first context of a process
        capfd.readouterr()
        with process_group(own):
            settings = CheckpointConfig(**{**saving, "resume": "auto", **checkpoint})
            trainer = Trainer(task or Regression(), config, settings, own)
            try:
                trainer.run()
            finally:
                trainer.checkpoints.wait_for_save()  # a save must not continue while the next start resumes
        events = [parse_event(line) for line in capfd.readouterr().out.splitlines()]
        return [event for event in events if event is not None]

    return run


def losses(events: Events) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def weights(tmp_path: Path) -> Any:
    return torch.load(tmp_path / "model" / "model.pt", weights_only=True)


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def test_a_run_reports_its_events_and_writes_a_model(train: Run, tmp_path: Path) -> None:
    events = train(every_steps=5)
    names = [event["event"] for event in events]
    assert names[0] == "started"
    assert names[-1] == "finished"
    assert (
        events[0]["total_steps"] == 12
    )  # 22 samples, 4 a step: 6 steps an epoch, the last with 2 samples
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [5, 10, 12]
    evaluated = [
        (event["split"], event["step"]) for event in events if event["event"] == "evaluation"
    ]
    assert evaluated == [("validation", 6), ("validation", 12), ("test", 12)]
    final = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert set(final["test"]) == {"loss", "error"}
    model = Regression().model()
    model.load_state_dict(weights(tmp_path))
    inputs, targets = Regression().datasets()["test"].tensors  # type: ignore[attr-defined]
    assert float(F.mse_loss(model.eval()(inputs), targets)) == pytest.approx(
        final["test"]["loss"], rel=1e-5
    )


class _Killed(Exception):  # noqa: N818 (it simulates SIGKILL and is not an error)
    pass


class KilledAfter(Regression):
    """Simulates a kill after `calls` calls of its loss."""

    def __init__(self, calls: int) -> None:
        self.remaining = calls

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            self.remaining -= 1
            if self.remaining < 0:
                raise _Killed
        return super().loss(model, batch)


@pytest.mark.parametrize("killed_at", [1, 4, 6, 7, 11])
def test_resume_after_a_kill_is_bit_exact(train: Run, tmp_path: Path, killed_at: int) -> None:
    uninterrupted = train(uri=str(tmp_path / "uninterrupted"))
    expected = weights(tmp_path)
    with pytest.raises(_Killed):
        train(task=KilledAfter(killed_at), every_steps=1)
    rest = train(every_steps=1)
    assert rest[0]["step"] == killed_at
    assert {
        step: loss for step, loss in losses(uninterrupted).items() if step > killed_at
    } == losses(rest)
    assert equal(weights(tmp_path), expected)


class Unusual(KilledAfter):
    """A schedule with milestones (its state has integer keys), a tensor as learning rate, and an unused layer."""

    def model(self) -> nn.Module:
        model = super().model()
        model.unused = nn.Linear(
            2, 2
        )  # never has a gradient, so the optimizer never has a state for it
        model.forward = lambda x: nn.Sequential.forward(model[:3], x)  # type: ignore[index]
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 8], gamma=0.1)


def test_unusual_optimizers_and_schedules_resume_exactly(train: Run, tmp_path: Path) -> None:
    uninterrupted = train(task=Unusual(1000), uri=str(tmp_path / "uninterrupted"))
    with pytest.raises(_Killed):
        train(task=Unusual(5), every_steps=1)
    rest = train(task=Unusual(1000), every_steps=1)
    assert {step: loss for step, loss in losses(uninterrupted).items() if step > 5} == losses(rest)
    rates = [event["learning_rate"] for event in rest if event["event"] == "step"]
    assert rates[0] == pytest.approx(0.005)
    assert rates[-1] == pytest.approx(0.0005)


def test_resuming_a_finished_run_takes_no_steps(train: Run, tmp_path: Path) -> None:
    train()
    expected = weights(tmp_path)
    again = train()
    assert losses(again) == {}
    assert again[0]["resumed_from"].endswith("step-00000012")
    assert equal(weights(tmp_path), expected)


def test_accumulation_gives_the_same_losses(train: Run, tmp_path: Path) -> None:
    class Plain(Regression):
        def model(self) -> nn.Module:
            return nn.Linear(3, 1)

    single = train(replace(TRAIN, batch_size=8), task=Plain(), uri=str(tmp_path / "a"))
    accumulated = train(
        replace(TRAIN, batch_size=2, accumulate=4), task=Plain(), uri=str(tmp_path / "b")
    )
    assert losses(single).keys() == losses(accumulated).keys()
    assert list(losses(accumulated).values()) == pytest.approx(
        list(losses(single).values()), rel=1e-5
    )


def test_steps_may_end_in_the_middle_of_an_epoch(train: Run) -> None:
    events = train(replace(TRAIN, epochs=None, steps=8))
    assert max(losses(events)) == 8
    assert events[-1]["epochs"] == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains(train: Run, precision: str) -> None:
    events = train(replace(TRAIN, precision=precision, epochs=6))
    values = list(losses(events).values())
    assert values[-1] < values[0]


def test_clipping_reports_the_gradient_norm(train: Run) -> None:
    events = train(replace(TRAIN, clip_grad_norm=0.01))
    assert all(event["grad_norm"] > 0 for event in events if event["event"] == "step")


def test_evaluation_runs_every_n_steps_and_at_the_end(train: Run) -> None:
    events = train(replace(TRAIN, evaluate_every_steps=5))
    steps = [
        event["step"]
        for event in events
        if event["event"] == "evaluation" and event["split"] == "validation"
    ]
    assert steps == [5, 10, 12]


def test_early_stopping_ends_a_run_after_its_patience(train: Run) -> None:
    rule = EarlyStopping("validation/error", patience=2, min_delta=100.0, mode="min")
    events = train(replace(TRAIN, epochs=50, early_stopping=rule))
    assert (
        max(losses(events)) == 3 * 6
    )  # the first evaluation is the best, and two more do not improve on it
    state = EarlyStoppingState()
    assert [
        state.should_stop(replace(rule, min_delta=0.0, mode="max"), value) for value in (1, 2, 2, 1)
    ] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("killed_at", [6, 7, 12, 13])
def test_patience_counts_each_evaluation_once_across_kills(train: Run, killed_at: int) -> None:
    """Kill the run immediately before and after the evaluation at the end of an epoch of 6 steps."""
    rule = EarlyStopping("validation/error", patience=2, min_delta=100.0, mode="min")
    config = replace(TRAIN, epochs=50, early_stopping=rule)
    with pytest.raises(_Killed):
        train(config, task=KilledAfter(killed_at), every_steps=1)
    assert max(losses(train(config, every_steps=1))) == 3 * 6
    assert losses(train(config, every_steps=1)) == {}  # a resume of the finished run takes no steps


def test_an_evaluation_that_a_stop_skipped_runs_on_resume(train: Run, tmp_path: Path) -> None:
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
    resumed = train(config)
    assert resumed[-1]["event"] == "finished"
    assert resumed[-1]["start_step"] == 5
    (rest,) = [event for event in resumed if event["event"] == "profile"]
    assert (rest["first_step"], rest["last_step"]) == (6, 8)


def test_a_profile_that_cannot_be_written_ends_no_run(train: Run, tmp_path: Path) -> None:
    (tmp_path / "output").write_text("no folder")
    events = train(replace(TRAIN, profile_at=3, profile_steps=2))
    assert events[-1]["event"] == "finished"
    assert not any(event["event"] == "profile" for event in events)


def test_a_stop_notice_saves_and_ends_the_run(train: Run, tmp_path: Path) -> None:
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


def test_a_nonfinite_loss_is_null_in_events(train: Run) -> None:
    class Broken(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * float("nan")

    events = train(
        replace(TRAIN, epochs=None, steps=2, export_nonfinite=True), task=Broken(), every_steps=1
    )
    assert set(losses(events).values()) == {None}
    assert not any(event["event"] == "checkpoint" for event in events), (
        "nonfinite weights were saved"
    )
    with pytest.raises(
        JobError, match=r"not finite at 3 logged steps in a row, the last is step 3"
    ):
        train(task=Broken())


@pytest.mark.parametrize("length", [{"epochs": 2}, {"epochs": None, "steps": 9}])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_jobs_learning_rate_continues_after_a_resume(
    train: Run, tmp_path: Path, schedule: str, length: dict[str, int | None]
) -> None:
    class Plain(KilledAfter):
        def schedule(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002 (the Task's signature)
            return None

    config = replace(TRAIN, schedule=schedule, warmup_steps=3, **length)  # type: ignore[arg-type]
    uninterrupted = train(config, task=Plain(1000), uri=str(tmp_path / "uninterrupted"))
    with pytest.raises(_Killed):
        train(config, task=Plain(5), every_steps=1)
    rest = train(config, task=Plain(1000), every_steps=1)
    expected, found = rates(uninterrupted), rates(rest)
    steps = max(expected)
    assert found == {step: rate for step, rate in expected.items() if step > 5}
    assert losses(rest) == {step: loss for step, loss in losses(uninterrupted).items() if step > 5}
    # A step's event has the learning rate of the next step.
    assert [expected[step] for step in (1, 2, 3)] == pytest.approx([0.05 * 2 / 3, 0.05, 0.05])
    assert expected[steps] == pytest.approx(0.0, abs=1e-9)
    assert steps == (9 if length["epochs"] is None else 12)


def rates(events: Events) -> dict[int, float]:
    return {event["step"]: event["learning_rate"] for event in events if event["event"] == "step"}


def test_a_task_without_training_data_is_rejected(train: Run) -> None:
    class WithoutTrainSplit(Regression):
        def datasets(self) -> Mapping[str, Dataset[Any]]:
            return {"test": super().datasets()["test"]}

    with pytest.raises(
        TaskError, match=r"must have train, and may have validation and test; it has test"
    ):
        train(task=WithoutTrainSplit())


def test_an_unknown_early_stopping_metric_is_rejected(train: Run) -> None:
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
        (
            "loss",
            lambda model, batch: model(batch[0]),
            r"must return a scalar tensor.*shape \[4, 1\]",
        ),
        (
            "metrics",
            lambda model, batch: {"loss": torch.ones(4)},
            "must not have a metric called loss",
        ),
        (
            "metrics",
            lambda model, batch: {"error": torch.ones(())},
            r"one value per sample: error .* expected \[4\]",
        ),
        ("metrics", lambda model, batch: {"error": 0.5}, "one value per sample: error .* float"),
    ],
)
def test_an_invalid_result_of_a_task_method_is_an_error(
    train: Run, method: str, value: Any, expected: str
) -> None:
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


def test_resuming_with_fewer_epochs_takes_no_steps(train: Run) -> None:
    train(replace(TRAIN, epochs=2))
    assert losses(train(replace(TRAIN, epochs=1))) == {}


@pytest.mark.parametrize("is_requested", [True, False])
def test_curves_are_written_only_on_request(is_requested: bool, train: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = train(replace(TRAIN, tensorboard=is_requested, steps=8, epochs=None))
    folder = tmp_path / "ml" / "output" / "tensorboard"
    assert folder.exists() == is_requested
    if is_requested:
        curves = EventAccumulator(str(folder))
        curves.Reload()
        curve = {each.step: each.value for each in curves.Scalars("train/loss")}
        assert curve == pytest.approx(losses(events), rel=1e-5)  # events have 6 digits
        assert {each.step for each in curves.Scalars("validation/error")} == {6, 8}
        assert len(curves.Scalars("train/backward_seconds")) == 8
