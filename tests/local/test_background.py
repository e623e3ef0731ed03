"""Processes that outlive a command, and how their starts fail: the sandbox, a run's supervisor, a sweep's controller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.jobs import until

import cloudtrain
from cloudtrain.backends.container import process_tree
from cloudtrain.backends.container.background import start_background
from cloudtrain.backends.sandbox.process import LOG_FILE, start_sandbox
from cloudtrain.client.home import find_home
from cloudtrain.errors import CloudtrainError
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.loader import load_sweep

pytestmark = pytest.mark.processes

JOB = """\
name: print
code: {command: [echo, hello]}
cluster: {instance_type: ml.m5.large}
"""
SWEEP = """\
name: prints
job:
  name: print
  code: {command: [echo, hello], env: {X: "0"}}
  cluster: {instance_type: ml.m5.large}
  metrics: {loss: "loss=([0-9.]+)"}
space: {code.env.X: {choice: ["0", "1"]}}
objective: train/loss
trials: 1
"""
OLD = "a line of an earlier start\n"


@pytest.fixture
def module(tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Return a function that writes a module; it returns the words that start it, and their environment."""

    def write(text: str) -> tuple[list[str], dict[str, str]]:
        (tmp_path / "started_by_test.py").write_text(text)
        return ["started_by_test", str(tmp_path)], {**os.environ, "PYTHONPATH": str(tmp_path)}

    return write


def processes_of(folder: Path) -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(folder) in (each.info["cmdline"] or ())
    ]


def test_a_process_outlives_its_start(
    module: Callable[..., tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    words, env = module(
        "import os, sys, time; print(os.getpid(), os.getsid(0), flush=True); time.sleep(1000)"
    )
    log = tmp_path / "log"
    found = start_background("it", words, log, lambda _: log.read_text().split()[:2], env=env)
    process = psutil.Process(int(found[0]))
    assert found[0] == found[1], "it has a session of its own"
    process.kill()
    process.wait()


def test_an_early_end_shows_what_was_written(
    module: Callable[..., tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(OLD)
    words, env = module("import sys; sys.exit('x' * 3000 + ' no such thing')")
    with pytest.raises(CloudtrainError) as caught:
        start_background("it", words, log, lambda _: None, env=env)
    first, _, rest = caught.value.message.partition("\n")
    assert first == "it did not start:"
    assert rest.endswith("x no such thing")
    assert len(rest) < 2000
    assert caught.value.hint == f"see {log}"
    assert OLD in log.read_text()


def test_an_exit_code_can_count_as_ready(
    module: Callable[..., tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    words, env = module("")
    start_background("it", words, tmp_path / "log", lambda code: code == 0, env=env)


def test_a_process_that_is_late_is_killed(
    module: Callable[..., tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    words, env = module("import time; time.sleep(1000)")
    with pytest.raises(CloudtrainError, match="it did not start within 0s:\n"):
        start_background("it", words, tmp_path / "log", lambda _: None, limit_seconds=0.0, env=env)
    until(lambda: not processes_of(tmp_path))


def start_supervisor(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB)
    cloudtrain.submit(folder / "job.yaml", local=True)


def start_controller(folder: Path) -> None:
    pytest.importorskip("optuna")
    (folder / "sweep.yaml").write_text(SWEEP)
    stored, _ = service.open_sweep(load_sweep(folder / "sweep.yaml"), backend="local")
    stored.log.write_text(OLD)
    service.start(stored)


def start_the_sandbox(folder: Path) -> None:
    pytest.importorskip("moto")
    (folder / LOG_FILE).write_text(OLD)
    start_sandbox(folder)


@pytest.mark.parametrize("start", [start_supervisor, start_controller, start_the_sandbox])
def test_every_failed_start_has_one_form(
    start: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(CloudtrainError) as caught:
        start(tmp_path)
    name, _, rest = caught.value.message.partition(" did not start:\n")
    assert name.startswith(("the local backend", "the controller of prints-", "the sandbox"))
    assert "encodings" in rest
    assert OLD.strip() not in rest, "it is the output of an earlier start"
    log = Path(caught.value.hint.removeprefix("see "))
    assert log.is_file()
    assert find_home() in log.parents or log.parent == tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="waits by descriptors of processes")
def test_the_end_of_a_process_ends_the_wait_for_it() -> None:
    slow = subprocess.Popen(["sleep", "20"])
    fast = subprocess.Popen(["true"])
    try:
        process_tree.wait_for_end([slow, fast], 60.0)
        assert fast.wait() == 0
        assert slow.poll() is None
    finally:
        slow.kill()
        slow.wait()
