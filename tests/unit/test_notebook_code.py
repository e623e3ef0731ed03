"""The source of a notebook's function: the names it uses, values as expressions, cells with their lines."""

from __future__ import annotations

import ast
import json
import linecache
import math
import sys
import threading
import traceback
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.errors import CloudtrainError, UserError
from cloudtrain.features.functions.cells import Cell, module_name, without_magics
from cloudtrain.features.functions.job_of import job_name, write_job
from cloudtrain.features.functions.literals import write_value
from cloudtrain.features.functions.names import used_names
from cloudtrain.features.functions.notebook_file import backend_of_notebook, job_of_notebook
from cloudtrain_runtime.contract.cell_format import MARK, VALUES, cell_heading
from cloudtrain_runtime.process.notebook_cells import name_cells


@pytest.mark.parametrize(
    ("source", "at_import", "later"),
    [
        ("def f(x=DEFAULT):\n    return x + LATER", {"DEFAULT"}, {"LATER"}),
        ("@decorate\ndef f(): ...", {"decorate"}, set()),
        ("class A(Base):\n    x = VALUE\n    def m(self):\n        return LATER", {"Base", "VALUE"}, {"LATER"}),
        ("def f():\n    import json\n    return json.dumps([y for y in ALL])", set(), {"ALL"}),
        ("def f():\n    def g():\n        return DEEP\n    return g", set(), {"DEEP"}),
        ("f = lambda x: x * SCALE", set(), {"SCALE"}),
        ("x = [f(y) for y in range(3)]", {"f", "range"}, set()),
        ("def f(x: Hint) -> Other: ...", {"Hint", "Other"}, set()),
        ("def f():\n    try:\n        pass\n    except Wrong as error:\n        raise Right from error", set(), {"Wrong", "Right"}),
        ("def f():\n    global counter\n    counter += STEP", set(), {"STEP"}),
        ("def f(n):\n    return f(n - 1)", set(), set()),
    ],
)  # fmt: skip
def test_the_names_that_code_uses(source: str, at_import: set[str], later: set[str]) -> None:
    found = used_names(source)
    assert (found.at_import, found.later) == (at_import, later)


def test_annotations_that_are_not_evaluated_need_nothing() -> None:
    assert used_names("def f(x: Hint) -> Other: return x", is_lazy=True).all == set()


VALUES_OF_NAMES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)  # fmt: skip


@given(value=VALUES_OF_NAMES)
def test_a_value_is_the_expression(value: Any) -> None:
    written = write_value(value)
    assert written is not None
    assert eval(written.text) == value  # noqa: S307 (it was just written)


def test_values_that_need_imports_or_have_none() -> None:
    path = write_value({"a": Path("/x")})
    assert path is not None
    assert (path.text, path.imports) == ("{'a': pathlib.Path('/x')}", {"import pathlib"})
    pure = write_value(PurePosixPath("x"))
    assert pure is not None
    assert pure.text == "pathlib.PurePosixPath('x')"
    infinite = write_value([math.inf])
    assert infinite is not None
    assert eval(infinite.text) == [math.inf]  # noqa: S307 (it was just written)
    assert write_value({3, 1}) == write_value({1, 3})
    recursive: list[Any] = []
    recursive.append(recursive)
    for value in (object(), recursive, "x" * 200_000, threading.Lock()):
        assert write_value(value) is None


def test_a_statement_is_cut_out_of_its_lines() -> None:
    cell = Cell.read("cell [1]", 1, "a = 1; b = lambda: 'é'; c = 2\n@x\n@y(\n 1)\ndef f(): pass\n")
    assert cell is not None
    codes = [cell.code_of(each) for each in cell.statements]
    assert codes == [
        (1, "a = 1\n"),
        (1, "b = lambda: 'é'\n"),
        (1, "c = 2\n"),
        (2, "@x\n@y(\n 1)\ndef f(): pass\n"),
    ]
    assert cell.statement_at(1, "b") is cell.statements[1]
    assert Cell.read("cell [2]", 2, "1 +") is None


def test_a_traceback_of_a_module_names_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"{MARK}x.ipynb.\nimport math\n\n{cell_heading('x.ipynb, cell with f', 7)}\ndef f(x):\n    return g(x)\n"
        f"\n{VALUES}\nONE = 1\n\n{cell_heading('x.ipynb, cell with g', 3)}\ndef g(x):\n    raise ValueError(x + ONE)\n"
    )
    (tmp_path / "written_cells.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    name_cells()
    name_cells()
    import written_cells  # type: ignore[import-not-found]

    with pytest.raises(ValueError, match="2") as raised:
        written_cells.f(1)
    frames = [
        (each.filename, each.lineno, each.line) for each in traceback.extract_tb(raised.tb)[1:]
    ]
    assert frames == [
        ("x.ipynb, cell with f", 8, "return g(x)"),
        ("x.ipynb, cell with g", 4, "raise ValueError(x + ONE)"),
    ]
    linecache.checkcache()
    assert linecache.getline("x.ipynb, cell with g", 4).strip() == "raise ValueError(x + ONE)"
    assert ast.parse(text)


@pytest.mark.parametrize(
    "content",
    [
        *[b"", b"[]", b"{}", b'{"cells": 1}', b'{"cells": [{}]}', b'{"cells": [{"cell_type": "code"}]}'],
        *[b'{"cells": [{"cell_type": "code", "source": [1]}]}', b'{"cells": [null]}', b"[" * 10_000, b"\xff\x00"],
    ],
)  # fmt: skip
def test_a_damaged_notebook_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ipynb"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x.ipynb"):
        job_of_notebook(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local runs."""
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def notebook(folder: Path, *cells: str) -> Path:
    """Write a notebook."""
    path = folder / "study.ipynb"
    content = [{"cell_type": "code", "source": each.splitlines(keepends=True)} for each in cells]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "x"}, *content]}))
    return path


def test_a_notebook_is_read_and_not_executed(home: Path, tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "%pip install x\nraise SystemExit\nimport cloudtrain\nfrom json import dumps as d\nimport os.path",
        "OPTIONS = dict(instance_type='ml.m5.large')\nmore = {**OPTIONS, 'instances': 3}\nSCALE: int = 2",
        "def helper(x): return d([x * SCALE, os.path.sep])",
        "@cloudtrain.remote(**more, limits={'runtime': '1h'}, backend='local')\ndef train(lr, name='x'):\n    return helper(lr)",
        "run = train.submit(0.5, name='y')",
    )
    spec = job_of_notebook(path, ["limits.runtime=2h"]).valid_spec()
    assert spec.code.args == {"lr": 0.5, "name": "y"}
    assert spec.cluster.instances == 3
    assert spec.limits.runtime == 7200
    written = (spec.code_directory / "study.py").read_text()
    for line in (
        "from json import dumps as d",
        "import os.path",
        "SCALE: int = 2",
        "# %% study.ipynb, cell with helper, line 1",
    ):
        assert line in written.splitlines(), written
    assert "SystemExit" not in written


def test_what_a_notebook_leaves_open_is_named(home: Path, tmp_path: Path) -> None:
    train = "@cloudtrain.remote(instances=count())\ndef train(): return x\n"
    good = train.replace("instances=count()", "")
    for cells, message in (
        ((train,), "the value of count\\(\\) is known only when the notebook is executed"),
        ((good,), "x is not defined"),
        (
            (good, "for x in [1]: pass"),
            "no cell says how to make x",
        ),
        (("import cloudtrain",), "submits no function and no Task class"),
        ((good + good.replace("def train", "def other"),), r"submits several: train, other"),
    ):
        with pytest.raises(CloudtrainError, match=message):
            job_of_notebook(notebook(tmp_path, *cells)).valid_spec()
    path = notebook(tmp_path, train + train.replace("def train", "def other"))
    with pytest.raises(UserError, match="submits no othr"):
        job_of_notebook(f"{path}:othr")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        *[("My study (2).ipynb", "my_study_2"), ("2nd.ipynb", "notebook_2nd"), ("the notebook", "notebook")],
        *[("json.ipynb", "json_code"), ("pydantic.py", "pydantic_code"), ("é.ipynb", "notebook")],
    ],
)  # fmt: skip
def test_a_module_is_named_after_the_notebook(title: str, name: str, tmp_path: Path) -> None:
    assert module_name(title, tmp_path) == name
    (tmp_path / f"{name}.py").touch()
    assert module_name(title, tmp_path) == f"{name}_code"


def test_a_job_is_named_after_the_function() -> None:
    assert [job_name(each) for each in ("train_model", "MyTask", "_x", "f" * 50)] == [
        "train-model",
        "my-task",
        "x",
        "f" * 42,
    ]


HEAD = "import cloudtrain\nN = 2\n"
TRAIN = "@cloudtrain.remote(instances=N, backend='local')\ndef train(x=1):\n    return "


def test_options_are_those_before_the_definition(home: Path, tmp_path: Path) -> None:
    path = notebook(tmp_path, HEAD, f"{TRAIN}N", "N = 1", "K = (1, 2)\ntrain.submit(x=K)", "K = 3")
    spec = job_of_notebook(path).valid_spec()
    assert spec.cluster.instances == 2
    assert spec.code.args == {"x": '{"$tuple": [1, 2]}'}
    assert backend_of_notebook(path) == "local"
    assert "N = 1" in (spec.code_directory / "study.py").read_text()
    assert (
        backend_of_notebook(notebook(tmp_path, TRAIN.replace(", backend='local'", "") + "1"))
        is None
    )
    short = TRAIN.replace("instances=N, backend='local'", "**options")
    given = "options = dict(local=True, instances=1)"
    assert backend_of_notebook(notebook(tmp_path, given, short + "1")) == "local"


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["L = [1]", f"{TRAIN}L", "L.append(2)"], "L may have been changed by study.ipynb, cell 4"),
        (["D = {}", 'D["a"] = 3', f"{TRAIN}D"], "D may have been changed by study.ipynb, cell 3"),
        (["class C: ...\nc = C()", "c.lr = 3", f"{TRAIN}c"], "c may have been changed by"),
        (["class C: ...", "C.lr = 3", f"{TRAIN}C"], "C may have been changed by"),
        (["k = 3\ndef g(d=k): return d", "k = 20", f"{TRAIN}g()"], "g was made with k"),
        (["class C:\n    names = []", "C.names.append(1)", f"{TRAIN}C"], "C may have been changed by study.ipynb, cell 3"),
        (["n = 2", "n = n + 1", f"{TRAIN}n"], "n is made from itself in study.ipynb, cell 3"),
        (["O = [1]", "O.append(2)", f"{TRAIN.replace('=N', '=O')}1"], "the value of O is known only when"),
        ([f"{TRAIN}1", "train.submit(1, 2)"], "an argument has no name"),
    ],
)  # fmt: skip
def test_changed_values_of_a_file_are_refused(
    home: Path, tmp_path: Path, cells: list[str], message: str
) -> None:
    with pytest.raises(CloudtrainError, match=message):
        job_of_notebook(notebook(tmp_path, HEAD, *cells)).valid_spec()


def test_a_changed_module_of_a_file_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("K = 1\n")
    cells = ["import beside", "beside.K = 5", f"{TRAIN}beside.K"]
    with pytest.raises(CloudtrainError, match="cell 3 sets an attribute of beside"):
        job_of_notebook(notebook(tmp_path, HEAD, *cells)).valid_spec()


def test_lines_for_ipython_are_left_out() -> None:
    source = "%pip install x\n!ls\nfiles = !ls\nx = (7\n% 4)\nlen?\n?len\n%%time"
    assert without_magics(source) == "\n\n\nx = (7\n% 4)\n\n\n\n"
    python = 'x = """\n!a\n%b\nwhy?\n"""'
    assert without_magics(python) == python


def test_cells_with_magics_of_a_file_are_read(home: Path, tmp_path: Path) -> None:
    path = notebook(tmp_path, HEAD, "%%time\ndef g(): return 3", "%%bash\ndef h", f"{TRAIN}g()")
    spec = job_of_notebook(path).valid_spec()
    assert "def g(): return 3" in (spec.code_directory / "study.py").read_text()


def test_requirements_and_defaults_lie_beside_the_notebook(home: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("requests==2.32.3\n")
    (tmp_path / "job.yaml").write_text("name: base\ncluster: {instance_type: ml.m5.large}\n")
    options = "requirements='requirements.txt', job='job.yaml'"
    path = notebook(tmp_path, HEAD, f"@cloudtrain.remote({options})\ndef train(): return 1")
    spec = job_of_notebook(path).valid_spec()
    assert spec.name == "base"
    assert (spec.code_directory / "requirements.txt").read_text() == "requests==2.32.3\n"
    folder = tmp_path / "written"
    write_job(spec, folder)
    # It may replace what it has written, and nothing else.
    write_job(spec, folder)
    (folder / "job.yaml").write_text("name: mine\n")
    with pytest.raises(UserError, match="has files already"):
        write_job(spec, folder)


def test_a_mistake_of_a_task_names_its_cell(home: Path, tmp_path: Path) -> None:
    task = "# a comment\n\nclass T(Task):\n    def model(self): ...\n    def loss(self, model, x, y, z): ..."
    fields = "train={'epochs': 1, 'batch_size': 1, 'learning_rate': 1}"
    imports = "from cloudtrain_runtime import Task"
    path = notebook(tmp_path, HEAD + imports, task, f"cloudtrain.submit(T, {fields})")
    places = [(each.file, each.line) for each in job_of_notebook(path).problems]
    assert ("study.ipynb, cell with T", 3) in places
    assert ("study.ipynb, cell with T", 5) in places
