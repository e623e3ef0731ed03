"""The process that watches local runs, started before there is one: it is used, or nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support import Cli, until

from cloudtrain import supervisor


@pytest.fixture
def started(tmp_path: Path) -> Callable[[], tuple[subprocess.Popen[bytes], str]]:
    """Start one for a folder without a job, which is what it ends with; return it and what it has written."""
    folder, log = tmp_path / "run", tmp_path / "run" / "supervisor.log"
    folder.mkdir()

    def start() -> tuple[subprocess.Popen[bytes], str]:
        process = supervisor.start(folder, log)
        assert process.wait(60) == 1
        return process, log.read_text()

    return start


def waiting() -> set[int]:
    """Return the ids of those that this process has started and that wait for a folder."""
    found = (each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE)
    return {each.pid for each in found if each.cmdline()[1:] == ["-P", "-m", "cloudtrain.container"]}


def test_the_one_that_waits_is_told_the_folder(
    started: Callable[[], tuple[subprocess.Popen[bytes], str]], tmp_path: Path
) -> None:
    with supervisor.ahead():
        (pid,) = until(waiting)
        process, log = started()
    assert process.pid == pid
    assert f"No such file or directory: '{tmp_path}/run/request.json'" in log


@pytest.mark.parametrize("reason", ["environment", "death"])
def test_it_is_not_told_where_another_would_be_started_now(
    started: Callable[[], tuple[subprocess.Popen[bytes], str]], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with supervisor.ahead():
        (pid,) = until(waiting)
        if reason == "environment":
            monkeypatch.setenv("AWS_PROFILE", "other")
        else:
            os.kill(pid, signal.SIGKILL)
            until(lambda: waiting() == set())
        process, log = started()
        assert waiting() == set()
    assert process.pid != pid
    assert "request.json" in log


def test_nothing_is_left_where_no_run_comes(started: Callable[[], tuple[subprocess.Popen[bytes], str]]) -> None:
    with supervisor.ahead():
        (pid,) = until(waiting)
    assert not psutil.pid_exists(pid)
    seen = set()

    def refuse() -> None:
        with supervisor.ahead():
            seen.update(until(waiting))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        refuse()
    assert len(seen) == 1
    assert waiting() == set()
    assert started()[0].pid not in {pid, *seen}


def test_it_ends_with_the_one_that_has_started_it() -> None:
    code = (
        "import os, psutil; from cloudtrain import supervisor\n"
        "with supervisor.ahead():\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(int(done.stdout)))


def test_a_job_that_is_refused_leaves_no_process(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("nam: x\n")
    done = cli("submit", tmp_path / "job.yaml", "--local", environ={"WHOSE": str(tmp_path)})
    assert done.code == 2
    assert not [each for each in psutil.process_iter() if _is_of(each, str(tmp_path))]


def _is_of(process: psutil.Process, whose: str) -> bool:
    try:
        return process.environ().get("WHOSE") == whose
    except psutil.Error:
        return False
