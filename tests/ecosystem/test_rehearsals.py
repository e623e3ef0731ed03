"""Jobs with a planted fault: a rehearsal fails at the check that each one names. Jobs without one have no failed check.

A rehearsal starts and interrupts several runs, so `make test` does not include these: `make test-rehearsal` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.jobs import EXAMPLES, Cli

from cloudtrain_runtime.contract import GRACE_VARIABLE

CORPUS = Path(__file__).parents[1] / "rehearsal" / "corpus"
FAULTS = {path.parent.name: path.parent for path in sorted(CORPUS.glob("*/expected.yaml"))}
BOUNDED = (
    "--json",
    "--minutes",
    "4.5",
)  # the fixture waits for ten minutes, of which the start is a part
WITHOUT_CHECKPOINTS = ("script-launch", "script-sagemaker", "script-spawn")
"""Examples of scripts that save their model at the end only."""
NEED_MORE = ("finetune-lora", "finetune-task")
"""Examples that need weights of another run, or further packages."""
SOUND = [
    path.parent.name
    for path in sorted(EXAMPLES.glob("*/job.yaml"))
    if path.parent.name not in NEED_MORE
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_check(cli: Cli, name: str) -> None:
    folder = FAULTS[name]
    expected = yaml.safe_load((folder / "expected.yaml").read_text())
    environ = (
        {GRACE_VARIABLE: str(expected["grace_seconds"])} if "grace_seconds" in expected else {}
    )
    done = cli("rehearse", folder / "job.yaml", *BOUNDED, environ={"PIP_NO_INDEX": "1", **environ})
    failed = {check["name"] for check in done.json["checks"] if check["result"] == "failed"}
    assert expected["fails"] in failed, done.out
    assert (done.code, done.json["verdict"]) == (4, "failed")


@pytest.mark.parametrize("name", SOUND)
def test_an_example_fails_only_what_it_lacks(cli: Cli, name: str) -> None:
    done = cli("rehearse", EXAMPLES / name / "job.yaml", *BOUNDED)
    failed = {check["name"] for check in done.json["checks"] if check["result"] == "failed"}
    expected = {"saves", "resumes"} if name in WITHOUT_CHECKPOINTS else set()
    assert failed == expected, done.out
    assert done.code == (4 if expected else 0)


def test_a_job_is_proven_in_the_sandbox_too(cli: Cli) -> None:
    done = cli(
        "rehearse", EXAMPLES / "digits" / "job.yaml", *BOUNDED, "--instances", "2", "--sandbox"
    )
    results = {check["name"]: check["result"] for check in done.json["checks"]}
    assert (done.code, done.json["verdict"]) == (0, "proven"), done.out
    assert {results[name] for name in ("stops", "resumes", "samples", "elastic")} == {"proven"}
    assert done.json["receipt"]["backend"] == "sandbox"


def test_a_script_for_cuda_keeps_its_file_as_output(cli: Cli, job: Callable[..., Path]) -> None:
    """The script of a public tutorial in short: CUDA and NCCL without a question, and a file in the code folder."""
    path = job(
        "name: epochs\ncode: {script: train.py, outputs: [snapshot.pt]}\ncluster: {instance_type: ml.g5.12xlarge}\n"
        "metrics: {step: 'epoch (\\d+)'}\n",
        train_py="""
import os, time
import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).to(rank), device_ids=[rank])
first = 0
if os.path.exists("snapshot.pt"):
    saved = torch.load("snapshot.pt", map_location=f"cuda:{rank}")
    model.module.load_state_dict(saved["model"])
    first = saved["epoch"] + 1
for epoch in range(first, 100_000):
    model(torch.ones(2, 3, device=rank)).sum().backward()
    time.sleep(0.2)
    print("epoch", epoch, flush=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, "snapshot.pt.new")
        with open("snapshot.pt.new", "rb") as new, open("snapshot.pt", "wb") as target:
            target.write(new.read())
""",
    )
    done = cli("rehearse", path, *BOUNDED, "--cuda-on-cpu", environ={"CUDA_VISIBLE_DEVICES": ""})
    results = {check["name"]: check["result"] for check in done.json["checks"]}
    assert results["cuda"] == "unknown"
    proven = ("starts", "trains", "saves", "stops", "resumes")
    assert {name: results[name] for name in proven} == dict.fromkeys(proven, "proven"), done.out


def test_an_epoch_that_is_trained_twice_is_not_proven(cli: Cli, job: Callable[..., Path]) -> None:
    """The file of a public tutorial's script names the epoch that is done, and a resumed run begins with it."""
    path = job(
        "name: twice\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"
        "metrics: {step: 'epoch (\\d+)'}\n",
        train_py="""
import os, time
import torch

path = os.path.join(os.environ["SM_MODEL_DIR"], "../checkpoints/snapshot.pt")
first = torch.load(path)["epoch"] if os.path.exists(path) else 0
for epoch in range(first, 100_000):
    print("epoch", epoch, flush=True)
    time.sleep(1.5)  # reports are exact to some tenths of a second
    torch.save({"epoch": epoch}, path + ".new")
    os.replace(path + ".new", path)
""",
    )
    done = cli("rehearse", path, *BOUNDED)
    results = {check["name"]: check for check in done.json["checks"]}
    assert (done.code, done.json["verdict"], results["resumes"]["result"]) == (
        0,
        "unknown",
        "unknown",
    ), done.out
    assert (
        "was taken again, though it was reported before the newest file was written"
        in results["resumes"]["detail"]
    )


def test_a_file_that_takes_longer_is_no_failure(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: slow\ncode: {script: train.py, outputs: [snapshot.pt]}\ncluster: {instance_type: ml.g5.xlarge}\n"
        "metrics: {step: 'step (\\d+)'}\n",
        train_py="""
import time

for step in range(100_000):  # its checkpoint would come later than the rehearsal ends
    time.sleep(0.2)
    print("step", step, flush=True)
""",
    )
    done = cli("rehearse", path, "--json", "--minutes", "0.6")
    results = {check["name"]: check["result"] for check in done.json["checks"]}
    assert done.code == 0, done.out
    assert {results[name] for name in ("saves", "stops", "resumes")} == {"unknown"}


def test_a_small_gpu_here_is_no_failure(cli: Cli, job: Callable[..., Path]) -> None:
    """The Task raises the message of a GPU of 4 GiB, as no GPU is needed for this test."""
    path = job(
        "name: small\ncode: {task: 'small:Small'}\ncluster: {instance_type: ml.p4d.24xlarge}\ntrain: {steps: 8}\n",
        small_py="""
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Small(Task):
    def model(self):
        return nn.Linear(3, 1)
    def datasets(self):
        return {"train": TensorDataset(torch.zeros(64, 3))}
    def loss(self, model, batch):
        if context().world_size > 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 4.00 GiB"
            )
        return model(batch[0]).square().mean()
""",
    )
    done = cli("rehearse", path, *BOUNDED)
    (trains,) = [check for check in done.json["checks"] if check["name"] == "trains"]
    assert (done.code, trains["result"]) == (0, "unknown"), done.out
    assert "a GPU here is too small for the job" in trains["detail"]
