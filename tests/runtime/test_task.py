from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloudtrain_runtime import Task
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import (
    check_batch,
    checked_datasets,
    checked_loss,
    checked_metrics,
    checked_model,
    checked_optimizer,
    checked_schedule,
    load_task,
)

GOOD = """
from cloudtrain_runtime import Task

class Mine(Task):
    def __init__(self, layers=2): self.layers = layers
    def model(self): ...
    def datasets(self): ...
    def loss(self, model, batch): ...

class Unfinished(Task):
    def model(self): ...

class Other: ...

class Raises(Mine):
    def __init__(self): len(3)

class Assigned(Mine):
    loss = lambda self, batch: ...

class Decorated(Mine):
    @staticmethod
    def metrics(batch): ...
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_module.py").write_text(GOOD)
    (tmp_path / "broken_module.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_task_gets_its_arguments() -> None:
    assert load_task("mine_module:Mine", {"layers": 5}).layers == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reference", "arguments", "expected"),
    [
        ("nowhere:Mine", {}, "there is no module nowhere"),
        ("mine_module:Mien", {}, r"Mien in .*mine_module.py is not a Task \(Tasks there: Mine, Unfinished, "),
        ("mine_module:Other", {}, "is not a Task"),
        ("mine_module:Mine", {"layrs": 5}, "code.args: Mine cannot be created: .*layrs"),
        ("mine_module:Assigned", {}, r"mine_module.py:19:1  loss\(self, batch\): expected loss\(self, model, batch\)"),
        ("mine_module:Decorated", {}, r"mine_module.py:23:5  metrics\(batch\): expected metrics\(self, model, batch\)"),
        ("mine_module:Unfinished", {}, r"code.task: Unfinished in .*mine_module.py has no datasets\(\), loss\(\)"),
    ],
)
def test_what_is_wrong_is_named(reference: str, arguments: dict[str, int], expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        load_task(reference, arguments)


def test_an_import_error_of_the_users_module_is_its_own() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_task("broken_module:Mine", {})


def test_what_its_init_raises_is_its_own() -> None:
    with pytest.raises(TypeError, match="has no len"):
        load_task("mine_module:Raises", {})


class Good(Task):
    """A Task whose methods can be replaced."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def datasets(self) -> Any:
        return {"train": [1, 2]}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        mean: torch.Tensor = model(batch).mean()
        return mean


def returning(name: str, value: object) -> Task:
    """Return a Task with a method, written here, that returns this."""

    def replaced(self: Task, *arguments: Any) -> Any:
        return value(*arguments) if callable(value) and not isinstance(value, nn.Module) else value

    bad: type[Task] = type("Bad", (Good,), {name: replaced})
    return bad()


def _checks(task: Task, name: str) -> Any:
    """Ask for what a method returns as the entrypoint does."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.ones(3, 2)
    asked: dict[str, Callable[[], Any]] = {
        "model": lambda: checked_model(task),
        "datasets": lambda: checked_datasets(task),
        "loss": lambda: checked_loss(task, model, batch),
        "optimizer": lambda: checked_optimizer(task, model),
        "schedule": lambda: checked_schedule(task, optimizer),
        "metrics": lambda: checked_metrics(task, model, batch, 3),
        "collate": lambda: check_batch(task, task.collate([1])),
    }
    return asked[name]()


def _adam(_model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.Linear(2, 1).parameters())


def _plateau(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def _constant(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", None, "model() must return an nn.Module; it returned None"),
        ("model", [1], "model() must return an nn.Module; it returned a list"),
        ("datasets", [1], 'datasets() must return a mapping such as {"train": dataset}; it returned a list'),
        ("datasets", {"train": []}, "the train dataset is empty"),
        ("loss", 1.5, "loss() must return a scalar tensor, the mean over the batch's samples; it returned a float"),
        ("loss", torch.ones(3), "loss() must return a scalar tensor, the mean over the batch's samples; it returned a"),
        ("loss", torch.ones(()), "loss() must return a tensor that depends on the model's parameters; this one has no"),
        ("optimizer", 3, "optimizer() must return a torch.optim.Optimizer; it returned an int"),
        (
            "optimizer",
            _adam,
            "optimizer() must take the parameters of the model that it is given; 2 of 2 are not among",
        ),
        ("schedule", 3, "schedule() must return a torch.optim.lr_scheduler.LRScheduler or None; it returned an int"),
        ("schedule", _plateau, "schedule() must return a torch.optim.lr_scheduler.LRScheduler or None; ReduceLROn"),
        (
            "schedule",
            lambda _: _constant(_adam(nn.Linear(1, 1))),
            "schedule() must return a schedule of the optimizer that",
        ),
        ("metrics", [1], "metrics() must return a mapping from name to tensor; it returned a list"),
        ("metrics", {"loss": torch.ones(3)}, "metrics() must not have a metric called loss"),
        (
            "metrics",
            {"a": torch.ones(())},
            "metrics() must return one value per sample: a of a batch of 3 has the shape",
        ),
        ("collate", ["text"], "collate() must return tensors, or tuples, lists and mappings of them; there is none in"),
        ("collate", None, "there is none in what it returned, None"),
    ],
)
def test_a_wrong_return_is_told_with_the_methods_place(name: str, value: object, expected: str) -> None:
    with pytest.raises(TaskError) as caught:
        _checks(returning(name, value), name)
    told = str(caught.value)
    context, _, message = told.partition("  ")
    assert expected in message
    assert "\n" not in told
    line = returning.__code__.co_firstlineno + 3
    assert context == f"{_named(__file__)}:{line}:5"


def _named(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", None),
        ("schedule", _constant),
        ("metrics", {}),
        ("collate", {"x": [torch.ones(1)], "name": "a"}),
        ("collate", Path()),
        ("optimizer", lambda model: torch.optim.Adam([model.bias])),
    ],
)
def test_a_good_return(name: str, value: object) -> None:
    _checks(returning(name, value), name)


def test_an_evaluation_needs_no_gradient() -> None:
    with torch.no_grad():
        assert _checks(Good(), "loss").requires_grad is False


def test_the_entrypoints_own_methods_have_no_place() -> None:
    with pytest.raises(TaskError, match=r"^collate\(\) must return"):
        check_batch(Good(), ["text"])
