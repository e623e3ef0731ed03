"""Local runs with `--cuda-on-cpu`: scripts in the style of public ones train on machines without a GPU."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.jobs import EXAMPLES, Cli

import cloudtrain

needs_torch_2_6 = pytest.mark.skipif(
    torch.__version__ < "2.6", reason="--cuda-on-cpu refuses torch 2.5"
)
pytestmark = pytest.mark.processes

SCRIPTS = Path(__file__).parent / "cuda_scripts"
JOB = """\
name: demo
code: {directory: code, script: SCRIPT, args: [ARGS]}
cluster: {instance_type: ml.p4d.24xlarge}
"""
WARNING = "--cuda-on-cpu: the CUDA devices of this run are the CPU, and NCCL is Gloo"
LOSS = re.compile(r"(\w+) loss ([0-9.]+)")
PROBE = """\
import os, sys, torch
print("probe:", torch.cuda.is_available(), os.environ["SM_NUM_GPUS"], [name for name in sys.modules if "cuda_on_cpu" in name],
      flush=True)
"""
CUDA_TASK = """\
import torch
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Cuda(Task):
    def model(self):
        return torch.nn.Linear(3, 1).cuda()

    def datasets(self):
        inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}

    def loss(self, model, batch):
        assert torch.cuda.device_count() == context().local_world_size == 2
        inputs, targets = (each.to(f"cuda:{context().local_rank}") for each in batch)
        return (model(inputs) - targets).square().mean()
"""


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of a machine that has some."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def write_job(folder: Path, *names: str) -> Path:
    """Write a job that runs these scripts, one after the other, on each of two ranks."""
    shutil.copytree(SCRIPTS, folder / "code", dirs_exist_ok=True)
    (folder / "job.yaml").write_text(
        JOB.replace("SCRIPT", "run_all.py").replace("ARGS", ", ".join(names))
    )
    return folder / "job.yaml"


def check_training(log: str, *names: str) -> None:
    """Check that each script has ended on both ranks, and that its loss has fallen."""
    losses: dict[str, list[float]] = {}
    for name, loss in LOSS.findall(log):
        losses.setdefault(name, []).append(float(loss))
    for name in names:
        assert log.count(f"ended {name} 0") == 2, log
        of_name = losses[name.removeprefix("with_")]
        assert sum(of_name[-4:]) < 0.8 * sum(of_name[:4]), (name, of_name)


@needs_torch_2_6
def test_scripts_of_torch_train(cli: Cli, tmp_path: Path) -> None:
    names = ("imagenet", "snapshots", "gpt", "prefetcher", "gan", "fsdp")
    done = cli(
        "submit",
        write_job(tmp_path, *names, "refused"),
        "--local",
        "--cuda-on-cpu",
        "--follow",
        "--json",
    )
    assert done.code == 0, done.err
    check_training(done.err, *names)
    assert LOSS.search(done.err.partition("fully_shard ")[2])
    assert f"warning: {WARNING}" in done.err
    lines = [
        line.partition("  ")[2] for line in done.err.splitlines() if line.startswith("algo-1  ")
    ]
    assert lines[0].startswith("CUDA on the CPU (--cuda-on-cpu): ranks see 2 CUDA devices")
    assert any(
        text.startswith("CUDA was the CPU (--cuda-on-cpu)") for text in done.json["warnings"]
    )
    refused = dict(re.findall(r"refused (\w+): (.*)", done.err))
    wanted = {
        "graphs": "torch.cuda.CUDAGraph",
        "callables": "torch.cuda.make_graphed_callables",
        "extension": "a CUDA extension",
        "file": "a CUDA extension",
        "setup": "a CUDA extension",
        "raw": "cuda_stream of a stream or event",
        "nccl": "torch.cuda.nccl.all_reduce",
    }
    for name, feature in wanted.items():
        assert refused[name].startswith(
            f"NotImplementedError: {feature} needs a GPU, and --cuda-on-cpu does not"
        ), name
    assert (
        refused["ordinal"]
        == "RuntimeError: CUDA error: invalid device ordinal: cuda:2 of 2 devices"
    )
    assert refused["set"] == "RuntimeError: CUDA error: invalid device ordinal: cuda:9 of 2 devices"
    assert "kept weights are a copy: True" in done.err


@needs_torch_2_6
def test_scripts_of_libraries_train(cli: Cli, tmp_path: Path) -> None:
    names = ("with_accelerate", "with_lightning")
    done = cli(
        "submit", write_job(tmp_path, *names), "--local", "--cuda-on-cpu", "--follow", "--json"
    )
    assert done.code == 0, done.err
    check_training(done.err, *names)


@needs_torch_2_6
def test_a_script_that_spawns_its_ranks_trains(cli: Cli, tmp_path: Path) -> None:
    """Spawned processes are new interpreters. The example takes CUDA and NCCL where it finds devices."""
    shutil.copytree(EXAMPLES / "script-spawn", tmp_path / "job")
    done = cli(
        "submit", tmp_path / "job" / "job.yaml", "--local", "--cuda-on-cpu", "--follow", "--json"
    )
    assert done.code == 0, done.err
    losses = [float(each) for each in re.findall(r"epoch \d: loss ([0-9.]+)", done.err)]
    assert losses[-1] < losses[0]
    assert "world size 2: saved" in done.err


@needs_torch_2_6
def test_a_task_trains(cli: Cli, job: Callable[..., Path]) -> None:
    text = 'name: demo\ncode: {task: "cuda_task:Cuda"}\ncluster: {instance_type: ml.p4d.24xlarge}\n'
    path = job(
        f"{text}train: {{epochs: 8, batch_size: 4, learning_rate: 0.05}}\n", cuda_task_py=CUDA_TASK
    )
    done = cli("submit", path, "--local", "--cuda-on-cpu", "--follow", "--json")
    assert done.code == 0, done.err
    events = Path(done.json["artifacts"]["folder"], "events.jsonl").read_text().splitlines()
    losses = [each["loss"] for each in map(json.loads, events) if each["event"] == "step"]
    assert losses[-1] < 0.5 * losses[0]
    resumed = cli("resume", done.json["run"], "--set", "train.epochs=9", "--follow", "--json")
    assert resumed.code == 0, resumed.err
    assert "CUDA on the CPU (--cuda-on-cpu): ranks see 2 CUDA devices" in resumed.err


@pytest.mark.skipif(torch.__version__ >= "2.6", reason="for `make test-oldest`")
def test_an_old_torch_is_refused(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: demo\ncode: {script: probe.py}\ncluster: {instance_type: ml.p4d.24xlarge}\n",
        probe_py=PROBE,
    )
    done = cli("submit", path, "--local", "--cuda-on-cpu", "--follow")
    assert done.code == 4, done.err
    assert "--cuda-on-cpu needs torch 2.6 or newer; this machine has torch 2.5" in done.out
    assert "Traceback" not in done.out + done.err


@needs_torch_2_6
def test_without_the_option_nothing_of_it_is_there(cli: Cli, job: Callable[..., Path]) -> None:
    text = "name: demo\ncode: {script: probe.py}\ncluster: {instance_type: ml.p4d.24xlarge, processes_per_instance: 1}\n"
    path = job(text, probe_py=PROBE)
    plain = cli("submit", path, "--local", "--follow", "--json")
    assert "probe: False 0 []" in plain.err
    assert "cuda" not in json.dumps(plain.json["warnings"]).lower()
    config = Path(plain.json["artifacts"]["folder"], "config", "run.json").read_text()
    assert "cuda_on_cpu" not in config
    stand_in = cli("submit", path, "--local", "--cuda-on-cpu", "--follow", "--json")
    assert "probe: True 1 ['cloudtrain_runtime.launcher.cuda_on_cpu']" in stand_in.err


def test_plans_show_the_option(cli: Cli, tmp_path: Path) -> None:
    path = write_job(tmp_path, "gpt")
    found = cli("plan", path, "--local", "--cuda-on-cpu", "--json").json
    assert found["cuda_on_cpu"] == 2
    assert any(text.startswith(WARNING) for text in found["warnings"])
    text = cli("plan", path, "--local", "--cuda-on-cpu")
    assert "CUDA          stand-in on the CPU: 2 devices per instance" in text.out
    assert f"warning: {WARNING}" in text.err
    plain = cli("plan", path, "--local", "--json").json
    assert plain["cuda_on_cpu"] == 0
    assert not any("cuda" in text.lower() for text in plain["warnings"])
    assert cloudtrain.plan(path, local=True, cuda_on_cpu=True).config.cuda_on_cpu == 2


def test_other_targets_refuse_the_option(cli: Cli, tmp_path: Path) -> None:
    path = write_job(tmp_path, "gpt")
    for target in ("sandbox", "sagemaker"):
        for command in ("plan", "submit"):
            done = cli(command, path, "--backend", target, "--cuda-on-cpu")
            assert done.code == 2
            assert f"--cuda-on-cpu is for local runs, not for {target}" in done.err
    done = cli("rehearse", path, "--sandbox", "--cuda-on-cpu")
    assert done.code == 2
    assert "--cuda-on-cpu is for local runs, not for sandbox" in done.err


def test_a_machine_with_gpus_refuses_the_option(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        "submit",
        write_job(tmp_path, "gpt"),
        "--local",
        "--cuda-on-cpu",
        environ={"CUDA_VISIBLE_DEVICES": "0"},
    )
    assert done.code == 2
    assert "--cuda-on-cpu is not needed: this machine has CUDA with 1 GPU" in done.err
