"""Scripts without cloudtrain, or only with its checkpoints, run unchanged on two instances and train together."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import EXAMPLES, Cli

from cloudtrain_runtime.contract import parse_event

pytestmark = pytest.mark.processes

ROLE = "arn:aws:iam::123456789012:role/training"

# A sitecustomize module for every interpreter of the run, which also runs that of the tests. Each process that wraps a
# model in DDP records its rank, its host, and digests of the first and last weights.
PROBE = """
import hashlib, importlib.machinery, json, os, runpy, sys

NAME = "torch.nn.parallel.distributed"

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Loader(name, spec.origin)
        return spec

class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        plain = module.DistributedDataParallel.__init__
        def __init__(self, *args, **options):
            plain(self, *args, **options)
            from multiprocessing.util import Finalize
            import torch.distributed as dist
            # Not the model, which would keep the process group.
            weights = list(self.parameters())
            first = digest(weights)
            Finalize(None, write, (weights, dist.get_rank(), dist.get_world_size(), first), exitpriority=0)
        module.DistributedDataParallel.__init__ = __init__

def digest(weights):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in weights)).hexdigest()

def write(weights, rank, world_size, first):
    record = {"world_size": world_size, "host": os.environ["SM_CURRENT_HOST"], "first": first, "last": digest(weights)}
    with open(f"{os.environ['RECORDS']}/{rank}", "x") as file:
        json.dump(record, file)
    sys.mark = Mark()

class Mark:
    # It is freed in the interpreter's shutdown, which can abort a rank that has succeeded.
    def __del__(self, write=os.write):
        write(1, b"interpreter's shutdown\\n")

sys.meta_path.insert(0, Finder())
runpy.run_path(os.environ["GUARD"] + "/sitecustomize.py")
"""


@pytest.fixture
def probed(tmp_path: Path) -> list[str]:
    """Return the options with which every process of a run records its training."""
    folder = tmp_path / "probe"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PROBE)
    (tmp_path / "records").mkdir()
    guard = os.environ["PYTHONPATH"]
    values = {
        "PYTHONPATH": f"{folder}:{guard}",
        "GUARD": guard,
        "RECORDS": str(tmp_path / "records"),
    }
    return [f"--set=code.env.{name}={value}" for name, value in values.items()]


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(EXAMPLES / name, tmp_path / name)) / "job.yaml"

    return copy


def check_ranks(records: Path, world_size: int) -> None:
    """Check that all ranks have trained together: their first weights are equal, and so are their last ones."""
    found = [json.loads((records / str(rank)).read_text()) for rank in range(world_size)]
    assert [each["world_size"] for each in found] == [world_size] * world_size
    each_host = world_size // 2
    assert [each["host"] for each in found] == ["algo-1"] * each_host + ["algo-2"] * each_host
    assert len({each["last"] for each in found}) == len({each["first"] for each in found}) == 1
    assert found[0]["last"] != found[0]["first"]


def model_of(status: dict[str, Any]) -> dict[str, torch.Tensor]:
    with tarfile.open(status["artifacts"]["model"]) as archive:
        file = archive.extractfile("model.pt")
        assert file is not None
        found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
        return found


@pytest.mark.parametrize(
    ("name", "processes", "world_size"),
    [
        ("script-ddp", 2, 4),  # reads LOCAL_RANK, as all scripts for torchrun
        ("script-launch", 1, 2),  # has the option --local_rank
        ("script-spawn", 1, 4),  # starts two ranks itself
    ],  # those of Lightning and Accelerate run in test_frameworks.py
)
def test_a_script_runs_unchanged(
    cli: Cli,
    example: Callable[[str], Path],
    probed: list[str],
    tmp_path: Path,
    name: str,
    processes: int,
    world_size: int,
) -> None:
    shape = (
        "--instances",
        "2",
        f"--set=cluster.processes_per_instance={processes}",
        "--set=code.args.epochs=1",
    )
    done = cli("submit", example(name), "--local", "--follow", "--json", *shape, *probed)
    assert done.code == 0, done.err
    assert f"world size {world_size}: saved" in done.err
    assert "interpreter's shutdown" not in done.err
    check_ranks(tmp_path / "records", world_size)
    assert all(torch.isfinite(value).all() for value in model_of(done.json).values())


@pytest.mark.promise
def test_an_estimators_script_finds_its_variables(
    cli: Cli, example: Callable[[str], Path], probed: list[str], tmp_path: Path
) -> None:
    shape = (
        "--instances",
        "2",
        "--set=cluster.processes_per_instance=2",
        "--set=code.args.batch-size=50",
    )
    path = example("script-sagemaker")
    done = cli("submit", path, "--local", "--follow", "--json", *shape, *probed)
    assert done.code == 0, done.err
    check_ranks(tmp_path / "records", 4)
    for host in ("algo-1", "algo-2"):
        assert (
            f"{host} of ['algo-1', 'algo-2']: {{'epochs': 3, 'lr': 0.1, 'batch-size': 50}}"
            in done.err
        )
    losses = [float(each) for each in re.findall(r"loss=([0-9.]+);", done.err)]
    assert losses[-1] < losses[0]
    with tarfile.open(done.json["artifacts"]["output"]) as archive:
        file = archive.extractfile("result.json")
        assert file is not None
        assert json.load(file)["world_size"] == 4


REPORTING = """
import time
import torch.distributed as dist
from cloudtrain_runtime import report
dist.init_process_group("gloo")
for step in range(1, 301):
    report(step, total=400, loss=1 / step, **{"validation/accuracy": step / 300})
    time.sleep(0.002)
"""


def test_a_script_reports_progress_and_metrics(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.xlarge}\n",
        train_py=REPORTING,
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    status = cli("status", done.json["run"], "--json").json
    assert (status["last_step"], status["total_steps"]) == (300, 400)
    assert status["metrics"] == {"train/loss": 0.00333333, "validation/accuracy": 1.0}
    assert not any("reports no progress" in warning for warning in status["warnings"])
    lines = [line for line in done.err.splitlines() if "CLOUDTRAIN" in line]
    assert len(lines) < 100


RESTARTED = """
from cloudtrain_runtime import context, report
is_first = context().restarts == 0
for step in range(1, 11 if is_first else 9):
    report(step, total=10, loss=step + (0.0 if is_first else 0.5), **{"validation/accuracy": 0.5})
if is_first:
    raise ValueError("the first attempt fails")
"""


def test_metrics_of_a_restarted_script_are_the_later_ones(
    cli: Cli, job: Callable[..., Path]
) -> None:
    text = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.xlarge, processes_per_instance: 1}\n"
    path = job(text + "limits: {retries: 1}\n", train_py=RESTARTED)
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    found = cli("metrics", done.json["run"], "loss", "accuracy", "--json").json
    assert found["run"] == done.json["run"]
    assert list(found["metrics"]) == ["train/loss", "validation/accuracy"]
    last = found["metrics"]["train/loss"][-1]
    assert (last["step"], last["value"]) == (8, 8.5)
    assert attempts(cli, done.json["run"]) == [0, 1]
    assert not any("begins again" in text for text in done.json["warnings"])
    table = cli("metrics", done.json["run"]).out.splitlines()
    assert table[0].split() == ["step", "train/loss", "validation/accuracy"]
    assert table[-1].split() == ["8", "8.5", "0.5"]


def attempts(cli: Cli, run: str) -> list[int]:
    """Return the number of restarts before each attempt of a run's ranks."""
    lines = cli("logs", run, "--json").json["lines"]
    found = [event for line in lines if (event := parse_event(line["text"])) is not None]
    return [event["restarts"] for event in found if event["event"] == "attempt"]


EPOCHS = r"""
name: demo
code: {command: [python, train.py]}
cluster: {instance_type: ml.m5.xlarge, processes_per_instance: 1}
metrics: {step: 'iter (\d+)', epoch: 'epoch (\d+)', loss: 'loss ([0-9.]+)'}
"""
COUNTING = """
for epoch in range(3):
    for step in (10, 20, 30):
        print(f"epoch {epoch} iter {step}/30 loss {1 / (30 * epoch + step):.3f}", flush=True)
"""


def test_steps_of_a_command_count_through_epochs(cli: Cli, job: Callable[..., Path]) -> None:
    done = cli("submit", job(EPOCHS, train_py=COUNTING), "--local", "--follow", "--json")
    assert done.code == 0, done.err
    assert attempts(cli, done.json["run"]) == [0]
    assert cli("status", done.json["run"], "--json").json["last_step"] == 90
    values = cli("metrics", done.json["run"], "--json").json["metrics"]["train/loss"]
    assert [each["value"] for each in values] == [round(1 / each["step"], 3) for each in values]


PRINTING = """
import sys
for step in range(1, 201):
    sys.stdout.write(f"\\riter {step}/400, loss={1 / step:.4f}, lr=1e-3")
    if step % 100 == 0:
        print(f"\\nval acc {step / 4:.1f}%, nothing=")
        sys.stdout.flush()
"""
PATTERNS = r"""
metrics:
  step: 'iter (\d+)'
  total: 'iter \d+/(\d+)'
  loss: 'loss=([0-9.]+)'
  validation/accuracy: 'val acc ([0-9.]+)%'
  missing: 'nothing=([0-9]*)'
"""


@pytest.mark.promise
def test_metrics_are_read_from_the_output(cli: Cli, job: Callable[..., Path]) -> None:
    cluster = "cluster: {instance_type: ml.m5.xlarge, processes_per_instance: 1}\n"
    path = job(f"name: demo\ncode: {{script: train.py}}\n{cluster}{PATTERNS}", train_py=PRINTING)
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    status = cli("status", done.json["run"], "--json").json
    assert (status["last_step"], status["total_steps"]) == (200, 400)
    assert status["metrics"] == {"train/loss": 0.005, "validation/accuracy": 50.0}
    warning = "metrics: no line of rank 0's output had a value of missing; compare the patterns with the log"
    assert warning in status["warnings"]
    assert done.err.count(warning) == 1
    request = cli(
        "plan", path, "--request", "--region", "us-west-2", "--bucket", "bucket", "--role", ROLE
    ).json
    definitions = request["AlgorithmSpecification"]["MetricDefinitions"]
    assert {"Name": "train/loss", "Regex": "loss=([0-9.]+)"} in definitions
    assert [each["Name"] for each in definitions] == [
        "train/loss",
        "validation/accuracy",
        "train/missing",
    ]
    silent = cli(
        "submit",
        path,
        "--local",
        "--follow",
        "--json",
        "--set",
        "metrics={loss: 'no such ([0-9]+)'}",
    )
    shown = cli("metrics", silent.json["run"])
    assert (
        "the run has reported no metrics\n  metrics: no line of rank 0's output had a value of loss"
        in shown.err
    )
    for double in (
        "metrics={loss: '(.)', train/loss: '(.)'}",
        "metrics={total: '(.)', loss: '(.)'}",
    ):
        assert cli("plan", path, "--local", "--set", double).code == 2


def test_script_that_starts_its_own_ranks_gets_a_warning(
    cli: Cli, example: Callable[[str], Path]
) -> None:
    path = example("script-spawn")
    two = cli("plan", path, "--json", "--set=cluster.processes_per_instance=2").json["warnings"]
    assert any(
        re.match(r"train.py:\d+ starts processes with torch.multiprocessing.spawn", text)
        for text in two
    ), two
    assert not any("spawn" in text for text in cli("plan", path, "--json").json["warnings"])
