"""`code.include`: packages outside of the code folder in the bundle, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_keys import KEY_ID
from support.jobs import Cli

JOB = "name: demo\ncode:\n  directory: jobs\n  script: train.py\n  include: [libs/shared_lib]\n"
CLUSTER = "cluster: {instance_type: ml.p4d.24xlarge}\n"
INSIDE = "cloudtrain_include/shared_lib"


def write(folder: Path, **files: str) -> None:
    """Write Python files, `a__b` as a/b.py, and an `__init__.py` into each folder."""
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        (path.parent / "__init__.py").touch()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job whose script imports a package beside its code folder."""
    write(tmp_path / "jobs", train="import shared_lib\n")
    write(tmp_path / "libs", shared_lib__train="")
    (tmp_path / "libs" / "shared_lib" / "__init__.py").write_text("import torch.distributed\n")
    (tmp_path / "job.yaml").write_text(JOB + CLUSTER)
    return tmp_path


def problems_of(cli: Cli, folder: Path, text: str = JOB) -> list[str]:
    """Return the problems that `validate` reports, as `line:column: path: message; hint`."""
    (folder / "job.yaml").write_text(text + CLUSTER)
    found = cli("validate", folder / "job.yaml", "--json").json.get("problems", [])
    return [
        f"{each['line']}:{each['column']}: {each['path']}: {each['message']}; {each['hint']}"
        for each in found
    ]


def problem_of(cli: Cli, folder: Path, include: str) -> str:
    """Return the one problem of these entries, without its place, which is checked here."""
    (problem,) = problems_of(cli, folder, JOB.replace("libs/shared_lib", include))
    place, _, message = problem.partition(": code.include[")
    assert place.startswith("5:")
    return message.replace("]", "", 1).replace(str(folder), "HERE")


def test_an_included_folder_is_in_the_bundle(cli: Cli, folder: Path) -> None:
    for name, text in ((".gitignore", "*.log\n"), ("run.log", ""), ("weights.pt", "")):
        (folder / "libs" / "shared_lib" / name).write_text(text)
    found = cli("files", folder / "job.yaml", "--json").json
    names = [each["name"] for each in found["files"] if each["why"] == "code"]
    assert names == [
        "__init__.py",
        *(f"{INSIDE}/{name}" for name in (".gitignore", "__init__.py", "train.py")),
        "train.py",
    ]
    reasons = {each["name"]: each["reason"] for each in found["left_out"]}
    assert reasons[f"{INSIDE}/run.log"] == ".gitignore:1: *.log"
    assert f"{INSIDE}/weights.pt" in reasons


def test_a_change_of_an_include_is_a_change_of_the_code(cli: Cli, folder: Path) -> None:
    first = cli("plan", folder / "job.yaml", "--json").json
    assert cli("plan", folder / "job.yaml", "--json").json["bundle"] == first["bundle"]
    (folder / "libs" / "shared_lib" / "more.py").write_text("")
    second = cli("plan", folder / "job.yaml", "--json").json
    assert second["bundle"]["digest"] != first["bundle"]["digest"]
    assert second["bundle"]["files"] == first["bundle"]["files"] + 1


def test_signs_in_an_include_count_for_the_script(cli: Cli, folder: Path) -> None:
    """The script joins its ranks in the included package, so the plan does not warn that it does not."""
    sign = "torch.distributed"
    assert not [
        each for each in cli("plan", folder / "job.yaml", "--json").json["warnings"] if sign in each
    ]
    (folder / "libs" / "shared_lib" / "__init__.py").write_text("")
    assert [
        each for each in cli("plan", folder / "job.yaml", "--json").json["warnings"] if sign in each
    ]


def test_a_module_or_task_in_an_include_is_checked(cli: Cli, folder: Path) -> None:
    module = JOB.replace("script: train.py", "module: shared_lib.train")
    assert problems_of(cli, folder, module) == []
    (problem,) = problems_of(cli, folder, module.replace("lib.train", "lib.trian"))
    assert f'no such file: {folder}/libs/shared_lib/trian.py; did you mean "train.py"?' in problem
    task = JOB.replace("script: train.py", "task: shared_lib.tasks:Mine") + "train: {epochs: 1}\n"
    source = "from cloudtrain_runtime import Task\nclass Mine(Task):\n    def model(self): ...\n"
    (folder / "libs" / "shared_lib" / "tasks.py").write_text(source)
    assert any(
        "Mine has no datasets(self)" in problem for problem in problems_of(cli, folder, task)
    )


def test_an_ignored_entry_in_an_include_is_refused(cli: Cli, folder: Path) -> None:
    (folder / "libs" / "shared_lib" / ".cloudtrainignore").write_text("train.py\n")
    (folder / "job.yaml").write_text(
        JOB.replace("script: train.py", "module: shared_lib.train") + CLUSTER
    )
    done = cli("plan", folder / "job.yaml")
    assert done.code == 2
    assert f"{INSIDE}/train.py would not be in the container" in done.err
    assert "write !train.py to shared_lib/.cloudtrainignore" in " ".join(done.err.split())


def test_secrets_in_an_include_are_refused(cli: Cli, folder: Path) -> None:
    (folder / "libs" / "shared_lib" / "keys.py").write_text(f'KEY = "{KEY_ID}"\n')
    done = cli("plan", folder / "job.yaml")
    assert done.code == 2
    assert f"{INSIDE}/keys.py:1" in done.err
    assert "in shared_lib/.cloudtrainignore the line /keys.py excludes it" in " ".join(
        done.err.split()
    )


def test_problems_of_an_include_name_its_folder(cli: Cli, folder: Path) -> None:
    (folder / "libs" / "shared_lib" / "link.py").symlink_to(folder / "job.yaml")
    done = cli("plan", folder / "job.yaml")
    assert done.code == 2
    assert f"in {folder}/libs/shared_lib: link.py is a link to" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("include", "problem"),
    [
        ("libs/shared_lob", '0: no such folder: HERE/libs/shared_lob; did you mean "shared_lib"?'),
        (
            "job.yaml",
            "0: expected a folder, but HERE/job.yaml is a file; name the folder that holds it",
        ),
        (
            "jobs/inner",
            "0: HERE/jobs/inner is in the code folder; remove it: the code folder travels as it is",
        ),
        ("jobs", "0: HERE/jobs is in the code folder; "),
        (".", "0: HERE contains the code folder; name the package in it alone"),
        (
            "libs/train",
            "0: the code folder has a module train, too, which would be imported in its place; rename",
        ),
        ("libs/inner", "0: the code folder has a module inner, too, "),
        (
            "libs/json",
            "0: json would hide the module of Python's standard library; rename the folder",
        ),
        (
            "libs/class",
            '0: the code imports an included folder by its name, and "class" is not one; rename',
        ),
        (
            "libs/shared-lib",
            (
                '0: the code imports an included folder by its name, and "shared-lib" is not one; '
                "did you mean libs/shared-lib/src/shared?, or rename the folder"
            ),
        ),
        (
            "libs/project",
            (
                "0: HERE/libs/project is a project; import project would not find the package in it; "
                "did you mean libs/project/src/shared?"
            ),
        ),
        (
            "libs/shared_lib, other/shared_lib",
            "1: libs/shared_lib has the same name, shared_lib; remove or rename one of the two",
        ),
    ],
)
def test_a_wrong_include_is_refused(cli: Cli, folder: Path, include: str, problem: str) -> None:
    write(folder, jobs__inner__a="", other__shared_lib__a="")
    write(folder / "libs", train__a="", inner__a="", json__a="", class__a="")
    for name in ("shared-lib", "project"):
        write(folder / "libs" / name / "src", shared__a="")
        (folder / "libs" / name / "pyproject.toml").write_text("")
    assert problem_of(cli, folder, include).startswith(problem)


def test_a_reserved_folder_name_is_refused(cli: Cli, folder: Path) -> None:
    write(folder / "jobs" / "cloudtrain_include", a="")
    done = cli("plan", folder / "job.yaml")
    assert done.code == 2
    assert "the code folder has a folder cloudtrain_include" in done.err
