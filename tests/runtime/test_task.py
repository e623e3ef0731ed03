from pathlib import Path

import pytest

from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.task import load_task

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
        ("mine_module:Mien", {}, r"Mien in .*mine_module.py is not a Task \(Tasks there: Mine, Unfinished\)"),
        ("mine_module:Other", {}, "is not a Task"),
        ("mine_module:Mine", {"layrs": 5}, "code.args: Mine cannot be created: .*layrs"),
        ("mine_module:Unfinished", {}, "cannot be created: .*abstract"),
    ],
)
def test_what_is_wrong_is_named(reference: str, arguments: dict[str, int], expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        load_task(reference, arguments)


def test_an_import_error_of_the_users_module_is_its_own() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_task("broken_module:Mine", {})
