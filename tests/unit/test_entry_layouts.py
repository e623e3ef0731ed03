"""Code that certainly cannot start as its job starts it, and the plan's advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

JOB = """\
name: layout
code: {CODE}
cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}
"""
SCRIPT = "script: pkg/train.py"
MODULE = "module: pkg.train"
TASK = "from cloudtrain_runtime import Task\nclass Mine(Task):\n    def model(self): ...\n"


@pytest.fixture
def warn(cli: Cli, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the plan's warnings that say that the code cannot start."""

    def plan(code: str, files: dict[str, str], *options: str) -> list[str]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "job.yaml").write_text(JOB.replace("CODE", code))
        done = cli("plan", tmp_path / "job.yaml", "--json", *options)
        assert done.code == 0, done.err
        return [text for text in done.json["warnings"] if "checkpoint" not in text]

    return plan


@pytest.mark.parametrize(
    ("code", "files", "expected"),
    [
        (
            SCRIPT,
            {"pkg/train.py": "import common.methods as m\n", "common/methods.py": ""},
            (
                "pkg/train.py:1 imports common, which is at the root of the code folder, but Python's import path begins in "
                "pkg, so the code cannot start: add code.env: {PYTHONPATH: .}"
            ),
        ),
        (
            MODULE,
            {"pkg/train.py": "import util\n", "pkg/util.py": ""},
            (
                "pkg/train.py:1 imports util, which is in pkg of the code folder, but Python's import path begins in the code "
                "folder, so the code cannot start: add code.env: {PYTHONPATH: pkg}"
            ),
        ),
        (
            SCRIPT,
            {"pkg/train.py": "from .util import x\n", "pkg/util.py": "x = 1\n"},
            (
                "pkg/train.py:1: from .util import x is relative to a package, and Python starts a script without one, so it "
                "cannot start: in place of code.script use code.module: pkg.train"
            ),
        ),
        (
            "script: train.py",
            {"train.py": "from .util import x\n", "util.py": "x = 1\n"},
            (
                "train.py:1: from .util import x is relative to a package, and Python starts a script without one, so it "
                "cannot start: use the absolute name in place of the dots"
            ),
        ),
        (
            "script: train.py",
            {"train.py": "import util\n", "util.py": "from . import other\n", "other.py": ""},
            (
                "util.py:1: from . import other is relative to a package, and Python imports this module without one: use "
                "the absolute name in place of the dots"
            ),
        ),
        (
            "script: train.py",
            {"train.py": "get_ipython().run_line_magic('matplotlib', 'inline')\n"},
            (
                "train.py:1 calls get_ipython(), which only notebooks have, so the code cannot start: remove the lines with "
                "it, which the export of a notebook made from its magic commands (%, !)"
            ),
        ),
    ],
)
def test_the_plan_names_the_cure(
    warn: Callable[..., list[str]], code: str, files: dict[str, str], expected: str
) -> None:
    assert warn(code, files, "--local") == [expected]


@pytest.mark.parametrize(
    ("code", "train", "others"),
    [
        (MODULE, "from .util import x\n", {"pkg/util.py": "x = 1\n"}),
        (MODULE, "from . import util\nfrom pkg.util import x\n", {"pkg/util.py": "x = 1\n"}),
        (SCRIPT, "import util\nimport pkg_b\n", {"pkg/util.py": "", "pkg/pkg_b/x.py": ""}),
        (f"{SCRIPT}, env: {{PYTHONPATH: .}}", "import common\n", {"common.py": ""}),
        (SCRIPT, "import sys\nsys.path.append('.')\nimport common\n", {"common.py": ""}),
        (SCRIPT, "try:\n    import common\nexcept ImportError:\n    pass\n", {"common.py": ""}),
        (SCRIPT, "try:\n    from .a import b\nexcept ImportError:\n    b = 1\n", {"pkg/a.py": ""}),
        (SCRIPT, "if __package__:\n    from .a import b\n", {"pkg/a.py": ""}),
        (SCRIPT, "__package__ = 'pkg'\nfrom .a import b\n", {"pkg/a.py": ""}),
        (SCRIPT, "def never():\n    import common\n", {"common.py": ""}),
        (SCRIPT, "import json\nimport pytest\n", {"json.py": "", "pytest/a.py": ""}),
        (SCRIPT, "import util\n", {"pkg/util.py": "", "other.py": "from . import a\n"}),
        (SCRIPT, "try:\n    get_ipython()\nexcept NameError:\n    pass\n", {}),
        (SCRIPT, "from IPython import get_ipython\nget_ipython()\n", {}),
        (SCRIPT, "def get_ipython(): ...\nget_ipython()\n", {}),
        (SCRIPT, "if 'x' in globals():\n    get_ipython()\n", {}),
        (
            SCRIPT,
            "import rootutils\nrootutils.setup_root(__file__, pythonpath=True)\nimport common\n",
            {"common.py": ""},
        ),
        (
            SCRIPT,
            "from pyrootutils import setup_root\nsetup_root('.', pythonpath=True)\nimport common\n",
            {"common.py": ""},
        ),
        (SCRIPT, "import autorootcwd\nimport common\n", {"common.py": ""}),
        (MODULE, "import pkg.rotary\n", {"pkg/rotary.py": "import rotary\n"}),
        (
            f"{SCRIPT}, requirements: reqs.txt",
            "import own_tool.core\n",
            {"own_tool/core.py": "", "reqs.txt": "Own-Tool[extra] >= 1.2\n"},
        ),
        (
            f"{SCRIPT}, requirements: reqs.txt",
            "import own_tool.core\n",
            {"src/own_tool/core.py": "", "reqs.txt": "own-tool @ git+https://host/own-tool\n"},
        ),
        (
            f"{MODULE}, requirements: reqs.txt",
            "import own_types\n",
            {"pkg/own_types.py": "import own_types\n", "reqs.txt": "own_types==0.2.3\n"},
        ),
    ],
)
def test_code_that_can_start_gets_no_warning(
    warn: Callable[..., list[str]], code: str, train: str, others: dict[str, str]
) -> None:
    assert warn(code, {"pkg/train.py": train, **others}, "--local") == []


def test_requirements_of_others_bring_no_own_module(warn: Callable[..., list[str]]) -> None:
    files = {"pkg/train.py": "import own_tool\n", "own_tool/a.py": "", "reqs.txt": "own-tool-kit\n"}
    (found,) = warn(f"{SCRIPT}, requirements: reqs.txt", files, "--local")
    assert found.endswith("so the code cannot start: add code.env: {PYTHONPATH: .}")


def test_a_task_with_a_relative_import_cannot_start(warn: Callable[..., list[str]]) -> None:
    code = "task: train:Mine}\ntrain: {epochs: 1, batch_size: 4"
    files = {"train.py": f"from .util import x\n{TASK}", "util.py": "x = 1\n"}
    text = TASK + "    def datasets(self): ...\n    def loss(self, model, batch): ...\n"
    files["train.py"] = f"from .util import x\n{text}"
    (found,) = warn(code, files, "--local")
    assert found.startswith("train.py:1: from .util import x is relative to a package")
