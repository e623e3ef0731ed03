"""`code.outputs`: the files and folders that a job may name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

JOB = """\
name: keeps
code: {CODE}
cluster: {instance_type: ml.p4d.24xlarge, processes_per_instance: 1}
"""


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ("[/tmp/out/]", 'expected a path below the directory, got "/tmp/out/"'),
        ("[../out/]", "expected a path below the directory"),
        ("[.]", "expected a path below the directory"),
        ("[~/.cache/out/]", 'expected a path below the directory, got "~/.cache/out/"'),
        ("['~']", "expected a path below the directory"),
        ("[~me/out/]", "expected a path below the directory"),
        ("[$SM_MODEL_DIR/out/]", "expected a path below the directory"),
        ("['${HOME}/x.pt']", "expected a path below the directory"),
        ("['*.pt']", 'patterns are not supported, got "*.pt"'),
        ("[out/, out/best.pt]", '"out/best.pt" overlaps another output'),
    ],
)
def test_outputs_are_files_and_folders_below_the_code(
    cli: Cli, job: Callable[..., Path], outputs: str, message: str
) -> None:
    path = job(JOB.replace("CODE", f"script: train.py, outputs: {outputs}"), train_py="")
    problem = cli("validate", path, "--json").json["problems"][0]
    assert message in problem["message"]
    assert problem["path"].startswith("code.outputs")
    assert problem["line"] == 2
    assert problem["column"] > len("code: {script: train.py, outputs: ")
    assert problem["hint"]


@pytest.mark.parametrize("name", ["~.pt", "./~/out/", "out~/", "a$.pt"])
def test_outputs_may_have_odd_names(cli: Cli, job: Callable[..., Path], name: str) -> None:
    path = job(JOB.replace("CODE", f"script: train.py, outputs: ['{name}']"), train_py="")
    assert cli("validate", path, "--json").json["ok"]


def test_a_tasks_outputs_are_refused(cli: Cli, job: Callable[..., Path]) -> None:
    task = "from cloudtrain_runtime import Task\nclass A(Task):\n    pass\n"
    path = job(
        JOB.replace("CODE", "task: 'a:A', outputs: [out/]") + "train: {epochs: 1}\n", a_py=task
    )
    problems = cli("validate", path, "--json").json["problems"]
    assert any(problem["path"] == "code.outputs" for problem in problems), problems


def test_the_plan_names_where_outputs_are_kept(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("CODE", "script: train.py, outputs: [out, snapshot.pt]"), train_py="")
    plan = cli("plan", path, "--local", "--json").json
    assert any(
        "/checkpoints/outputs; a run that resumes finds them" in text for text in plan["decisions"]
    )
    assert any(
        "out is treated as a file; a folder ends with a slash: out/" in text
        for text in plan["warnings"]
    )
    other = cli("validate", path, "--json", "--set=cluster.distribution=smdistributed").json[
        "problems"
    ]
    assert [problem["path"] for problem in other] == ["code.outputs"]


def test_an_output_that_is_source_is_refused(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(JOB.replace("CODE", "script: train.py, outputs: [cfg/, ./train.py]"), train_py="")
    done = cli("plan", path, "--local")
    assert done.code == 2
    assert "train.py is source of the job" in done.err
    other = job(JOB.replace("CODE", "script: train.py, outputs: [cfg/]"), train_py="")
    (other.parent / "cfg").mkdir()
    (other.parent / "cfg" / "c.yaml").write_text("a: 1")
    plan = cli("plan", other, "--local", "--json").json
    assert any("cfg/c.yaml travels with the code, too" in text for text in plan["warnings"])
