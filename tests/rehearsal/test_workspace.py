"""The folder of a rehearsal, its options, and how its result is printed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import cloudtrain
from cloudtrain.features.rehearsal.rehearse import RehearsalOptions
from cloudtrain.features.rehearsal.workspace import Workspace

pytestmark = pytest.mark.processes

# Opens the workspace of a rehearsal, starts a process of it, and waits.
OPEN = """\
import subprocess, sys, time
from pathlib import Path
from cloudtrain.features.rehearsal.workspace import Workspace
from cloudtrain_runtime.contract import INSTANCE_VARIABLE

with Workspace(Path(sys.argv[1]), keep=False) as workspace:
    environ = {INSTANCE_VARIABLE: str(workspace.folder / "ml")}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environ)
    print(workspace.folder, child.pid, flush=True)
    time.sleep(600)
"""
SHOW = """\
from cloudtrain.features.rehearsal.output import print_rehearsal
from cloudtrain.support.checks import Check, Result
from cloudtrain.features.rehearsal.report import Rehearsal

checks = (Check("starts", Result.PASS, "the code was imported"), Check("network", Result.UNKNOWN, "word " * 30))
print_rehearsal(Rehearsal(checks), "job.yaml")
"""


def open_workspace(home: Path) -> tuple[subprocess.Popen[str], Path, psutil.Process]:
    """Return a process with an open workspace, its folder, and a process of the rehearsal."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(home)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder, pid = process.stdout.readline().split()
    return process, Path(folder), psutil.Process(int(pid))


def test_what_a_killed_rehearsal_has_left_is_deleted(tmp_path: Path) -> None:
    killed, left, child = open_workspace(tmp_path)
    with Workspace(tmp_path, keep=True) as kept:
        pass
    with Workspace(tmp_path, keep=False) as live:
        assert left.is_dir()
        with killed:
            killed.kill()
        assert child.is_running()
        with Workspace(tmp_path, keep=False):
            assert not left.exists()
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
            assert live.folder.is_dir()
            assert kept.folder.is_dir()
    assert [*kept.folder.parent.iterdir()] == [kept.folder]


@pytest.mark.parametrize(
    "option", [{"minutes": value} for value in (0, -1, float("nan"), float("inf"), "5")]
)
def test_minutes_have_a_range(option: dict[str, object]) -> None:
    with pytest.raises(
        cloudtrain.UserError, match=r"minutes: expected a number from 0\.1 to 10080"
    ):
        cloudtrain.rehearse("job.yaml", **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"sample": "abc"}, {"seed": -1}, {"seed": 1.5}])
def test_wrong_options_are_errors_of_the_user(option: dict[str, object]) -> None:
    with pytest.raises(cloudtrain.UserError, match="expected") as error:
        RehearsalOptions(**option)  # type: ignore[arg-type]
    assert error.value.hint


def test_ctrl_c_leaves_nothing_and_says_so(tmp_path: Path, job: Callable[..., Path]) -> None:
    text = "name: small\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge, instances: 2}\n"
    path = job(text, train_py="import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "cloudtrain", "rehearse", str(path)]
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("rehearsal:")
        process.send_signal(signal.SIGINT)
        left = process.stderr.read()
    assert process.returncode == 130, left
    assert "its folder is deleted" in left
    assert "cloudtrain list" not in left
    assert [*(tmp_path / "home" / "rehearsals").iterdir()] == []


def test_details_are_indented_on_a_terminal() -> None:
    plain = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True
    ).stdout
    assert plain.splitlines()[1] == "unknown  network  " + ("word " * 30)
    assert plain.splitlines()[2].startswith("verdict: unknown")
    above, below = pty.openpty()
    environ = {**os.environ, "COLUMNS": "60", "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen([sys.executable, "-c", SHOW], stdout=below, env=environ) as process:
        os.close(below)
        shown = b""
        while part := _read(above):
            shown += part
    os.close(above)
    assert process.returncode == 0
    lines = shown.decode().replace("\r", "").splitlines()
    start = lines[1].index("word")
    assert len(lines) > 5
    assert all(line.startswith(" " * start + "word") for line in lines[2:4])
    assert max(map(len, lines[:4])) <= 60


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 10_000)
    except OSError:  # Linux: the other side is closed
        return b""
