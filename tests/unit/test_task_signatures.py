"""The check of a Task's source: common mistakes are reported, and nothing that the source does not prove.

tests/runtime/test_task.py has the mistakes that only the worker reports, and compares both checks.
"""

import ast
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.jobs import REPOSITORY

from cloudtrain_runtime.contract.task_methods import TASK_METHODS
from cloudtrain_runtime.contract.task_signatures import check_task, has_method

HEAD = "from cloudtrain_runtime import Task\n"
MODEL = "    def model(self): return 1\n"
DATASETS = "    def datasets(self): return {}\n"
LOSS = "    def loss(self, model, batch): return 1\n"
COMPLETE = f"{HEAD}class Mine(Task):\n{MODEL}{DATASETS}{LOSS}"


def found(
    folder: Path, source: str, /, arguments: Mapping[str, Any] | None = None, **others: str
) -> list[str]:
    """Write modules (`pkg__base` is pkg/base.py); return the problems of mine:Mine."""
    for name, text in {"mine": source, **others}.items():
        path = folder / (name.replace("__", "/", 1) + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return [str(each) for each in check_task(folder, "mine:Mine", arguments or {})]


def test_the_table_of_methods_equals_the_class() -> None:
    """Compare required methods, and the names and order of all parameters."""
    pytest.importorskip("torch")
    from cloudtrain_runtime import Task

    own = {
        name: method for base in Task.__mro__[:2] for name, method in vars(base).items()
    }  # Task and ServedTask
    public = {
        name: method
        for name, method in own.items()
        if inspect.isfunction(method) and name[0] != "_"
    }
    assert list(TASK_METHODS) == list(public)
    for name, method in public.items():
        assert tuple(inspect.signature(method).parameters) == (
            "self",
            *TASK_METHODS[name].parameters,
        ), name
    assert {
        name for name, method in TASK_METHODS.items() if method.is_required
    } == Task.__abstractmethods__


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("def loss(self, batch): return 1", "loss(self, batch): expected loss(self, model, batch)"),
        (
            "def loss(model, batch): return 1",
            "loss(model, batch): expected loss(self, model, batch)",
        ),
        (
            "def loss(self, batch, model): return 1",
            "loss(self, batch, model): expected loss(self, model, batch)",
        ),
        (
            "def loss(self, model, batch, step): return 1",
            "loss(self, model, batch, step): expected loss(self, model",
        ),
        (
            "def loss(self, model, batch, *, step): return 1",
            "loss(self, model, batch, *, step): expected loss(self,",
        ),
        (
            "def loss(self, *, model, batch): return 1",
            "loss(self, *, model, batch): expected loss(self, model, batch)",
        ),
        (
            "def loss(self, m: 'x' = 1) -> int: return 1",
            "loss(self, m): expected loss(self, model, batch)",
        ),
    ],
)
def test_a_wrong_loss(tmp_path: Path, line: str, expected: str) -> None:
    (problem,) = found(tmp_path, f"{HEAD}class Mine(Task):\n{MODEL}{DATASETS}    {line}\n")
    place, _, message = problem.partition("  ")
    assert message.startswith(expected)
    assert place == "mine.py:5:5"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("def optimizer(self): return 1", "optimizer(self): expected optimizer(self, model)"),
        ("def schedule(self): return 1", "schedule(self): expected schedule(self, optimizer)"),
        (
            "def metrics(self, batch): return {}",
            "metrics(self, batch): expected metrics(self, model, batch)",
        ),
        ("def collate(self): return 1", "collate(self): expected collate(self, samples)"),
        (
            "def parallelize(self, model): return 1",
            "parallelize(self, model): expected parallelize(self, model, mesh)",
        ),
        (
            "def pipeline(self, model): return 1",
            "pipeline(self, model): expected pipeline(self, model, stages)",
        ),
        (
            "def optimiser(self, m): return 1",
            'optimiser(self, m): a Task has no such method; did you mean "optimizer"?',
        ),
        ("def SCHEDULE(self, o): return 1", 'a Task has no such method; did you mean "schedule"?'),
        ("def metric(self, m, b): return {}", 'a Task has no such method; did you mean "metrics"?'),
        ("def schedular(self, o): return 1", 'a Task has no such method; did you mean "schedule"?'),
        ("def scheduler(self, o): return 1", 'a Task has no such method; did you mean "schedule"?'),
        ("def after_step(self): pass", "after_step(self): expected after_step(self, model)"),
        (
            "def after_evaluation(self, metrics): pass",
            "after_evaluation(self, metrics): expected after_evaluation(self, split, metrics)",
        ),
        (
            "def after_steps(self, model): pass",
            'a Task has no such method; did you mean "after_step"?',
        ),
        (
            "def training_step(self, model, batch): pass",
            "training_step(self, model, batch): expected training_step(self, model, batch, update)",
        ),
        (
            "def trainingstep(self, m, b, u): pass",
            'a Task has no such method; did you mean "training_step"?',
        ),
        ("def sampler(self): return None", "sampler(self): expected sampler(self, dataset)"),
        (
            "def samplers(self, dataset): return None",
            'a Task has no such method; did you mean "sampler"?',
        ),
        (
            "def parallelise(self, m, mesh): return 1",
            'a Task has no such method; did you mean "parallelize"?',
        ),
    ],
)
def test_a_wrong_optional_method(tmp_path: Path, method: str, expected: str) -> None:
    (problem,) = found(tmp_path, f"{COMPLETE}    {method}\n")
    assert problem.startswith("mine.py:6:5  ")
    assert expected in problem


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            MODEL + DATASETS,
            ["mine.py:2:1  Mine has no loss(self, model, batch); return a scalar tensor"],
        ),
        (
            LOSS,
            [
                "Mine has no model(self); return an nn.Module",
                "Mine has no datasets(self); return a mapping such as",
            ],
        ),
        (
            MODEL + LOSS + "    def dataset(self): return {}\n",
            ["mine.py:5:5  dataset(self): a Task has no such method"],
        ),
    ],
)
def test_a_missing_method(tmp_path: Path, body: str, expected: list[str]) -> None:
    problems = found(tmp_path, f"{HEAD}class Mine(Task):\n{body}")
    assert len(problems) == len(expected)
    assert all(part in text for part, text in zip(expected, problems, strict=True)), problems


def test_a_task_may_lack_an_optional_method(tmp_path: Path) -> None:
    own = "    def pipeline(self, model, stages): return [model]\n"
    (tmp_path / "mine.py").write_text(
        f"{COMPLETE}class Own(Mine):\n{own}class Heir(Own): ...\nimport elsewhere\nclass Unknown(elsewhere.Task): ...\n"
    )
    found = {
        name: has_method(tmp_path, f"mine:{name}", "pipeline")
        for name in ("Mine", "Own", "Heir", "Unknown", "No")
    }
    assert found == {"Mine": False, "Own": True, "Heir": True, "Unknown": None, "No": None}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("class Other: ...", "code.task: mine.py has no class Mine; one of: Other"),
        ("class Mime: ...", 'code.task: mine.py has no class Mine; did you mean "Mime"?'),
        ("class MINE: ...", 'code.task: mine.py has no class Mine; did you mean "MINE"?'),
        ("x = 1", "code.task: mine.py has no class Mine; the file has no class"),
        ("class Mine(:", "mine.py:1:12  is not valid Python: invalid syntax"),
        ("class Mine:\n  x = (1\n", "mine.py:2:7  is not valid Python: '(' was never closed"),
        (
            "class Mine: ...",
            "mine.py:1:1  Mine is not a Task; write class Mine(Task), with from cloudtrain_runtime",
        ),
        ("class Base: ...\nclass Mine(Base): ...", "mine.py:2:1  Mine is not a Task"),
    ],
)
def test_a_class_that_is_no_task(tmp_path: Path, source: str, expected: str) -> None:
    (problem,) = found(tmp_path, source)
    assert problem.startswith(expected) or (expected in problem and expected[0].isupper())


def test_a_missing_module_names_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(COMPLETE)
    (problem,) = check_task(tmp_path, "digit:Mine", {})
    assert (
        str(problem)
        == f'code.task: no such file: {tmp_path / "digit.py"}; did you mean "digits.py"?'
    )
    (problem,) = check_task(tmp_path, "no.where:Mine", {})
    assert str(problem).startswith(f"code.task: no such file: {tmp_path / 'no' / 'where.py'}; ")


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    source = (
        f"{HEAD}class Mine(Task):\n    def model(self, x): return 1\n    def loss(self): return 1\n"
    )
    assert found(tmp_path, source, {"layers": 1}) == [
        "code.args.layers: Mine takes no such argument; it takes none: remove args",
        'mine.py:2:1  Mine has no datasets(self); return a mapping such as {"train": dataset}',
        "mine.py:3:5  model(self, x): expected model(self)",
        "mine.py:4:5  loss(self): expected loss(self, model, batch)",
    ]


@pytest.mark.parametrize(
    ("init", "arguments", "expected"),
    [
        ("def __init__(self, a, b=1, *, c, d=2): ...", {"a": 1, "c": 2}, []),
        (
            "def __init__(self, a, b=1, *, c, d=2): ...",
            {},
            ["Mine needs the argument a", "Mine needs the argument c"],
        ),
        (
            "def __init__(self, layers=2): ...",
            {"layrs": 1},
            ["code.args.layrs: Mine takes no such argument; did you"],
        ),
        (
            "def __init__(self, a, **others): ...",
            {"x": 1},
            ["code.args: Mine needs the argument a; args: {a: ...}"],
        ),
        (
            "def __init__(self, *args): ...",
            {"args": 1},
            ["code.args.args: Mine takes no such argument; it takes none"],
        ),
        (
            "def __init__(self, a, /): ...",
            {"a": 1},
            ["code.args.a: Mine takes no such argument; it takes none"],
        ),
        ("def __init__(self, /, a): ...", {"a": 1}, []),
        ("def __init__(self, **anything): ...", {"x": 1}, []),
        ("@wrapped\n    def __init__(self): ...", {"x": 1}, []),
        ("def __new__(cls, **anything): ...", {"x": 1}, []),
        ("__init__ = make()", {"x": 1}, []),
    ],
)
def test_arguments_must_match_the_constructor(
    tmp_path: Path, init: str, arguments: dict[str, int], expected: list[str]
) -> None:
    problems = found(tmp_path, f"{COMPLETE}    {init}\n", arguments)
    assert len(problems) == len(expected), problems
    assert all(part in text for part, text in zip(expected, problems, strict=True)), problems


BASE = f"{HEAD}class Base(Task):\n    def __init__(self, layers): ...\n{MODEL}    def loss(self, batch): return 1\n"


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("from base import Base", {"base": BASE}),
        ("from base import Base as B", {"base": BASE}),
        ("from pkg.base import Base", {"pkg__base": BASE}),
        ("from pkg import Base", {"pkg____init__": "from .base import Base", "pkg__base": BASE}),
        ("from between import Base", {"between": "from base import Base", "base": BASE}),
    ],
)
def test_bases_in_the_code_folder_are_followed(
    tmp_path: Path, first: str, others: dict[str, str]
) -> None:
    source = f"{first}\nclass Mine({first.rsplit(maxsplit=1)[-1]}):\n{DATASETS}"
    where = next(name.replace("__", "/") for name, text in others.items() if text == BASE)
    assert found(tmp_path, source, {"layrs": 1}, **others) == [
        'code.args.layrs: Mine takes no such argument; did you mean "layers"?',
        "code.args: Mine needs the argument layers; args: {layers: ...}",
        f"{where}.py:5:5  loss(self, batch): expected loss(self, model, batch)",
    ]


def test_the_nearest_class_decides(tmp_path: Path) -> None:
    head = f"{HEAD}class Base(Task):\n    def loss(self): return 1\n{MODEL}{DATASETS}\n"
    right = "class Right(Base):\n    def loss(self, model, batch): return 1\n"
    assert found(tmp_path, f"{head}{right}class Mine(Right): ...\n") == []
    assert found(tmp_path, f"{head}{right}class Mine(Base): ...\n") == [
        "mine.py:3:5  loss(self): expected loss(self, model, batch)"
    ]


def test_a_broken_module_of_a_base(tmp_path: Path) -> None:
    (problem,) = found(
        tmp_path, "from base import Base\nclass Mine(Base): ...", base="class Base(:"
    )
    assert problem.startswith("base.py:1:12  is not valid Python: invalid syntax; fix it")


WRONG = "    def loss(self): return 1\n"


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import Mine",
        "from elsewhere import *",
        "Mine = make()",
        "globals()['Mine'] = 1",
        "def __getattr__(name): ...",
        "try:\n    from a import Mine\nexcept ImportError:\n    from b import Mine",
        f"from elsewhere import Base\nclass Mine(Base):\n{WRONG}",
        f"import elsewhere\nclass Mine(elsewhere.Base):\n{WRONG}",
        f"class Mine(make()):\n{WRONG}",
        f"class Mine(*bases):\n{WRONG}",
        f"class Mine(Mine):\n{WRONG}",
        f"from mine import Mine as Base\nclass Mine(Base):\n{WRONG}",
        f"from .. import outside\nclass Mine(outside.Base):\n{WRONG}",
        f"from types import Base\nclass Mine(Base):\n{WRONG}",
        f"{HEAD}from elsewhere import Mixin\nclass Mine(Mixin, Task):\n{WRONG}",
        f"{HEAD}class Mixin: ...\nclass Mine(Mixin, Task):\n{WRONG}",
        f"import cloudtrain_runtime\nclass Mine(cloudtrain_runtime.Task):\n{WRONG}",
        f"from elsewhere import Other\nclass Mine(Other):\n    def __init__(self, layers): ...\n{WRONG}",
        f"{HEAD}class Base(Task):\n    def __init_subclass__(cls): cls.loss = other\nclass Mine(Base):\n{WRONG}",
        f"{HEAD}class Mine(Task):\n{WRONG}vars()['Mine'] = other\n",
        f"{HEAD}from elsewhere import Mixin\nclass Mine(Task, Mixin): ...",
        f"{HEAD}@register\nclass Mine(Task):\n{WRONG}",
        f"{HEAD}class Mine(Task, metaclass=Registered):\n{WRONG}",
        f"{HEAD}class Mine(Task):\n    def __init_subclass__(cls): ...\n{WRONG}",
        f"{HEAD}class Mine(Task):\n    exec('def model(self): ...')\n{WRONG}",
        f"{HEAD}class Mine(Task):\n{WRONG}setattr(Mine, 'loss', other)\n",
        f"try:\n    {HEAD}except ImportError:\n    Task = object\nclass Mine(Task):\n{WRONG}",
        f"{HEAD}class Mine(Task):\n{WRONG}def wrap():\n    global Mine\n    Mine = 1\n",
        f"from base import Base\nBase = 1\nclass Mine(Base):\n{WRONG}",
        f"{HEAD}Task = patched(Task)\nclass Mine(Task):\n{WRONG}",
    ],
)
def test_an_unknown_class_has_no_problems(tmp_path: Path, source: str) -> None:
    (tmp_path / "types.py").write_text("class Base: ...")
    assert found(tmp_path, source) == []


@pytest.mark.parametrize(
    "body",
    [
        "def loss(self, model, batch, step=0): return 1",
        "def loss(self, *args): return 1",
        "def loss(self, model, *args, **kwargs): return 1",
        "def loss(*args): return 1",
        "def loss(self, net, data, /): return 1",
        "def loss(self, model, batch, *, step=1): return 1",
        "@staticmethod\n    def loss(model, batch): return 1",
        "@classmethod\n    def loss(cls, model, batch): return 1",
        "@typing.override\n    def loss(self, model, batch): return 1",
        "@torch.compile\n    def loss(self): return 1",
        "@wrapped(1)\n    def loss(self): return 1",
        "loss = make()",
        "loss = other = make()",
        "from elsewhere import loss",
        "if big:\n        def loss(self): return 1\n    else:\n        from elsewhere import loss",
        "def loss(self): return 1\n    loss = wrapped(loss)",
        "def loss(self): return 1\n    def loss(self, model, batch): return 1",
        "class loss: ...",
        "def loss(self): return 1\n    def __init__(self): self.loss = make()",
        "async def loss(self, model, batch): return 1",
        "@property\n    def loss(self): return 1",
        "def loss(self, model, batch): ...",
        "def loss(self, model, batch): raise NotImplementedError",
        "def loss(self, model, batch):\n        while True: ...",
        "def loss(self, model, batch): sys.exit(3)",
        "def loss(self, model, batch):\n        with a:\n            if b: return 1",
        "def loss(self, model, batch): return (lambda: (yield))",
    ],
)
def test_a_correct_or_unknown_loss(tmp_path: Path, body: str) -> None:
    assert found(tmp_path, f"{HEAD}class Mine(Task):\n{MODEL}{DATASETS}    {body}\n") == []


@pytest.mark.parametrize(
    "rest",
    [
        "    def schedule(self, optimizer): ...\n",
        "    def parallelize(self, model, mesh): yield model\n",
        "    def pipeline(self, model, stages): yield model\n",
        "    def metric(self): return 1\n    def metrics(self, model, batch): return {'a': self.metric()}\n",
        "    def schedular(self): return 1\n    def other(self): return self.schedular()\n",
        "    def schedular(self): return 1\n    def other(self): return getattr(self, 'schedular')()\n",
        "    @property\n    def metric(self): return 1\n",
        "    def _optimizer(self): return 1\n",
        "    def loss_of(self): return 1\n    def models(self): return 1\n    def dataset(self): return 1\n",
        "    def prediction(self): return 1\n",
        "    def matrices(self): return 1\n    def collect(self): return 1\n",
        "Mine.loss = other\n",
    ],
)
def test_a_correct_task(tmp_path: Path, rest: str) -> None:
    assert found(tmp_path, COMPLETE + rest) == []


def test_a_method_that_another_file_calls_is_not_misspelled(tmp_path: Path) -> None:
    source = f"{COMPLETE}    def schedular(self, o): return 1\n"
    assert len(found(tmp_path, source)) == 1
    (tmp_path / "trial.py").write_text("task.schedular(o)")
    assert found(tmp_path, source) == []


def test_a_task_can_be_imported_from_its_module(tmp_path: Path) -> None:
    problems = found(
        tmp_path, f"from cloudtrain_runtime.task import Task\nclass Mine(Task):\n{MODEL}{DATASETS}"
    )
    assert problems == ["mine.py:2:1  Mine has no loss(self, model, batch); return a scalar tensor"]


def test_dataclasses_accept_their_fields(tmp_path: Path) -> None:
    lines = COMPLETE.replace("class Mine", "@dataclass(frozen=True)\nclass Mine")
    assert (
        found(
            tmp_path,
            f"from dataclasses import dataclass\n{lines}    layers: int = 2\n",
            {"layers": 3},
        )
        == []
    )


@pytest.mark.parametrize(
    "rest",
    [
        f"x = {' + '.join(['1'] * 5000)}\n",
        f"x = y{'.a()' * 3000}\n",
        "".join(f"class C{i + 1}(C{i}): ...\n" for i in range(1500)).replace("C0)", "Mine)")
        + "class Mine(C1500): ...",
    ],
)
def test_too_deeply_nested_code_has_no_problems(tmp_path: Path, rest: str) -> None:
    """A newer Python compiles what an older one cannot; then the mistakes of the class are found."""
    mistakes = found(tmp_path, f"{HEAD}class Mine(Task):\n{WRONG}")
    assert found(tmp_path, f"{HEAD}class Mine(Task):\n{WRONG}{rest}") in ([], mistakes)


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe9\n"])
def test_a_file_is_read_as_python_reads_it(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "mine.py").write_bytes(start + COMPLETE.encode() + b"    x = '\\d'\n")
    assert check_task(tmp_path, "mine:Mine", {}) == []


def test_a_package_hides_a_module_of_its_name(tmp_path: Path) -> None:
    assert found(tmp_path, "x = 1", mine____init__=COMPLETE) == []


def _tasks() -> list[tuple[Path, str]]:
    """Return every class of the examples with the base `Task`."""
    return [
        (path, node.name)
        for path in sorted((REPOSITORY / "examples").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == "Task" for base in node.bases)
    ]


def test_the_examples_have_no_problems() -> None:
    assert len(_tasks()) >= 2
    for path, name in _tasks():
        assert check_task(path.parent, f"{path.stem}:{name}", {}) == []


def test_the_users_code_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import sys\nsys.exit('imported')\n{COMPLETE}")
    assert check_task(tmp_path, "mine:Mine", {}) == []
    assert "mine" not in sys.modules
