"""AWS's data-parallel library (SMDDP) as the backend of the ranks, replaced by a fake package that uses Gloo.

The library itself exists only in AWS's containers and needs their GPUs. These tests prove that the runtime imports it
only for the backend `smddp`, that torch then creates process groups through it, and the error if it is missing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cloudtrain import catalog
from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import CheckpointConfig, MlTree, RunConfig
from cloudtrain_runtime.errors import JobError
from cloudtrain_runtime.process import process_group
from cloudtrain_runtime.process.run_context import read_context

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"

# Registers itself through torch's public interface for third-party backends, as of torch 2.5.
FAKE_LIBRARY = """
import os
import torch.distributed as dist

def create(store, rank, size, timeout):
    os.write(1, b"CREATED %d of %d\\n" % (rank, size))
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("smddp", create, devices=["cpu", "cuda"])
os.write(1, b"IMPORTED\\n")
"""
RANK = """
import os, sys
from dataclasses import replace
import torch, torch.distributed as dist
from cloudtrain_runtime import context
from cloudtrain_runtime.process import process_group

assert not any(name.startswith("smdistributed") for name in sys.modules)
own = replace(context(), backend="smddp")
process_group.join_ranks(own)
total = torch.tensor([1.0])
dist.all_reduce(total)  # a CPU tensor, for which the default group uses Gloo
group = dist.new_group(backend="smddp")
torch.manual_seed(own.rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
weights = ",".join(str(value) for value in model.module.weight.flatten().tolist())
os.write(1, f"TRAINED {total.item():.0f} {weights}\\n".encode())
os._exit(0)
"""


def test_the_library_is_imported_and_creates_the_groups(tmp_path: Path) -> None:
    package = tmp_path / "image" / "smdistributed" / "dataparallel" / "torch"
    package.mkdir(parents=True)
    (package / "torch_smddp.py").write_text(FAKE_LIBRARY)
    port = free_port()
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path / "image"), str(ENTRYPOINTS), os.environ["PYTHONPATH"]]
        ),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            cwd=tmp_path,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    for rank, text in enumerate(texts):
        assert text.count("IMPORTED") == 1
        assert text.count(f"CREATED {rank} of 2") == 2, (
            text
        )  # the default group's GPU backend, and the model's group
    trained = {found for text in texts for found in re.findall(r"TRAINED (.*)", text)}
    assert len(trained) == 1, trained
    assert trained.pop().startswith("2 ")


def test_an_image_without_the_library_is_an_error() -> None:
    with pytest.raises(JobError) as caught:
        process_group.join_ranks(replace(read_context({}), backend="smddp"))
    text = str(caught.value)
    assert "cannot be imported in this image (No module named 'smdistributed')" in text
    assert 'use framework: "2.5"' in text
    assert "distribution: torch_distributed" in text
    (image,) = [image for image in catalog.images() if image.smddp]
    assert (image.framework, image.gpu) == (
        process_group.SMDDP_FRAMEWORK,
        process_group.SMDDP_IMAGE,
    )


@pytest.mark.parametrize(("is_local", "backend"), [(True, "nccl"), (False, "smddp")])
def test_local_runs_use_nccl_instead_of_smddp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_local: bool, backend: str
) -> None:
    tree = MlTree(tmp_path)
    tree.run_config.parent.mkdir(parents=True)
    checkpoint = CheckpointConfig("", None, None, 3, "never")
    config = RunConfig("demo", None, "train.py", [], None, 2, "smdistributed", 0, None, checkpoint)
    tree.run_config.write_text(config.to_json())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if not is_local:
        monkeypatch.setattr(
            "cloudtrain_runtime.process.environment.Path",
            lambda path: tmp_path if str(path) == "/opt/ml" else Path(path),
        )
    environ = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    context = read_context(
        {**environ, **({"CLOUDTRAIN_ML_ROOT": str(tmp_path)} if is_local else {})}
    )
    assert (context.run, context.backend, context.device.index) == ("demo", backend, 1)
