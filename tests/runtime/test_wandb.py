"""Weights & Biases by its real package: offline files over crashes and lost hosts, and a server that hangs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, processes_of, until
from support.wandb_files import OfflineRun, read_offline
from support.wandb_server import ENTITY, serve_wandb

from cloudtrain_runtime.contract import GRACE_VARIABLE, parse_event

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("wandb") is None, reason="NOT TESTED: wandb is not installed here"
    ),
]

JOB = """\
name: tracked
code:
  task: "tracked:Tracked"
  args: {width: 3}
  env: {CLOUDTRAIN_LOG_EVERY_STEPS: 1, FAIL_AT: -1, WAIT_AT: -1, KILL_AT: -1, MARKS: FOLDER}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
train: {steps: 40, batch_size: 4, learning_rate: 0.05, evaluate: {every: 20 steps}}
checkpoint: {every: 10 steps, keep: 5}
tracking: {wandb: {mode: offline, project: demo}}
"""
TASK = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset
from cloudtrain_runtime import Task, context

class Tracked(Task):
    def __init__(self, width):
        self.width = width

    def model(self):
        return nn.Linear(self.width, 1)

    def datasets(self):
        inputs = torch.randn(50, self.width, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        return {"train": Subset(data, range(44)), "validation": Subset(data, range(44, 50))}

    def loss(self, model, batch):
        step = context().step
        if step == int(os.environ["FAIL_AT"]) and model.training:
            raise ValueError("it fails here")
        if step == int(os.environ["WAIT_AT"]) and model.training:
            while not (Path(os.environ["MARKS"]) / "go").exists():
                time.sleep(0.02)
        if step == int(os.environ["KILL_AT"]) and not context().restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(model(batch[0]), batch[1])
"""
SCRIPT_JOB = """\
name: scripted
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, processes_per_instance: 1}
metrics: {step: 'step (\\d+)', loss: 'loss ([0-9.]+)'}
tracking: {wandb: {mode: offline}}
"""
SCRIPT = """
for step in range(1, 6):
    print(f"step {step} loss {1 / step}", flush=True)
"""


def write(job: Callable[..., Path], tmp_path: Path) -> Path:
    return job(JOB.replace("FOLDER", str(tmp_path)), tracked_py=TASK)


def folder_of(tmp_path: Path, run: str) -> Path:
    return tmp_path / "runs-home" / "runs" / run / "wandb"


def events(cli: Cli, run: str, kind: str) -> list[dict[str, Any]]:
    found = (parse_event(line["text"]) for line in cli("logs", run, "--json").json["lines"])
    return [event for event in found if event and event["event"] == kind]


def require_each_step_once(found: OfflineRun, run: str) -> None:
    assert found.ids == {run}
    assert found.steps == list(range(1, 41))
    assert list(found.values("train/loss")) == list(range(1, 41))
    assert list(found.values("validation/loss")) == [20, 40]
    assert found.config["args"] == {"width": 3}
    assert found.config["train"]["learning_rate"] == 0.05
    assert "cpu" in found.measured or "memory_percent" in found.measured


def test_a_failed_and_resumed_task_logs_each_step_once(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    failed = cli(
        "submit", write(job, tmp_path), "--local", "--json", "--follow", "--set=code.env.FAIL_AT=34"
    )
    assert failed.code == 4, failed.err
    first = failed.json["run"]
    before = read_offline(folder_of(tmp_path, first))
    assert before.steps == list(range(1, 35)), cli("logs", first).out
    done = cli("resume", first, "--follow", "--json", "--set=code.env.FAIL_AT=-1")
    assert done.code == 0, done.err
    assert done.json["first_step"] == 30, "it repeats steps"

    found = read_offline(folder_of(tmp_path, first))
    require_each_step_once(found, first)
    assert found.rows[:34] == before.rows, "the repeated steps keep their first values"
    assert found.exit_codes == [1, 0]
    assert found.resumes == {True}
    assert found.config["cloudtrain"]["run"] == done.json["run"]
    assert done.json["tracking"] == {"wandb": folder_of(tmp_path, first).as_uri()}
    assert "tracking" in cli("status", done.json["run"]).out


def test_a_lost_host_leaves_the_steps_to_its_checkpoint(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    run = cli(
        "submit", write(job, tmp_path), "--local", "--json", "--set=code.env.WAIT_AT=22"
    ).json["run"]
    state = folder_of(tmp_path, run) / f"{run}.json"

    def has_saved() -> bool:
        values = json.loads(state.read_text())["pending"] if state.exists() else []
        return any(each["step"] == 20 for each in values)

    until(has_saved)
    for process in processes_of(run):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    until(lambda: cli("status", run, "--json").json["exit_code"] is not None)
    assert read_offline(folder_of(tmp_path, run)).rows == [], "what was not complete is lost"
    done = cli("resume", run, "--follow", "--json", "--set=code.env.WAIT_AT=-1")
    assert done.code == 0, done.err
    assert done.json["first_step"] == 20
    require_each_step_once(read_offline(folder_of(tmp_path, run)), run)


def test_a_killed_rank_loses_and_repeats_no_step(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    changes = ("--set=code.env.KILL_AT=24", "--set=limits.retries=1")
    done = cli("submit", write(job, tmp_path), "--local", "--json", "--follow", *changes)
    assert done.code == 0, done.err
    found = read_offline(folder_of(tmp_path, done.json["run"]))
    require_each_step_once(found, done.json["run"])
    assert found.exit_codes == [0]


def test_the_metrics_of_a_script_are_logged(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    done = cli("submit", job(SCRIPT_JOB, train_py=SCRIPT), "--local", "--json", "--follow")
    assert done.code == 0, done.err
    found = read_offline(folder_of(tmp_path, done.json["run"]))
    assert found.values("train/loss")[5] == 0.2
    assert found.exit_codes == [0]


def online(url: str, *more: str) -> list[str]:
    """Return the changes of the job that log it to a server, with a key of the environment."""
    values = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "{secret: team/wandb}"}
    changes = [f"--set=code.env.{name}={value}" for name, value in values.items()]
    return [*changes, "--set=tracking.wandb.mode=online", *more]


def test_an_online_run_is_continued_where_it_is(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with serve_wandb() as server:
        changes = online(server.url, "--set=code.env.FAIL_AT=34")
        failed = cli("submit", write(job, tmp_path), "--local", "--json", "--follow", *changes)
        assert failed.code == 4, failed.err
        first = failed.json["run"]
        kept = server.runs["demo", first]
        assert kept.steps == list(range(1, 35))
        before = list(kept.rows)
        done = cli("resume", first, "--follow", "--json", "--set=code.env.FAIL_AT=-1")
        assert done.code == 0, done.err
    assert list(server.runs) == [("demo", first)]
    assert kept.steps == list(range(1, 41))
    assert kept.rows[:34] == before, "the repeated steps keep their first values"
    assert kept.exit_codes == [1, 0]
    link = f"{server.url}/{ENTITY}/demo/runs/{first}"
    assert done.json["tracking"] == {"wandb": link}
    assert link in cli("status", done.json["run"]).out
    assert "a" * 40 not in cli("logs", done.json["run"]).out


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            for connection, _ in kept:
                connection.close()


def test_a_server_that_hangs_does_not_fail_a_run(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    with silent_server() as url:
        path = write(job, tmp_path)
        changes = online(url, "--set=code.env.WANDB_INIT_TIMEOUT=2")
        done = cli("submit", path, "--local", "--json", "--follow", *changes)
        assert (done.code, done.json["last_step"]) == (0, 40), done.err
    run = done.json["run"]
    first, last = events(cli, run, "tracking")
    assert f"Weights & Biases at {url} takes no values, they are kept" in first["detail"]
    assert last["dropped"] > 40
    assert "values were not logged to Weights & Biases" in cli("status", run).out
    assert not processes_of(run)
    assert "a" * 40 not in cli("logs", run).out


def test_a_stopped_run_ends_within_its_grace_time(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that ends later is killed, and then nothing says how the run has ended."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv(GRACE_VARIABLE, "20")
    with silent_server() as url:
        changes = online(url, "--set=train.steps=1000000", "--set=checkpoint.every=1000000 steps")
        run = cli("submit", write(job, tmp_path), "--local", "--json", *changes).json["run"]
        until(lambda: (cli("status", run, "--json").json["last_step"] or 0) > 10)
        assert cli("stop", run, "--wait", "--json").json["state"] == "STOPPED"
    assert "the process of the trackers was killed" in events(cli, run, "tracking")[-1]["detail"]
    assert not processes_of(run)


KILLED = """
import json, os, sys, time
import psutil
from pathlib import Path
from cloudtrain_runtime.contract import CheckpointConfig, RunConfig, TrackingConfig
from cloudtrain_runtime.metrics.tracking.tracker import Ending, Value
from cloudtrain_runtime.metrics.tracking.wandb import WandbTracker
folder = Path(sys.argv[1])
config = RunConfig(
    run="demo", task="mine:Mine", script=None, args={}, requirements=None, processes_per_instance=1,
    distribution="torch_distributed", max_restarts=0, train=None,
    checkpoint=CheckpointConfig("", None, None, 1, "auto"),
    tracking=TrackingConfig(wandb="offline", files=(folder / "kept").as_uri()),
)
(folder / "own").mkdir()
tracker = WandbTracker(config, folder / "own")
tracker.connect({})
tracker.log([Value("train/loss", 0.5, 1.0, step) for step in (1, 2)])
for child in psutil.Process().children(recursive=True):
    child.kill()
    child.wait()
values = [Value("train/loss", 0.25, 2.0, 3), Value("test/loss", 0.75, 2.0, 1)]
for _ in range(100):
    try:
        tracker.log(values)
    except Exception as error:
        print("failed", type(error).__name__)
        continue
    break
tracker.end(Ending.FINISHED)
os._exit(0)
"""


def test_a_killed_service_process_loses_no_value(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed" in done.stdout
    found = read_offline(tmp_path / "kept")
    assert found.values("train/loss") == {1: 0.5, 2: 0.5, 3: 0.25}
    # The service's steps only rise: a value of an earlier step has its own step beside it.
    assert found.values("test/loss") == {3: 0.75}
    assert found.values("test/step") == {3: 1}
