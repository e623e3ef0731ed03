"""Agents of a host whose workers run whatever a test writes, and the processes of these agents."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import WORKER_SCRIPT, CheckpointConfig, MlTree, RunConfig
from support.jobs import until

HEAD = """
import os, signal, sys, time
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
is_forked = "torch._dynamo" in sys.modules
def write(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def start(
    folder: Path,
    worker: str,
    *,
    ranks: int = 2,
    restarts: int = 0,
    kind: str = "task",
    **environ: str,
) -> subprocess.Popen[str]:
    """Start an agent whose workers run this code."""
    (folder / WORKER_SCRIPT).write_text(HEAD + worker)
    _write_run(folder, kind)
    port = free_port()
    arguments = [
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
    ]
    arguments += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=t", "--rdzv-conf=is_host=true"]
    arguments += ["--local-addr=127.0.0.1", WORKER_SCRIPT]
    shared = {
        "CLOUDTRAIN_ML_ROOT": str(folder),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cloudtrain_runtime.launcher.agent", *arguments],
            cwd=folder,
            env={**os.environ, **shared, **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _write_run(folder: Path, kind: str) -> None:
    """Write the run.json of a Task or of a script."""
    task, script = ("train:Task", None) if kind == "task" else (None, "train.py")
    checkpoint = CheckpointConfig("", 600, None, 3, "auto")
    config = RunConfig("t", task, script, [], None, 2, "torch_distributed", 0, None, checkpoint)
    path = MlTree(folder).run_config
    path.parent.mkdir(parents=True)
    path.write_text(config.to_json())


def run(folder: Path, worker: str, **options: Any) -> tuple[int, str]:
    """Run an agent to its end; return its exit code and its output."""
    code = start(folder, worker, **options).wait(300)
    return code, (folder / "log").read_text()


def written(folder: Path, word: str, count: int = 1) -> list[list[str]]:
    """Wait until workers have written lines that begin with a word; return the rest of these lines."""
    log = folder / "log"
    return until(
        lambda: (
            (f := [x.split()[1:] for x in log.read_text().splitlines() if x.startswith(word)])[
                count - 1 :
            ]
            and f
        )
    )


def living(folder: Path) -> list[psutil.Process]:
    """Return the processes of a test's agent that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("CLOUDTRAIN_ML_ROOT") == str(folder)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
