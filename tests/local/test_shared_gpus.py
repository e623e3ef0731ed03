"""Local runs whose ranks share a GPU: process groups of NCCL are of Gloo. No GPU is needed, only its number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

JOB = """\
name: shared
code: {CODE}
cluster: {instance_type: ml.g5.xlarge, instances: 2, processes_per_instance: 1}
"""
SCRIPT = """\
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
pair = dist.new_group(backend="NCCL")
mesh = init_device_mesh("cpu", (2,))
dist.barrier(device_ids=[0])
total = torch.ones(1)
for group in (None, pair, mesh.get_group()):
    dist.all_reduce(total, group=group)
print(f"sum {total.item()} {dist.get_backend()} {dist.get_backend(pair)}", flush=True)
dist.destroy_process_group()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
print(f"default {dist.get_backend()}", flush=True)
dist.destroy_process_group()  # at an exit with a group, torch may abort: "terminate called without an active exception"
"""


@pytest.mark.parametrize("code", ["script: train.py", "command: [python, train.py]"])
def test_nccl_becomes_gloo_on_a_shared_gpu(cli: Cli, job: Callable[..., Path], code: str) -> None:
    path = job(JOB.replace("CODE", code), train_py=SCRIPT)
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}
    done = cli("submit", path, "--local", "--follow", environ=environ)
    assert done.code == 0, done.err
    log = done.out + done.err
    assert log.count("sum 8.0 gloo gloo") == 2
    assert log.count("default gloo") == 2
    assert "2 ranks share 1 GPU here, so they use Gloo instead of NCCL; nccl in the code" in log
    if code.startswith("script"):
        raw = cli("logs", done.out.partition("\n")[0], "--raw").out
        assert raw.count('"joined": 1') == 2


def test_nccl_stays_where_each_rank_has_a_gpu(cli: Cli, job: Callable[..., Path]) -> None:
    script = (
        "import sys\nprint('patched', 'cloudtrain_runtime.launcher.shared_gpus' in sys.modules)\n"
    )
    path = job(JOB.replace("CODE", "script: train.py"), train_py=script)
    done = cli("submit", path, "--local", "--follow", environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (done.out + done.err).count("patched False") == 2
