"""A rank has joined when data has moved between it and others: two real processes per case, with Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp

from cloudtrain_runtime.contract import ML_ROOT_VARIABLE, MlTree

pytestmark = pytest.mark.processes

DDP = "torch.nn.parallel.DistributedDataParallel"
CASES = {
    "no group": ("", "alone"),
    "a group": ("init()", "unused"),
    "a barrier": ("init(); dist.barrier(); dist.monitored_barrier()", "unused"),
    "a group of one": ("init(); dist.all_reduce(data, group=own_group())", "unused"),
    "DDP in a group of one": (f"init(); {DDP}(layer, process_group=own_group())", "unused"),
    "a checkpoint": ("init(); dcp.save({'a': data}, checkpoint_id=folder)", "unused"),
    "a checkpoint of the runtime": ("init(); gather(rank, read_context(os.environ))", "unused"),
    "a sum": ("init(); dist.all_reduce(data)", "joined"),
    "in a function that is a job": (
        "sys.argv[1:] = []; run_function(lambda: (init(), dist.all_reduce(data)))",
        "joined",
    ),
    "by keyword": ("init(); dist.all_reduce(tensor=data, group=dist.group.WORLD)", "joined"),
    "by the module": ("init(); c10d.broadcast(data, 0)", "joined"),
    "objects": ("init(); dist.all_gather_object([None, None], rank)", "joined"),
    "with gradients": ("init(); functional.all_reduce(data)", "joined"),
    "messages": (
        "init(); dist.send(data, 1 - rank) if rank == 0 else dist.recv(data, 1 - rank)",
        "joined",
    ),
    "batched messages": (
        (
            "init(); [each.wait() for each in dist.batch_isend_irecv("
            "[dist.P2POp(dist.isend, data, 1 - rank), dist.P2POp(dist.irecv, layer.bias.data, 1 - rank)])]"
        ),
        "joined",
    ),
    "DDP": (f"init(); {DDP}(layer)", "joined"),
    "FSDP": ("init(); fully_shard(layer, mesh=mesh('cpu', (2,))); layer(data)", "joined"),
    "tensor parallel": (
        "init(); parallelize_module(layer, mesh('cpu', (2,)), ColwiseParallel())",
        "joined",
    ),
    "in a forked process": (
        (
            "child = mp.get_context('fork').Process(target=lambda: (init(), dist.all_reduce(data)));"
            " child.start(); child.join()"
        ),
        "joined",
    ),
    "after compiled code, whose collectives are not calls of Python": (
        (
            "init(); torch.compile(lambda x: (dist.all_reduce(x), x + 1)[1], backend='eager',"
            " fullgraph=True)(data); dist.all_reduce(data)"
        ),
        "joined",
    ),
}
RANK = """\
import multiprocessing as mp, os, sys, traceback
from cloudtrain_runtime.launcher.group_joins import JoinRecorder
recorder = JoinRecorder()
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh as mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard
from cloudtrain_runtime.process.function_call import run_function
from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import read_context

rank = int(os.environ["RANK"])
for number, code in enumerate(sys.argv[1:]):
    if (pid := os.fork()) == 0:
        folder = f"{os.environ['CLOUDTRAIN_ML_ROOT']}/{number}"
        init = lambda: dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2)
        own_group = lambda: [dist.new_group([each]) for each in (0, 1)][rank]
        data, layer = torch.ones(2), torch.nn.Linear(2, 2)
        try:
            exec(code)
            recorder.end()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(pid, 0)
    path = f"{os.environ['CLOUDTRAIN_ML_ROOT']}/output/joins/{rank}"
    print(open(path).read(), flush=True)
    open(path, "w").write("waiting")
"""


def test_only_moved_data_counts_as_joined(tmp_path: Path) -> None:
    MlTree(tmp_path).joins.mkdir(parents=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *(code for code, _ in CASES.values())],
            env={
                **os.environ,
                ML_ROOT_VARIABLE: str(tmp_path),
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    # FSDP on a CPU comes with torch 2.6; without a collective, the group is only created.
    has_fsdp = hasattr(torch.distributed.fsdp, "fully_shard")
    expected = {name: state for name, (_, state) in CASES.items()}
    expected["FSDP"] = "joined" if has_fsdp else "initialized"
    ended = [rank.communicate() for rank in ranks]
    for out, err in ended:
        assert dict(zip(CASES, out.split(), strict=True)) == expected, err
