"""What starts the ranks of a host is known alike in commands, scripts, shell scripts and Python."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cloudtrain.failure_rules.rules import ranks
from cloudtrain.failure_rules.rules.base import Causality
from cloudtrain.job.launcher_choice import find_rank_starter
from cloudtrain.job.static_analysis.conventions import read_conventions
from cloudtrain.job.static_analysis.shell_scripts import find_hidden_failures
from cloudtrain.job.static_analysis.signs import find_launcher
from cloudtrain.job.static_analysis.syntax import Module
from cloudtrain.job.written_paths import hint_of_written_path

PROGRAMS = [
    "torchrun",
    "accelerate launch",
    "accelerate-launch",
    "deepspeed",
    "yolo",
    "ultralytics",
]
MODULES = [
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
]
RAY = ["ray start", "ray job submit"]


def _starts_launcher(call: str) -> bool:
    module = Module(ast.parse(f"import subprocess, sys\nsubprocess.run({call})\n"))
    return find_launcher(module) == 2


@pytest.mark.parametrize("program", [*PROGRAMS, *RAY])
def test_a_command_starts_ranks_wherever_it_is(program: str) -> None:
    words = [*program.split(), "a.py"]
    assert find_rank_starter(words) is not None
    assert find_rank_starter(["env", "A=1", f"/usr/bin/{words[0]}", *words[1:]]) is not None
    assert _starts_launcher(repr(words))
    assert _starts_launcher(repr(" ".join(words)))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_starts_ranks_wherever_it_is(tmp_path: Path, module: str) -> None:
    words = ["python3", "-m", module, "a.py"]
    assert find_rank_starter(words) is not None
    assert _starts_launcher(repr(words))
    assert _starts_launcher(f"[sys.executable, '-m', {module!r}, 'a.py']")
    (tmp_path / "train.py").write_text(f"from {module} import main\nmain(['a.py'])\n")
    assert read_conventions(tmp_path, "train.py").launcher == "train.py:2"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_shell_script_can_hide_the_failure_of_each(tmp_path: Path, program: str) -> None:
    (tmp_path / "run.sh").write_text(f"{program} a.py | tee log.txt\n")
    (found,) = find_hidden_failures(["bash", "run.sh"], tmp_path)
    assert found.startswith("run.sh:1: a pipe has the exit code of tee")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_launcher_before_a_script_is_explained(tmp_path: Path, program: str) -> None:
    (tmp_path / "train.py").touch()
    hint = hint_of_written_path(tmp_path / f"{program} train.py --lr 1", "code.script")
    assert hint.startswith("write train.py alone (cloudtrain starts the ranks)")


@pytest.mark.parametrize("program", [*PROGRAMS, *RAY])
def test_the_end_of_a_launcher_is_no_cause(program: str) -> None:
    text = f"CalledProcessError: Command '{program} a.py' returned non-zero exit status 1."
    found = next(rule for rule in ranks.RULES if rule.match(text) is not None)
    assert found.causality is Causality.CONSEQUENCE


@pytest.mark.parametrize("name", ["deepspeed", "yolo", "ultralytics", "ray of light"])
def test_a_name_in_a_text_starts_no_ranks(name: str) -> None:
    assert not _starts_launcher(repr(name))
    assert not _starts_launcher(repr([name]))
