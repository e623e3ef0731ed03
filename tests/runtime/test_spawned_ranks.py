"""Ranks that a script spawns end without the interpreter's shutdown, and with their own exit code and handlers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ENTRYPOINTS = str(Path(__file__).parents[2] / "entrypoints")

START = f"""
import sys
sys.path.append({ENTRYPOINTS!r})
from cloudtrain_runtime.launcher import spawned_ranks
spawned_ranks.skip_shutdown()
"""

SCRIPT = """
import atexit, multiprocessing, os, sys, threading, time
from multiprocessing.util import Finalize
import torch.multiprocessing as mp

class Mark:
    def __del__(self, write=os.write):
        write(1, b"shutdown\\n")

def train(index, wanted):
    sys.mark = Mark()
    atexit.register(print, "handler", index)
    Finalize(None, print, ("finalizer", index), exitpriority=0)
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread", index))).start()
    if index == wanted:
        raise ValueError("as wanted")

if __name__ == "__main__":
    method = sys.argv[2]
    mp.start_processes(train, (int(sys.argv[1]),), nprocs=2, start_method=method)
"""


def run(
    folder: Path, wanted: int, method: str, start: str = START
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(start)
    (folder / "script.py").write_text(SCRIPT)
    # Each process writes its lines at its end, at once: those of two processes do not mix.
    return subprocess.run(
        [sys.executable, folder / "script.py", str(wanted), method],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_spawned_rank_skips_only_the_shutdown(tmp_path: Path) -> None:
    done = run(tmp_path, wanted=-1, method="spawn")
    assert done.returncode == 0, done.stderr
    expected = [
        f"{kind} {index}" for kind in ("finalizer", "handler", "thread") for index in (0, 1)
    ]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_plain_spawned_rank_shuts_down(tmp_path: Path) -> None:
    # What the test above would miss if Python ended spawned processes in another way.
    assert "shutdown" in run(tmp_path, wanted=-1, method="spawn", start="").stdout


def test_a_failed_spawned_rank_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, wanted=1, method="spawn")
    assert done.returncode == 1
    assert "ValueError: as wanted" in done.stderr


def test_forked_ranks_keep_their_end(tmp_path: Path) -> None:
    done = run(tmp_path, wanted=-1, method="fork")
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stdout.splitlines() if not line.startswith("thread")]
    assert sorted(ends) == ["finalizer 0", "finalizer 1"]
