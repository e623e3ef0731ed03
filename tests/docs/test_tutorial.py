"""The first tutorial works as written: its Task fails, is explained, is fixed and continues from its checkpoint."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import REPOSITORY, Cli

PAGE = (REPOSITORY / "docs" / "tutorial" / "first-run.md").read_text()


def block(language: str, start: str) -> str:
    (found,) = re.findall(rf"```{language}\n({re.escape(start)}.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


@pytest.mark.processes
def test_tutorial_fails_explains_and_resumes(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(block("yaml", "name: spiral"), spiral_py=block("python", "import torch\nfrom torch import nn"))
    options = ("job.yaml", "--local", "--instances", "2", "--follow")
    failed = cli("submit", *options, cwd=path.parent)
    assert failed.code == 4, failed.err
    run = failed.out.partition("\n")[0]
    shown = block("console", "$ cloudtrain explain")
    for line in shown.splitlines()[-3:]:
        assert line.strip() in cli("explain", run, cwd=path.parent).out
    assert "5     complete" in cli("checkpoints", run, cwd=path.parent).out
    task = path.with_name("spiral.py")
    task.write_text(task.read_text().replace("== labels", "== label"))
    fixed = cli("submit", *options, "--set", f"checkpoint.resume={run}", cwd=path.parent)
    assert fixed.code == 0, fixed.err
    status = cli("status", fixed.out.partition("\n")[0], "--json", cwd=path.parent).json
    assert (status["state"], status["first_step"], status["last_step"]) == ("SUCCEEDED", 5, 100)
    assert status["metrics"]["validation/accuracy"] > 0.6
