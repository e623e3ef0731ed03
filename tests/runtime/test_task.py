"""Loading a Task, and the checks of what its methods return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloudtrain_runtime import Task
from cloudtrain_runtime.contract.task_signatures import check_task
from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import (
    check_batch,
    checked_datasets,
    checked_evaluation,
    checked_loss,
    checked_metrics,
    checked_model,
    checked_optimizers,
    checked_schedule,
)
from cloudtrain_runtime.training.task_loading import load_task

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

class ByPosition(Mine):
    def __init__(self, a, /): ...
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_module.py").write_text(GOOD)
    (tmp_path / "broken_module.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_a_task_gets_its_arguments() -> None:
    assert load_task("mine_module:Mine", {"layers": 5}).layers == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reference", "arguments", "expected"),
    [
        ("nowhere:Mine", {}, "code.task: no such file: .*nowhere.py; code.task is module:Class"),
        ("mine_module:Mien", {}, r'mine_module.py has no class Mien; did you mean "Mine"\?'),
        ("mine_module:Other", {}, "mine_module.py:13:1  Other is not a Task; write class Other"),
        (
            "mine_module:Mine",
            {"layrs": 5},
            r'code.args.layrs: Mine takes no such argument; did you mean "layers"\?',
        ),
        (
            "mine_module:ByPosition",
            {"a": 5},
            "code.args.a: ByPosition takes no such argument; it takes none",
        ),
        (
            "mine_module:ByPosition",
            {},
            "code.args: ByPosition cannot be created: .*missing 1 required",
        ),
        (
            "mine_module:Assigned",
            {},
            r"mine_module.py:19:1  loss\(self, batch\): expected loss\(self, model, batch\)",
        ),
        (
            "mine_module:Decorated",
            {},
            r"mine_module.py:23:5  metrics\(batch\): expected metrics\(model, batch\)",
        ),
        (
            "mine_module:Unfinished",
            {},
            r"py:10:1  Unfinished has no datasets\(self\); .*; .*py:10:1  Unfinished has no loss\(self, model, batch\)",
        ),
    ],
)
def test_an_invalid_task_is_rejected_with_the_reason(
    reference: str, arguments: dict[str, int], expected: str
) -> None:
    with pytest.raises(TaskError, match=expected):
        load_task(reference, arguments)


def test_an_import_error_of_the_users_module_is_not_wrapped() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_task("broken_module:Mine", {})


def test_an_error_in_the_tasks_init_is_not_wrapped() -> None:
    with pytest.raises(TypeError, match="has no len"):
        load_task("mine_module:Raises", {})


HEAD = (
    "import abc, dataclasses, functools, cloudtrain_runtime\nfrom cloudtrain_runtime import Task\n"
)
MODEL = "    def model(self): ...\n"
DATASETS = "    def datasets(self): ...\n"
LOSS = "    def loss(self, model, batch): ...\n"
GOOD_BASE = f"class Base(Task):\n{MODEL}{DATASETS}{LOSS}"


def both(folder: Path, source: str) -> tuple[list[str], str]:
    """Return what the plan reports about the class Mine of a source, and the worker's error, if there is one."""
    name = f"source_{folder.name}"
    (folder / f"{name}.py").write_text(HEAD + source)
    planned = [found.message for found in check_task(folder, f"{name}:Mine", {})]
    try:
        load_task(f"{name}:Mine", {})
    except TaskError as error:
        return planned, str(error)
    return planned, ""


@pytest.mark.parametrize(
    "source",
    [
        f"class Mine(Task):\n{MODEL}{DATASETS}",
        f"class Mine(Task):\n{MODEL}{LOSS}    def dataset(self): ...\n",
        "class Mine: ...\n",
        "class Mime(Task): ...\n",
        *(
            f"class Mine(Task):\n{MODEL}{DATASETS}{LOSS}    {method}\n"
            for method in (
                "def loss(self, batch): ...",
                "def loss(self, batch, model): ...",
                "def loss(self, *, model, batch): ...",
                "def optimizer(self) -> int: ...",
                "def schedule(self, optimizer, warmup): ...",
                "def parallelize(self, model): ...",
                "def collate(self): ...",
                "def __init__(self, layers): ...",
            )
        ),
    ],
)
def test_the_worker_uses_the_words_of_the_plan(tmp_path: Path, source: str) -> None:
    planned, rejected = both(
        tmp_path, source.replace(LOSS, "", 1) if source.count("def loss") > 1 else source
    )
    assert planned
    assert all(message in rejected for message in planned), rejected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        *(
            (f"class Mine(Task):\n{MODEL}{DATASETS}    {method}\n", expected)
            for method, expected in (
                (
                    "@staticmethod\n    def loss(self, model, batch): ...",
                    "loss(self, model, batch): expected loss(model,",
                ),
                (
                    "@classmethod\n    def loss(cls, batch): ...",
                    "loss(cls, batch): expected loss(cls, model, batch)",
                ),
                (
                    "async def loss(self, model, batch): ...",
                    "async loss(self, model, batch): expected an ordinary",
                ),
                (
                    "@property\n    def loss(self): ...",
                    "loss is a property: expected the method loss(self, model, batch)",
                ),
                (
                    "def loss(self, model, batch): yield",
                    "loss(self, model, batch): it has a yield, so it returns a gen",
                ),
                ("loss = 3", "loss is an int: expected the method loss(self, model, batch)"),
            )
        ),
        (
            f"{GOOD_BASE}class Mine(Base):\n    @abc.abstractmethod\n    def width(self): ...\n",
            "Mine has no width()",
        ),
        (
            f"class Mixin:\n    def loss(self): ...\nclass Mine(Mixin, Task):\n{MODEL}{DATASETS}",
            "loss(self): expected loss(self, model, batch)",
        ),
        (
            f"class Mine(cloudtrain_runtime.Task):\n{MODEL}{DATASETS}",
            "Mine has no loss(self, model, batch); return a",
        ),
        (
            f"class Mine(cloudtrain_runtime.Task):\n{MODEL}{LOSS}    def dataset(self): ...\n",
            "a Task has no such method",
        ),
        (
            f"{GOOD_BASE}class Mine(Base): ...\nsetattr(Mine, 'collate', lambda self: 1)\n",
            "collate(self): expected collate(self, samples)",
        ),
        ("def make(): ...\nMine = make()\n", "has no class Mine; the file has no class"),
        ("class Mine(object): ...\n", "Mine is not a Task; write class Mine(Task)"),
    ],
)
def test_the_worker_checks_what_the_source_leaves_open(
    tmp_path: Path, source: str, expected: str
) -> None:
    planned, rejected = both(tmp_path, source)
    assert planned == []
    assert expected in rejected


@pytest.mark.parametrize(
    "source",
    [
        f"{GOOD_BASE}class Mine(Base):\n    def parallelize(self, model, mesh): yield model\n",
        f"class Mixin:\n{LOSS}class Mine(Mixin, Task):\n{MODEL}{DATASETS}",
        f"class Mixin(abc.ABC):\n{LOSS}class Left(Task):\n{MODEL}\nclass Mine(Mixin, Left):\n{DATASETS}",
        f"{GOOD_BASE}class Mine(Base):\n    def loss(self): ...\n    loss = Base.loss\n",
        f"{GOOD_BASE}class Mine(Base):\n    def loss(self): ...\nsetattr(Mine, 'loss', Base.loss)\n",
        f"{GOOD_BASE}class Mine(Base):\n    def loss(self): ...\nMine.loss = Base.loss\n",
        f"{GOOD_BASE}class Mine(Base):\n    def loss(self): ...\n    def __init__(self): self.loss = max\n",
        f"{GOOD_BASE}class Mine(Base):\n    if True:\n{LOSS.replace('    ', '        ', 1)}",
        f"{GOOD_BASE}class Mine(Base):\n    def __init__(self, layers): ...\n    __init__ = Base.__init__\n",
        f"{GOOD_BASE}class Mine(Base):\n    def __new__(cls): return Base()\n    def __init__(self, layers): ...\n",
        f"{GOOD_BASE}@dataclasses.dataclass\nclass Mine(Base):\n    layers: int = 2\n",
        f"class Mine:\n    def loss(self): ...\n{GOOD_BASE}Mine = Base\n",
        f"{GOOD_BASE}def __getattr__(name): return Base\n",
        f"{GOOD_BASE}globals()['Mine'] = Base\n",
        f"{GOOD_BASE}def bind():\n    global Mine\n    Mine = Base\nbind()\n",
    ],
)
def test_what_the_worker_accepts_the_plan_accepts(tmp_path: Path, source: str) -> None:
    assert both(tmp_path, source) == ([], "")


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
    """Return a Task with a method, defined in this file, that returns a value or the result of a function."""

    def replaced(self: Task, *arguments: Any) -> Any:
        return value(*arguments) if callable(value) and not isinstance(value, nn.Module) else value

    bad: type[Task] = type("Bad", (Good,), {name: replaced})
    return bad()


def call_checked(task: Task, name: str) -> Any:
    """Call a method of a Task and check its result, as the training loop does; return the result."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.ones(3, 2)
    calls: dict[str, Callable[[], Any]] = {
        "model": lambda: checked_model(task),
        "datasets": lambda: checked_datasets(task),
        "loss": lambda: checked_loss(task, model, batch),
        "optimizer": lambda: checked_optimizers(task, model)[""],
        "schedule": lambda: checked_schedule(task, optimizer),
        "metrics": lambda: checked_metrics(task, model, batch, 3),
        "after_evaluation": lambda: checked_evaluation(task, "validation", {"loss": 1.0}),
        "collate": lambda: check_batch(task, task.collate([1])),
    }
    return calls[name]()


def other_adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of another model's parameters."""
    del model
    return torch.optim.Adam(nn.Linear(2, 1).parameters())


def constant(optimizer: torch.optim.Optimizer) -> object:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", None, "model() must return an nn.Module; it returned None"),
        ("model", [1], "model() must return an nn.Module; it returned a list"),
        (
            "datasets",
            [1],
            'datasets() must return a mapping such as {"train": dataset}; it returned a list',
        ),
        ("datasets", {"train": []}, "the train dataset is empty"),
        (
            "loss",
            1.5,
            "loss() must return a scalar tensor, the mean over the batch's samples; it returned a float",
        ),
        (
            "loss",
            (3.0, 4),
            "loss() must return a scalar tensor, the sum, as the first of a pair; it returned a float",
        ),
        (
            "loss",
            (torch.ones(()), "4"),
            "loss() must return a number, or a scalar tensor, as the count; it returned a str",
        ),
        (
            "loss",
            torch.ones(3),
            "loss() must return a scalar tensor, the mean over the batch's samples; it returned a",
        ),
        (
            "loss",
            torch.ones(()),
            "loss() must return a tensor that depends on the model's parameters; this one has no",
        ),
        ("optimizer", 3, "optimizer() must return a torch.optim.Optimizer; it returned an int"),
        (
            "optimizer",
            other_adam,
            "optimizer() must take the parameters of the model that it is given; 2 of 2 are not among",
        ),
        (
            "schedule",
            3,
            "schedule() must return a torch.optim.lr_scheduler.LRScheduler or None; it returned an int",
        ),
        (
            "schedule",
            lambda _: constant(other_adam(nn.Linear(1, 1))),
            "schedule() must return a schedule of the optimizer that",
        ),
        ("metrics", [1], "metrics() must return a mapping from name to tensor; it returned a list"),
        ("metrics", {"loss": torch.ones(3)}, "metrics() must not have a metric called loss"),
        (
            "metrics",
            {"a": torch.ones(())},
            "metrics() must return one value per sample: a of a batch of 3 has the shape",
        ),
        (
            "after_evaluation",
            0.5,
            "after_evaluation() must return a mapping from name to number; it returned a float",
        ),
        (
            "after_evaluation",
            {"loss": 1.0},
            "after_evaluation() must not return loss: that metric has a value already",
        ),
        (
            "after_evaluation",
            {"f1": torch.ones(2)},
            "after_evaluation() must return a number, or a scalar tensor, for f1; it returned torch.float32 of the",
        ),
        (
            "collate",
            ["text"],
            "collate() must return tensors, or tuples, lists and mappings of them; there is none in",
        ),
        ("collate", None, "there is none in what it returned, None"),
    ],
)
def test_an_invalid_result_is_reported_with_its_location(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(TaskError) as caught:
        call_checked(returning(name, value), name)
    text = str(caught.value)
    location, _, message = text.partition("  ")
    assert expected in message
    assert "\n" not in text
    line = returning.__code__.co_firstlineno + 3
    assert location == f"{displayed(__file__)}:{line}:5"


def displayed(file: str) -> str:
    """Return a path as messages show it: relative to the working folder where possible."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule", None),
        ("schedule", constant),
        ("metrics", {}),
        ("collate", {"x": [torch.ones(1)], "name": "a"}),
        ("collate", Path()),
        ("optimizer", lambda model: torch.optim.Adam([model.bias])),
    ],
)
def test_a_valid_result_is_accepted(name: str, value: object) -> None:
    call_checked(returning(name, value), name)


def test_a_model_with_frozen_parameters_only_is_named() -> None:
    model = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(TaskError, match="every parameter of the model is frozen"):
        checked_loss(Good(), model, torch.ones(3, 2))


def test_an_evaluation_needs_no_gradient() -> None:
    with torch.no_grad():
        assert call_checked(Good(), "loss").value.requires_grad is False


def test_an_error_of_a_default_method_has_no_location() -> None:
    with pytest.raises(TaskError, match=r"^collate\(\) must return"):
        check_batch(Good(), ["text"])
