"""Packages that a local run would end without are named before it starts, and no others."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import REPOSITORY, Cli

from cloudtrain.features.setup.new_job import TEMPLATES
from cloudtrain.job.missing_packages import MissingPackage, find_missing

pytest.importorskip("torch")

JOB = """\
name: tiny
code: {CODE}
cluster: {instance_type: ml.m5.xlarge}
"""


def missing_of(tmp_path: Path, source: str) -> list[MissingPackage]:
    entry = tmp_path / "train.py"
    entry.write_text(source)
    return list(find_missing(entry))


def test_each_missing_package_has_its_place(tmp_path: Path) -> None:
    source = '"""Trains."""\nimport os, nopackage.sub\nos.environ["A"] = "1"\nfrom otherpackage import x\n'
    assert missing_of(tmp_path, source) == [
        MissingPackage("nopackage", "", 2, 1),
        MissingPackage("otherpackage", "", 4, 1),
    ]


@pytest.mark.parametrize(
    "before",
    [
        "import os",
        "import os.path as p, sys",
        "from __future__ import annotations",
        "import warnings; warnings.filterwarnings('ignore')",
        "import os; os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')",
        "SIZE: int = 3",
    ],
)
def test_harmless_code_before_an_import_is_passed(tmp_path: Path, before: str) -> None:
    assert [each.module for each in missing_of(tmp_path, f"{before}\nimport nopackage\n")] == [
        "nopackage"
    ]


@pytest.mark.parametrize(
    "before",
    [
        "import sys; sys.path.append('lib')",
        "import sys; sys.path = ['lib']",
        "import sys; sys.path[:0] = ['lib']",
        "import sys; sys.path += ['lib']",
        "import sys; sys.modules['nopackage'] = sys",
        "import site; site.addsitedir('lib')",
        "import os; os.system('pip install nopackage')",
        "import subprocess; x = subprocess.run(['pip', 'install', 'nopackage'])",
        "if True:\n    import subprocess",
        "def install(): ...",
        "with open('x') as file: pass",
        "import own",
        "from own import *",
        "import folder.module",
        "raise SystemExit",
    ],
)
def test_nothing_is_claimed_after_code_that_may_change_it(tmp_path: Path, before: str) -> None:
    (tmp_path / "own.py").touch()
    (tmp_path / "folder").mkdir()
    assert missing_of(tmp_path, f"{before}\nimport nopackage\n") == []


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import nopackage\nexcept ImportError:\n    nopackage = None\n",
        "def main():\n    import nopackage\n",
        "from . import nopackage\n",
        "import nopackage as\n",
        "import __main__, torch, yaml, json\n",
    ],
)
def test_what_may_work_is_not_missing(tmp_path: Path, source: str) -> None:
    assert missing_of(tmp_path, source) == []


def test_the_name_on_pypi_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed
    assert missing_of(tmp_path, "import sklearn\n")[0].package == "scikit-learn"


@pytest.mark.parametrize(
    ("requirements", "hint"),
    [
        (None, "install the package that has nopackage; for SageMaker name it in a file, and the file in code.requirements"),
        ("nopackage>=1\n", "submit with --install, which installs requirements.txt for the run"),
        ("-r more.txt\n", "submit with --install, which installs requirements.txt for the run"),
        ("other\n", "add the package that has nopackage to requirements.txt, and submit with --install"),
    ],
)  # fmt: skip
def test_a_submit_names_the_import_before_it_starts(
    cli: Cli, job: Callable[..., Path], requirements: str | None, hint: str
) -> None:
    code = (
        "{script: train.py}"
        if requirements is None
        else "{script: train.py, requirements: requirements.txt}"
    )
    path = job(JOB.replace("{CODE}", code), train_py="import nopackage\n")
    if requirements is not None:
        path.with_name("requirements.txt").write_text(requirements)
    done = cli("submit", "job.yaml", "--local", cwd=path.parent)
    assert done.code == 2
    assert "train.py:1:1  this machine has no module nopackage: " in done.err
    assert hint in done.err
    assert not (path.parent / ".cloudtrain" / "runs").exists()
    assert cli("plan", "job.yaml", "--local", cwd=path.parent).code == 0


@pytest.mark.parametrize(
    ("code", "files"),
    [
        ("{task: 'package.task:T'}", {"package/__init__.py": "import sys; sys.path.append('x')\n"}),
        ("{module: package.task, env: {PYTHONPATH: lib}}", {"package/__init__.py": ""}),
    ],
)
def test_code_that_runs_first_may_provide_a_package(
    cli: Cli, tmp_path: Path, code: str, files: dict[str, str]
) -> None:
    """No error here means that the run would start; what cannot run anywhere stops it afterwards."""
    from cloudtrain.job.missing_packages import check_packages
    from cloudtrain.job.spec import load_job

    (tmp_path / "package").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "package" / "task.py").write_text("import nopackage\nclass T: ...\n")
    (tmp_path / "job.yaml").write_text(JOB.replace("{CODE}", code))
    spec = load_job(tmp_path / "job.yaml").spec
    assert spec is not None
    assert list(check_packages(spec)) == []
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "job.yaml").write_text(JOB.replace("{CODE}", "{module: package.task}"))
    spec = load_job(tmp_path / "job.yaml").spec
    assert spec is not None
    assert [each.line for each in check_packages(spec)] == [1]


@pytest.mark.parametrize("template", TEMPLATES)
def test_init_names_install_where_packages_are_missing(
    cli: Cli, tmp_path: Path, template: str
) -> None:
    needed = {"lightning": "lightning", "accelerate": "accelerate", "huggingface": "transformers"}
    package = needed.get(template)
    done = cli("init", tmp_path / "new job", "--template", template)
    is_missing = package is not None and importlib.util.find_spec(package) is None
    install = " --install" if is_missing else ""
    assert f"submit '{tmp_path / 'new job'}/job.yaml' --local{install} --follow\n" in done.err


def test_the_examples_lack_no_unknown_module() -> None:
    """A machine may lack packages of the extras, and nothing else."""
    known = {"accelerate", "lightning", "peft", "sklearn", "tokenizers", "transformers"}
    found = [
        (script.name, each.module)
        for script in sorted((REPOSITORY / "examples").glob("*/*.py"))
        for each in find_missing(script)
    ]
    assert [pair for pair in found if pair[1] not in known] == []
