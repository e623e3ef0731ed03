"""The tutorials for this machine work as written."""

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import REPOSITORY, Cli, Terminal

TUTORIALS = REPOSITORY / "docs" / "tutorial"
PAGE = (TUTORIALS / "first-run.md").read_text()


def block(language: str, start: str) -> str:
    (found,) = re.findall(rf"```{language}\n({re.escape(start)}.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


@pytest.mark.processes
def test_tutorial_fails_explains_and_resumes(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        block("yaml", "name: spiral"),
        spiral_py=block("python", "import torch\nfrom torch import nn"),
    )
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
    """Replace what differs between two runs: ids, sizes, times, phases, losses, curves, spaces."""
    line = re.sub(r"-\d{6}-\d{6}-[0-9a-f]{6}", "-ID", line)
    line = re.sub(r"\b[0-9a-f]{6}\b", "ID", line)
    line = re.sub(r"( succeeded in \w+) .*", r"\1", line)
    line = re.sub(r"[▁▂▃▄▅▆▇█]+(  best .* at step \d+)?", "▁", line)
    # On a slow machine 22s is 1m5s.
    line = re.sub(r"\b(\d+[hms])+\b", "TIME", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line)).strip()


def is_shown_in_order(expected: list[str], printed: str) -> bool:
    """Return whether the lines of a page, of which `...` stands for any, are among those printed, in this order."""
    lines = iter([without_numbers(line) for line in printed.splitlines()])
    return all(without_numbers(line) in lines for line in expected if line != "...")


NOTEBOOK = """
import sys
import cloudtrain, nbclient, nbformat
from traitlets.config import Config

kernel = Config(KernelManager={"transport": "ipc", "ip": sys.argv[2]})
texts = (open(sys.argv[1]).read(), "figure", "print(list(history['step'])[-1])")
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in texts])
nbclient.NotebookClient(notebook, timeout=300, config=kernel).execute()
(figure,) = [each["data"] for each in notebook.cells[1].outputs if "data" in each]
print(cloudtrain.__file__, "image/png" in figure, notebook.cells[2].outputs[0]["text"].strip())
"""


@pytest.fixture
def session(tmp_path: Path) -> Callable[[list[str]], list[str]]:
    """Return a function that types commands into one shell in an empty folder, and returns the output of each.

    The wheel of this repository takes the place of the clone, which pip would need a network to build. The packages that
    it needs are those of this environment.
    """
    wheels, packages, folder = tmp_path / "wheels", tmp_path / "packages", tmp_path / "tutorial"
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(wheels),
    ]
    subprocess.run([*build, str(REPOSITORY)], check=True)
    packages.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith("cloudtrain"):
            (packages / each.name).symlink_to(each)
    folder.mkdir()
    (tmp_path / "packages.pth").write_text(f"{packages}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pip = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    (wheel,) = wheels.iterdir()

    def type_in(commands: list[str]) -> list[str]:
        lines = ["set -e", "exec 2>&1"]
        for command in commands:
            lines += ["echo @@@", command.replace("PATH/TO/THE/CLONE", str(wheel))]
            if " -m venv " in command:
                # Up to Python 3.11 a new environment has an old setuptools.
                lines += [
                    f"cd .venv/lib/python3.*/site-packages && rm -rf setuptools* && cp {tmp_path}/packages.pth ."
                ]
                lines += ["cd ../../../.."]
        script = "\n".join(lines)
        environ = {**os.environ, "PATH": path, **pip}
        program = ["/usr/bin/env", "-C", str(folder), "bash", "-c", script]
        terminal = Terminal(program, {**environ, "TERM": "xterm-256color"}, columns=100)
        code = terminal.end()
        shown = "\n".join(terminal.screen) + "\n"
        assert code == 0, shown
        return shown.split("@@@\n")[1:]

    return type_in


@pytest.mark.processes
def test_the_script_tutorial_prints_what_it_shows(
    session: Callable[[list[str]], list[str]], socket_path: Path, tmp_path: Path
) -> None:
    """From the installation of the wheel in a new environment to the curves in a notebook."""
    page = (TUTORIALS / "script.md").read_text()
    blocks = "".join(re.findall(r"```console\n(.*?)```", page, re.DOTALL))
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", blocks, re.MULTILINE)
    assert [command.split()[0] for command, _ in commands] == [
        "python3",
        ".",
        "pip",
        *["cloudtrain"] * 2,
        "cd",
        *["cloudtrain"] * 6,
    ]
    (tmp_path / "cells.py").write_text(
        "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    )
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    *printed, notebook = session(
        [
            *(command for command, _ in commands),
            f"python {tmp_path}/notebook.py {tmp_path}/cells.py {socket_path}",
        ]
    )
    for (command, expected), text in zip(commands, printed, strict=True):
        assert is_shown_in_order(expected.splitlines(), text), f"{command}:\n{text}"
    module, has_figure, last = notebook.split()[-3:]
    assert module.startswith(f"{tmp_path}/tutorial/.venv/lib/")
    assert (has_figure, last) == ("True", "160")
