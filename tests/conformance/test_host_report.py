"""The event about what a host has, in namespaces with the devices of AWS's instances."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.devices import COMPAT, FakeHost
from support.jobs import Finished, command

from cloudtrain import catalog
from cloudtrain_runtime import launch
from cloudtrain_runtime.contract import parse_event

pytestmark = pytest.mark.processes

OLD = "NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 19:29:27 UTC 2026"
NEW = "NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)"
A100 = ("NVIDIA A100-SXM4-40GB",) * 8
READ = """
import json, os, sys
from cloudtrain_runtime.launcher.host_environment import read_cuda
cuda = read_cuda()
print(json.dumps({"driver": cuda.driver, "cuda": cuda.version, "too old": cuda.is_too_old,
    "path": cuda.variables(os.environ).get("LD_LIBRARY_PATH"), "torch": "torch" in sys.modules}))
"""
SCRIPT = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
print("LIBRARIES", os.environ.get("LD_LIBRARY_PATH"), flush=True)
dist.barrier()  # a rank that ends while another one connects fails it
dist.destroy_process_group()
"""
JOB = """\
name: devices
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, processes_per_instance: 1}
"""
LOADING = """\
name: loading
code: {task: "loading:Loading"}
cluster: {instance_type: ml.g5.xlarge, instances: 1, processes_per_instance: 1}
train: {steps: 4, batch_size: 4, learning_rate: 0.05, workers: 2}
"""
TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset
from cloudtrain_runtime import Task

class Large(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((500_000,), float(index))

class Loading(Task):
    def model(self):
        return nn.Linear(500_000, 1)
    def datasets(self):
        return {"train": Large()}
    def loss(self, model, batch):
        return model(batch).mean()
"""
WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Large(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.ones(500_000)
torch.multiprocessing.set_sharing_strategy("STRATEGY")
for batch in DataLoader(Large(), batch_size=4, num_workers=2):
    batch.sum()
"""


def run_on(host: FakeHost, *words: str | Path, **environ: str) -> Finished:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environ}
    done = subprocess.run(
        host.command(*words),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [
        line
        for log in sorted((folder / "logs").glob("*.log"))
        for line in log.read_text().splitlines()
    ]
    return [
        event for event in map(parse_event, lines) if event is not None and event["event"] == kind
    ]


@pytest.mark.parametrize(
    ("driver", "cuda", "compat", "path"),
    [
        (OLD, "13.0", True, f"{COMPAT}:/opt/amazon/efa/lib"),
        (OLD, "13.0", False, None),
        (OLD, "12.8", True, None),
        (NEW, "13.0", True, None),
        (None, "13.0", True, None),
    ],
)
def test_libraries_for_old_drivers(
    tmp_path: Path, driver: str | None, cuda: str, compat: bool, path: str | None
) -> None:
    host = FakeHost(tmp_path, driver, A100, cuda=cuda, compat=compat)
    done = run_on(host, sys.executable, "-c", READ, LD_LIBRARY_PATH=f"/opt/amazon/efa/lib:{COMPAT}")
    assert done.code == 0, done.err
    version = None if driver is None else "570.133.20" if driver == OLD else "580.95.05"
    is_too_old = driver == OLD and cuda == "13.0"
    assert json.loads(done.out) == {
        "driver": version, "cuda": cuda, "too old": is_too_old, "path": path, "torch": False
    }  # fmt: skip


def test_a_run_reports_its_hosts(
    cli: Callable[..., Finished], job: Callable[..., Path], tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "fi_info").write_text(
        "#!/bin/sh\nprintf 'provider: efa\\n    fabric: efa\\n    version: 201.0\\n'\n"
    )
    (tools / "fi_info").chmod(stat.S_IRWXU)
    efa = ("rdmap16s27", "rdmap32s27")
    host = FakeHost(tmp_path / "host", OLD, A100, efa, ("mlx5_0",), cuda="13.0", compat=True)
    path = job(JOB, train_py=SCRIPT)
    done = run_on(
        host,
        command(),
        "submit",
        path,
        "--local",
        "--follow",
        "--json",
        PATH=f"{tools}:{os.environ['PATH']}",
    )
    assert done.code == 0, done.err
    folder = Path(done.json["artifacts"]["folder"])
    reported = events_of(folder, "environment")
    assert [event["host"] for event in reported] == ["algo-1", "algo-2"]
    for event in reported:
        assert (event["driver"], event["cuda"], event["cuda_compat"]) == (
            "570.133.20",
            "13.0",
            COMPAT,
        )
        assert (event["gpus"], event["efa"], event["efa_provider"]) == ([*A100], [*efa], "efa")
        assert min(event[name] for name in ("shm_bytes", "disk_free_bytes", "memory_bytes")) > 0
        assert event["packages"]["torch"].startswith("2.")
        assert event["warnings"] == []
    for log in (folder / "logs").glob("*.log"):
        lines = log.read_text().splitlines()
        (used,) = [line for line in lines if "LIBRARIES" in line]
        assert used.split("LIBRARIES ")[1].split(":")[0] == COMPAT
        assert next(i for i, line in enumerate(lines) if '"environment"' in line) < lines.index(
            used
        )
    run = done.json["run"]
    (row,) = [line for line in cli("status", run).out.splitlines() if line.startswith("hosts")]
    assert (
        f"8 x {A100[0]}, driver 570.133.20 with {COMPAT}, CUDA 13.0, 2 EFA (efa), torch 2." in row
    )
    assert sum(A100[0] in line for line in cli("logs", run).out.splitlines()) == 2
    assert set(cli("status", run, "--json").json["hosts"]) == {"algo-1", "algo-2"}


def test_a_small_shm_leaves_loader_workers_out(
    cli: Callable[..., Finished], job: Callable[..., Path], tmp_path: Path
) -> None:
    host = FakeHost(tmp_path / "host", OLD, A100, cuda="13.0", shm="4m")
    done = run_on(
        host, command(), "submit", job(LOADING, loading_py=TASK), "--local", "--follow", "--json"
    )
    assert done.code == 0, done.err
    assert done.json["last_step"] == 4
    (warning, *_) = [text for text in done.json["warnings"] if "loader workers" in text]
    assert warning.startswith("algo-1: /dev/shm has 4 MiB, too little for loader workers of 1 rank")
    assert any("too old for CUDA 13.0, which needs 580" in text for text in done.json["warnings"])
    shown = cli("logs", done.json["run"]).out
    assert "0 loader workers per rank instead of 2: /dev/shm is too small" in shown


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_no_sharing_strategy_avoids_shm(
    cli: Callable[..., Finished], job: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    """Therefore a script gets advice instead: both of torch's strategies allocate in /dev/shm."""
    path = job(
        JOB.replace("instances: 2", "instances: 1"), train_py=WORKERS.replace("STRATEGY", strategy)
    )
    host = FakeHost(tmp_path / "host", shm="4m")
    done = run_on(host, command(), "submit", path, "--local", "--follow", "--json")
    assert done.code == 4, done.err
    found = cli("explain", done.json["run"], "--json").json
    assert found["class"] == "host_memory"
    assert "num_workers=0" in found["action"]


def test_every_fast_gpu_instance_has_efa() -> None:
    """The launcher warns about a missing EFA device from this bandwidth on."""
    found = filter(None, map(catalog.find_instance, catalog.instance_names()))
    fast = [
        each for each in found if each.gpus and (each.network_gbps or 0) >= 100 and not each.neuron
    ]
    assert len(fast) > 10
    assert [each.name for each in fast if not each.efa] == []


def test_the_launcher_imports_no_torch() -> None:
    code = "import sys; from cloudtrain_runtime import launch; print('torch' in sys.modules, 'email' in sys.modules)"
    folder = Path(launch.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
