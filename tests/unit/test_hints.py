"""Hints of errors: commands in a terminal, calls of the API in Python."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.errors import Problem, SpecError, UserError
from cloudtrain.errors.python_hints import in_python

SOURCES = Path(inspect.getfile(cloudtrain)).parent


@pytest.mark.parametrize(
    ("hint", "expected"),
    {
        "to train longer: cloudtrain resume r --set train.epochs=N, or train.steps=N": (
            'to train longer: cloudtrain.resume("r", ["train.epochs=N"]), or train.steps=N'
        ),
        "see: cloudtrain list": "see: cloudtrain.list_runs()",
        "see: cloudtrain list --endpoints": "see: cloudtrain.list_endpoints()",
        "stop it first: cloudtrain stop digits-1": 'stop it first: cloudtrain.stop("digits-1")',
        "see: cloudtrain checkpoints sagemaker:digits-1": (
            'see: cloudtrain.checkpoint_folder("sagemaker:digits-1").list()'
        ),
        "verify them: cloudtrain checkpoints verify RUN": (
            "verify them: cloudtrain.checkpoint_folder(RUN).verify()"
        ),
        "see all of them: cloudtrain check JOB; to submit anyway: --skip-check": (
            "see all of them: cloudtrain.check(job); to submit anyway: skip_check=True"
        ),
        "start one: cloudtrain submit --local; or name a run: cloudtrain list": (
            "start one: cloudtrain.submit(job, local=True); or name a run: cloudtrain.list_runs()"
        ),
        "again: cloudtrain submit JOB --set checkpoint.resume=digits-1": (
            'again: cloudtrain.submit(JobSpec.from_yaml(JOB, ["checkpoint.resume=digits-1"]))'
        ),
        "to replace them: --force; to keep them: --to DIR": (
            "to replace them: force=True; to keep them: to=DIR"
        ),
        "take a checkpoint: --checkpoint STEP": "take a checkpoint: checkpoint=STEP",
        "pip install --force 'cloudtrain[local]'": "pip install --force 'cloudtrain[local]'",
        "cloudtrain prices --refresh, or add --local": "cloudtrain prices --refresh, or add --local",
        "the file cloudtrain listens to": "the file cloudtrain listens to",
    }.items(),
)
def test_hint_in_python(hint: str, expected: str) -> None:
    assert in_python(hint) == expected


def test_error_in_a_terminal_and_in_python() -> None:
    error = UserError("there is no run", "see: cloudtrain list")
    assert error.for_terminal() == "there is no run\n  see: cloudtrain list"
    (shown,) = error._render_traceback_()
    assert shown == f"{type(error).__name__}: {error}"
    assert str(error) == "there is no run\n  see: cloudtrain.list_runs()"


def test_problem_of_a_job_in_python() -> None:
    problem = Problem("job.yaml", 3, 1, "train.init_from", "no run a", "see: cloudtrain list")
    assert str(problem).endswith("; see: cloudtrain list")
    assert str(SpecError([problem])).endswith("; see: cloudtrain.list_runs()")


def _texts() -> Iterator[str]:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and "cloudtrain " in node.value:
                yield node.value


def test_calls_of_hints_exist() -> None:
    calls = {
        name
        for text in _texts()
        for name in re.findall(r"cloudtrain\.([a-z_]+)\(", in_python(text.replace("{", "")))
    }
    assert len(calls) > 6
    assert calls - set(cloudtrain.__all__) == set()
