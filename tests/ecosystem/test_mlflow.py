"""Runs that a real MLflow server tracks: continuous curves over a stop and a restart. `make test-all`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.jobs import REPOSITORY, Cli, until
from support.mlflow_server import logged_artifact, logged_values, serve_mlflow, tracked_runs

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import parse_event

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own
    pytest.mark.skipif(
        importlib.util.find_spec("mlflow") is None,
        reason="NOT TESTED: MLflow is not installed here (make test-all)",
    ),
]

JOB = """\
name: tracked
code: {task: "tracked:Tracked", args: {width: 3}, env: {CLOUDTRAIN_LOG_EVERY_STEPS: 1, WAIT_AT: -1, KILL_AT: -1}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
train: {steps: 40, batch_size: 4, learning_rate: 0.05, evaluate: {every: 20 steps}}
checkpoint: {every: 10 steps, keep: 5}
tracking: {mlflow: SERVER}
"""
TASK = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset
from cloudtrain_runtime import Task, context
from cloudtrain_runtime.process.environment import ml_tree

class Tracked(Task):
    def __init__(self, width):
        self.width = width
        self.folder = Path(os.environ["MARKS"])

    def model(self):
        return nn.Linear(self.width, 1)

    def datasets(self):
        inputs = torch.randn(50, self.width, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        return {"train": Subset(data, range(44)), "validation": Subset(data, range(44, 50))}

    def loss(self, model, batch):
        step = context().step
        if step == int(os.environ["WAIT_AT"]) and model.training:
            (self.folder / "waits").touch()
            while not (self.folder / "go").exists() and not ml_tree(os.environ).stop_notice.exists():
                time.sleep(0.02)
        if step == int(os.environ["KILL_AT"]) and not context().restarts:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(model(batch[0]), batch[1])
"""
SCRIPT_JOB = """\
name: scripted
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, processes_per_instance: 1}
limits: {retries: 1}
tracking: {mlflow: SERVER}
"""
SAME_AFTER_A_RESTART = ("train/loss", "train/learning_rate", "train/grad_norm", "validation/loss")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_mlflow(tmp_path_factory.mktemp("mlflow") / "server") as uri:
        yield uri


def write(job: Callable[..., Path], tmp_path: Path, uri: str, name: str) -> Path:
    """Write the job of a Task with its own experiment."""
    text = JOB.replace("SERVER", uri).replace("WAIT_AT", f"MARKS: {tmp_path}, WAIT_AT", 1)
    return job(text.replace("name: tracked", f"name: {name}"), tracked_py=TASK)


def history(cli: Cli, *runs: str) -> dict[str, dict[int, float]]:
    """Return the metrics of runs that continue each other, by step."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        for name, values in cli("metrics", run, "--json").json["metrics"].items():
            found.setdefault(name, {}).update({each["step"]: each["value"] for each in values})
    return found


def events(cli: Cli, run: str, kind: str) -> list[dict[str, object]]:
    found = (parse_event(line["text"]) for line in cli("logs", run, "--json").json["lines"])
    return [event for event in found if event and event["event"] == kind]


def test_a_resumed_task_continues_its_mlflow_run(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, server: str
) -> None:
    path = write(job, tmp_path, server, "resumed")
    first = cli("submit", path, "--local", "--json", "--set=code.env.WAIT_AT=22").json["run"]
    until((tmp_path / "waits").exists)
    assert cli("stop", first, "--json").json["state"] == "STOPPED"
    assert [each.info.status for each in tracked_runs(server, "resumed")] == ["KILLED"]
    done = cli("resume", first, "--follow", "--json", "--set=code.env.WAIT_AT=-1")
    assert done.code == 0, done.err
    second = done.json["run"]

    (tracked,) = tracked_runs(server, "resumed")
    assert (tracked.info.run_name, tracked.info.status) == (first, "FINISHED")
    expected = history(cli, first, second)
    assert set(tracked.data.metrics) == set(expected)
    assert list(expected["train/loss"]) == list(range(1, 41))
    for name, values in expected.items():
        assert logged_values(server, tracked.info.run_id, name) == sorted(values.items()), name
    assert tracked.data.params["args.width"] == "3"
    assert tracked.data.params["train.learning_rate"] == "0.05"
    tags, plan = (
        tracked.data.tags,
        json.loads((tmp_path / "runs-home" / "runs" / second / "plan.json").read_text()),
    )
    assert tags["cloudtrain.runs"] == f"{first} {second}"
    assert tags["cloudtrain.code"] == plan["bundle"]["digest"]
    assert tags["cloudtrain.checkpoint"] == done.json["last_checkpoint"]["uri"]
    assert tags["cloudtrain.model"].endswith(f"{second}/model")

    assert (
        logged_artifact(server, tracked.info.run_id, f"plans/{first}.json", tmp_path)["run"]
        == first
    )

    # Another training does not continue the MLflow run, though it starts from the checkpoint.
    changes = (
        "train.learning_rate=0.01",
        f"checkpoint.resume={second}",
        "train.steps=42",
        "checkpoint.uri=elsewhere",
    )
    other = cli(
        "submit", path, "--local", "--follow", "--json", *(f"--set={each}" for each in changes)
    )
    assert other.code == 0, other.err
    _, forked = tracked_runs(server, "resumed")
    assert forked.info.run_name == other.json["run"]
    assert [step for step, _ in logged_values(server, forked.info.run_id, "train/loss")] == [41, 42]


def test_a_killed_and_restarted_task_logs_each_step_once(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, server: str
) -> None:
    path = write(job, tmp_path, server, "killed")
    changes = ("--set=code.env.WAIT_AT=24", "--set=code.env.KILL_AT=24", "--set=limits.retries=1")
    run = cli("submit", path, "--local", "--json", *changes).json["run"]
    until((tmp_path / "waits").exists)

    def has_logged() -> bool:  # what is not sent when a process is killed is lost
        runs = tracked_runs(server, "killed")
        return bool(runs) and len(logged_values(server, runs[0].info.run_id, "train/loss")) == 24

    until(lambda: events(cli, run, "tracking") and has_logged())
    (tmp_path / "go").touch()
    done = cli("follow", run, "--json")
    assert done.code == 0, done.err
    (tracked,) = tracked_runs(server, "killed")
    assert tracked.info.status == "FINISHED"
    assert [event["step"] for event in events(cli, run, "step")].count(22) == 2, "it repeats steps"
    expected = history(cli, run)
    assert list(expected["train/loss"]) == list(range(1, 41))
    for name in SAME_AFTER_A_RESTART:
        assert logged_values(server, tracked.info.run_id, name) == sorted(expected[name].items()), (
            name
        )


def test_a_task_trains_without_its_server(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(job, tmp_path, f"http://127.0.0.1:{free_port()}", "dead")
    done = cli("submit", path, "--local", "--follow", "--json")
    assert (done.code, done.json["last_step"]) == (0, 40), done.err
    run = done.json["run"]
    first, last = events(cli, run, "tracking")
    assert "takes no values, they are kept" in str(first["detail"])
    values = sum(map(len, history(cli, run).values()))
    assert last["dropped"] == values
    assert f"{values} values were not logged to MLflow" in cli("status", run).out


def test_values_wait_for_a_late_server(cli: Cli, job: Callable[..., Path], tmp_path: Path) -> None:
    port = free_port()
    path = write(job, tmp_path, f"http://127.0.0.1:{port}", "late")
    run = cli("submit", path, "--local", "--json", "--set=code.env.WAIT_AT=30").json["run"]
    until((tmp_path / "waits").exists)
    until(lambda: events(cli, run, "tracking"))
    with serve_mlflow(tmp_path / "server", port) as uri:
        (tmp_path / "go").touch()
        assert cli("follow", run, "--json").code == 0
        (tracked,) = tracked_runs(uri, "late")
        for name, values in history(cli, run).items():
            assert logged_values(uri, tracked.info.run_id, name) == sorted(values.items()), name
    assert [event.get("dropped") for event in events(cli, run, "tracking")] == [None, None]
    assert "MLflow" not in cli("status", run).out


def test_a_task_logs_to_a_database(cli: Cli, job: Callable[..., Path], tmp_path: Path) -> None:
    path = write(job, tmp_path, "curves/mlflow.db", "database")
    (path.parent / "curves").mkdir()
    done = cli("submit", path, "--local", "--follow", "--json", "--set=train.learning_rate=1e30")
    uri = f"sqlite:///{path.parent}/curves/mlflow.db"
    (tracked,) = tracked_runs(uri, "database")
    assert tracked.info.status == "FAILED", done.err  # its loss is not finite
    values = logged_values(uri, tracked.info.run_id, "train/loss")
    assert len(values) > 1
    assert not math.isfinite(values[-1][1])
    assert list((path.parent / "curves" / "mlartifacts").rglob("plans/*.json"))


def recipe() -> str:
    """Return the lines of Python about scripts in the how-to page."""
    text = (REPOSITORY / "docs" / "how-to" / "tracking.md").read_text()
    return text.split("```python\n")[1].split("```")[0]


def test_a_restarted_script_continues_its_mlflow_run(
    cli: Cli, job: Callable[..., Path], server: str
) -> None:
    script = f"{recipe()}\nassert os.environ['TORCHELASTIC_RESTART_COUNT'] == '1', 'fails once'\n"
    text = SCRIPT_JOB.replace("SERVER", server)
    path = job(text, train_py=script.replace("train_one_step()", "1 / step"))
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err + cli("logs", "latest").out
    (tracked,) = tracked_runs(server, "scripted")
    assert tracked.info.run_name == done.json["run"]
    assert [step for step, _ in logged_values(server, tracked.info.run_id, "loss")] == sorted(
        [*range(1, 11)] * 2
    )


def test_a_run_in_the_sandbox_is_tracked(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, server: str
) -> None:
    path = write(job, tmp_path, server, "sandboxed")
    try:
        done = cli(
            "submit",
            path,
            "--sandbox",
            "--follow",
            "--json",
            "--set=cluster.instance_type=ml.m5.xlarge",
        )
        assert done.code == 0, done.err
        (tracked,) = tracked_runs(server, "sandboxed")
        values = history(cli, f"sandbox:{done.json['run']}")["train/loss"]
        assert logged_values(server, tracked.info.run_id, "train/loss") == sorted(values.items())
        assert tracked.data.tags["cloudtrain.model"].startswith("s3://")
        assert tracked.data.tags["cloudtrain.model"].endswith("/output/model.tar.gz")
    finally:
        cli("sandbox", "--stop")
    assert os.environ.get("MLFLOW_TRACKING_URI") is None
