"""The tutorials for this machine work as written."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import REPOSITORY, Cli

TUTORIALS = REPOSITORY / "docs" / "tutorial"
PAGE = (TUTORIALS / "first-run.md").read_text()


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


def without_numbers(line: str) -> str:
    """Replace what differs between two runs: ids, sizes, times, losses, spaces."""
    line = re.sub(r"-\d{6}-\d{6}-[0-9a-f]{6}", "-ID", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line)).strip()


def is_shown_in_order(expected: list[str], printed: str) -> bool:
    """Return whether the lines of a page, of which `...` stands for any, are among those printed, in this order."""
    lines = iter([without_numbers(line) for line in printed.splitlines()])
    return all(without_numbers(line) in lines for line in expected if line != "...")


@pytest.mark.processes
def test_the_script_tutorial_prints_what_it_shows(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (TUTORIALS / "script.md").read_text()
    folder = tmp_path / "tutorial"
    folder.mkdir()
    commands = re.findall(
        r"^\$ cloudtrain (.*)\n((?:(?!\$ ).*\n)*)",
        "".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL)),
        re.MULTILINE,
    )
    assert len(commands) == 7
    for command, shown in commands:
        done = cli(*command.split(), cwd=folder if command.startswith("init") else folder / "sine")
        assert done.code == 0, f"{command}: {done.err}"
        assert is_shown_in_order(shown.splitlines(), done.out + done.err), f"{command}:\n{done.out}\n{done.err}"
    monkeypatch.chdir(folder / "sine")
    found: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), found)  # noqa: S102
    assert list(found["history"]["step"])[-1] == 160
    assert [axis.get_title() or axis.get_ylabel() for axis in found["figure"].axes]
