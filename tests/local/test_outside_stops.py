"""Signals that cloudtrain did not send: to all processes of a run, as Slurm and a logout do, or to its launchers."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import Cli, processes_of, until

from cloudtrain.runs.early_end import early_end
from cloudtrain.runs.progress import fold_events

pytestmark = pytest.mark.processes

SCRIPT_JOB = """
name: loading
code: {script: train.py}
cluster: {instance_type: ml.m5.large, instances: 2, processes_per_instance: 1}
limits: {runtime: 10m}
"""
SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import torch.distributed as dist
from cloudtrain_runtime import checkpoint

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
loader = DataLoader(TensorDataset(torch.zeros(100_000, 2)), batch_size=1, num_workers=1)
for step, (x,) in enumerate(loader, 1):
    model(x).sum().backward()
    checkpoint.save(step, model=model)
    if step == 3:
        print("IN THE LOOP", flush=True)
    if checkpoint.should_stop():
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""
PLAIN = "import time\nprint('IN THE LOOP', flush=True)\ntime.sleep(600)\n"


def is_launcher(words: list[str]) -> bool:
    return "cloudtrain_runtime.launch" in words


def is_of_host(words: list[str]) -> bool:
    return "cloudtrain.backends.container" not in words


def stop_from_outside(
    cli: Cli, run: str, sent: signal.Signals, chosen: Callable[[list[str]], bool]
) -> None:
    """Send a signal to those of a run's processes whose command is chosen; wait for the end of the run."""
    for process in processes_of(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            if chosen(process.cmdline()):
                process.send_signal(sent)
    until(lambda: cli("status", run, "--json").json["state"] in ("STOPPED", "FAILED", "SUCCEEDED"))


def stopped_task(
    cli: Cli, job: Path, sent: signal.Signals, chosen: Callable[[list[str]], bool]
) -> dict[str, Any]:
    """Stop a Task on two instances, check what it has saved, and return its status."""
    options = ["--instances", "2", "--set", "train.epochs=5000", "--set", "checkpoint.every=1h"]
    run = cli("submit", job, "--local", "--json", *options).json["run"]
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 2)
    stop_from_outside(cli, run, sent, chosen)
    found = cli("status", run, "--json").json
    assert found["state"] == "STOPPED", found
    assert found["reason"].startswith("stopped by a signal from outside after step ")
    assert found["exit_code"] == 5
    assert found["last_checkpoint"]["step"] == found["last_step"]
    assert processes_of(run) == []
    return found


@pytest.mark.parametrize(
    ("sent", "chosen"), [(signal.SIGHUP, is_of_host), (signal.SIGTERM, is_launcher)]
)
def test_a_task_that_is_stopped_from_outside_saves(
    cli: Cli,
    small: Callable[..., Path],
    sent: signal.Signals,
    chosen: Callable[[list[str]], bool],
) -> None:
    stopped_task(cli, small(seconds=0.05), sent, chosen)


def test_a_task_continues_where_it_was_stopped_from_outside(
    cli: Cli, small: Callable[..., Path]
) -> None:
    found = stopped_task(cli, small(seconds=0.05), signal.SIGTERM, is_of_host)
    run = found["run"]
    assert "stopped by a signal from outside" in cli("list").out
    explained = cli("explain", run).out
    assert "Something else than cloudtrain has stopped it" in explained
    length = ["--set", "train.epochs=null", "--set", f"train.steps={found['last_step'] + 1}"]
    more = cli("resume", run, *length, "--json")
    assert more.code == 0, more.err
    assert cli("follow", more.json["run"], "--json").json["state"] == "SUCCEEDED"


def test_a_script_keeps_its_loader_workers_until_it_has_saved(
    cli: Cli, job: Callable[..., Path]
) -> None:
    run = cli("submit", job(SCRIPT_JOB, train_py=SCRIPT), "--local", "--json").json["run"]
    until(lambda: "IN THE LOOP" in cli("logs", run, "--raw").out)
    stop_from_outside(cli, run, signal.SIGTERM, is_of_host)
    found = cli("status", run, "--json").json
    assert found["state"] == "STOPPED", cli("logs", run, "--raw").out
    assert found["last_checkpoint"]["step"] >= 3


def test_a_script_that_is_ended_by_a_signal_has_not_failed(
    cli: Cli, job: Callable[..., Path]
) -> None:
    run = cli("submit", job(SCRIPT_JOB, train_py=PLAIN), "--local", "--json").json["run"]
    until(lambda: "IN THE LOOP" in cli("logs", run, "--raw").out)
    stop_from_outside(cli, run, signal.SIGTERM, is_of_host)
    found = cli("status", run, "--json").json
    assert (found["state"], found["reason"]) == (
        "STOPPED",
        "stopped by a signal from outside (SIGTERM)",
    )


STARTED = {"event": "started", "total_steps": 100, "world_size": 2}
STEP = {"event": "step", "step": 70}
STOPPED = {"event": "stopped", "step": 70}


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([STARTED, STEP], ""),
        ([STARTED, STEP, STOPPED], "stopped by a signal from outside after step 70 of 100"),
        (
            [STEP, STOPPED, {"event": "stopped", "host": "algo-2", "signal": "SIGTERM"}],
            "stopped by a signal from outside (SIGTERM) after step 70",
        ),
        ([STARTED, STOPPED, {"event": "finished", "step": 100}], ""),
        ([STARTED, STOPPED, {"event": "started", "total_steps": 100, "step": 70}], ""),
        ([STARTED, {"event": "stopped", "step": 100}], ""),
        ([STARTED, STOPPED, {"event": "failed", "message": "broken", "secondary": False}], ""),
        (
            [STARTED, STOPPED, {"event": "failed", "message": "lost", "secondary": True}],
            "stopped by a signal from outside after step 70 of 100",
        ),
        (
            [{"event": "stopped", "host": "algo-1", "signal": "SIGHUP"}],
            "stopped by a signal from outside (SIGHUP)",
        ),
    ],
)
def test_what_counts_as_an_early_end(events: list[dict[str, object]], reason: str) -> None:
    assert early_end(fold_events(events)) == reason


LATE_NOTICE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.launch import _Stop

tree = MlTree(Path(sys.argv[1]))
stop = _Stop(tree)
agent = subprocess.Popen(["sleep", "1"])
stop.set_target(agent)
if sys.argv[2] == "stopped":
    tree.stopped_early.touch()
os.kill(os.getpid(), signal.SIGTERM)
print(agent.wait())
"""


@pytest.mark.parametrize(("ranks", "code"), [("stopped", 0), ("start", -signal.SIGTERM)])
def test_ranks_that_another_host_has_stopped_are_not_ended(
    tmp_path: Path, ranks: str, code: int
) -> None:
    # The agents of hosts wait for each other at their end.
    (tmp_path / "output").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LATE_NOTICE, str(tmp_path), ranks],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) == code
