"""Local runs with `--install`: an environment with the job's requirements, without a network."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.code_folders import write_tree
from support.jobs import Cli, Terminal, command
from support.wheels import write_wheel

pytestmark = pytest.mark.processes

JOB = """\
name: demo
code: {directory: code, script: train.py, requirements: requirements.txt}
cluster: {instance_type: ml.m5.large, processes_per_instance: 1}
"""
TRAIN = "import sys, tiny, torch\nprint('seen:', tiny.NAME, torch.__version__, sys.prefix, flush=True)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job whose requirements name a wheel in the code folder."""
    folder = write_tree(tmp_path / "job", code__train_py=TRAIN)
    write_wheel(folder / "code" / "wheels", text="NAME = 'first'\n")
    (folder / "code" / "requirements.txt").write_text("./wheels/tiny-1.0-py3-none-any.whl\n")
    (folder / "job.yaml").write_text(JOB)
    return folder


@pytest.fixture
def home() -> Path:
    """The folder of local runs."""
    return Path(os.environ["CLOUDTRAIN_HOME"])


def environments(home: Path) -> list[Path]:
    """Return the environments below the folder of local runs."""
    return [each.parent for each in (home / "environments").glob("*/cloudtrain-installed")]


def seen(cli: Cli, folder: Path) -> list[str]:
    """Run the job with --install; return what its script has printed."""
    done = cli("submit", folder / "job.yaml", "--local", "--install", "--follow", "--json")
    assert done.code == 0, done.err
    assert "requirements.txt is installed in" in done.err
    return next(
        line.partition("seen: ")[2] for line in done.err.splitlines() if "seen: " in line
    ).split()


def test_an_environment_is_built_once(cli: Cli, folder: Path, home: Path) -> None:
    """The run sees its own package and this environment's torch; a changed wheel gives another environment."""
    import torch

    name, version, prefix = seen(cli, folder)
    assert (name, version) == ("first", torch.__version__)
    assert environments(home) == [Path(prefix)]
    stamp = (Path(prefix) / "cloudtrain-installed").stat()
    assert seen(cli, folder)[2] == prefix
    assert (Path(prefix) / "cloudtrain-installed").stat() == stamp
    write_wheel(folder / "code" / "wheels", text="NAME = 'second'\n")
    name, _, other = seen(cli, folder)
    assert name == "second"
    assert other != prefix


def test_a_pipe_gets_a_line_when_pip_begins(cli: Cli, folder: Path) -> None:
    lines = [
        cli("submit", folder / "job.yaml", "--local", "--install").err.splitlines()
        for _ in range(2)
    ]
    assert [each.count("installing requirements.txt") for each in lines] == [1, 0]


def test_a_terminal_gets_what_pip_does(folder: Path) -> None:
    words = ["submit", str(folder / "job.yaml"), "--local", "--install"]
    terminal = Terminal([str(command()), *words], {**os.environ, "TERM": "xterm"})
    assert terminal.end() == 0, terminal.text
    assert "installing requirements.txt  Installing collected packages" in terminal.text
    assert "Processing ./wheels" not in terminal.text


def test_an_interrupted_installation_is_done_again(cli: Cli, folder: Path, home: Path) -> None:
    prefix = Path(seen(cli, folder)[2])
    (prefix / "cloudtrain-installed").unlink()
    for module in prefix.glob("lib/python*/site-packages/tiny.py"):
        module.unlink()
    assert seen(cli, folder)[2] == str(prefix)
    assert environments(home) == [prefix]


def test_concurrent_submits_build_one_environment(cli: Cli, folder: Path, home: Path) -> None:
    outputs: list[list[str]] = []
    threads = [threading.Thread(target=lambda: outputs.append(seen(cli, folder))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 2
    assert outputs[0] == outputs[1]
    assert len(environments(home)) == 1


def test_the_error_of_pip_is_shown(cli: Cli, folder: Path, home: Path) -> None:
    (folder / "code" / "requirements.txt").write_text(
        "./wheels/tiny-1.0-py3-none-any.whl\n./missing.whl\n"
    )
    done = cli("submit", folder / "job.yaml", "--local", "--install")
    assert done.code == 2
    assert "pip could not install requirements.txt; nothing was started" in done.err
    assert "missing.whl" in done.err
    assert environments(home) == []
    assert not (home / "runs").exists()


def test_a_resumed_run_installs_too(cli: Cli, small: Callable[..., Path]) -> None:
    job = small()
    task = job.parent / "small.py"
    task.write_text("import tiny\n" + task.read_text())
    write_wheel(job.parent / "wheels", text="NAME = 'first'\n")
    (job.parent / "requirements.txt").write_text("./wheels/tiny-1.0-py3-none-any.whl\n")
    job.write_text(job.read_text().replace("code: {", "code: {requirements: requirements.txt, "))
    first = cli("submit", job, "--local", "--install", "--follow", "--json")
    assert first.code == 0, first.err
    second = cli("resume", first.json["run"], "--set", "train.epochs=4", "--follow", "--json")
    assert second.code == 0, second.err
    assert "requirements.txt is installed in" in second.err


def test_without_install_a_plan_names_the_option(cli: Cli, folder: Path) -> None:
    decisions = cli("plan", folder / "job.yaml", "--local", "--json").json["decisions"]
    assert (
        "requirements.txt is not installed: the run uses this environment (or submit with --install)"
        in decisions
    )


def test_other_targets_refuse_to_install(cli: Cli, folder: Path) -> None:
    for target in ("sandbox", "sagemaker"):
        done = cli("submit", folder / "job.yaml", "--backend", target, "--install")
        assert done.code == 2
        assert f"--install is for runs without containers, not for {target}" in done.err
