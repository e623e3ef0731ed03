"""Functions that tests run on several ranks: real processes with real Gloo.

They are in a module of their own because the fork server must import them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.metrics.bandwidth import bus_bandwidth, measure_bandwidth, report_bandwidth
from cloudtrain_runtime.metrics.profiler import StepProfiler
from cloudtrain_runtime.metrics.step_timer import StepClock
from cloudtrain_runtime.process import process_group
from cloudtrain_runtime.process.run_context import Context, read_context
from cloudtrain_runtime.task import Task
from cloudtrain_runtime.training.trainer import Trainer
from support.fork_server import fork_server
from support.ranks import TRAIN

_SECONDS = 120


def start(
    work: Callable[[Context, Path], Any], world_size: int, folder: Path
) -> tuple[list[Any], str]:
    """Run a function on every rank; return the result of each, and the output of all."""
    ready = fork_server("support.measurements")
    port = free_port()
    arguments = [(work, rank, world_size, port, folder) for rank in range(world_size)]
    processes = [ready.Process(target=_rank, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SECONDS)
        if process.exitcode is None:
            process.kill()
    text = "".join((folder / f"output-{rank}").read_text() for rank in range(world_size))
    assert [process.exitcode for process in processes] == [0] * world_size, text
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(world_size)], text


def _rank(
    work: Callable[[Context, Path], Any], rank: int, world_size: int, port: int, folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % 2),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    hosts = tuple(f"algo-{1 + host}" for host in range(-(-world_size // 2)))
    context = replace(
        read_context(os.environ), hosts=hosts, host=hosts[rank // 2], output_dir=folder / "data"
    )
    process_group.join_ranks(context)
    result = work(context, folder)
    (folder / f"result-{rank}").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def bandwidth(context: Context, folder: Path) -> Any:
    """Report the bandwidth twice, then measure it once more; return that measurement."""
    report_bandwidth(context)
    report_bandwidth(context, network_gbps=1e9)
    size, seconds = measure_bandwidth(context)
    return [size, seconds, bus_bandwidth(size, seconds, context.world_size)]


class _Uneven(Task):
    """Linear regression whose samples take `seconds` to load."""

    tokens_per_sample = 4

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def datasets(self) -> Mapping[str, Dataset[Any]]:
        return {"train": TensorDataset(torch.ones(240, 3))}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = model(batch[0]).square().mean()
        return result

    def collate(self, samples: Sequence[Any]) -> Any:
        time.sleep(self.seconds)
        return super().collate(samples)


def uneven_run(context: Context, folder: Path) -> Any:
    """Train for 12 steps with slow data on rank 2, and profile the 5th and 6th."""
    os.environ.update(CLOUDTRAIN_LOG_EVERY_STEPS="1", CLOUDTRAIN_ML_ROOT=str(folder / "ml"))
    (folder / "ml" / "output").mkdir(parents=True, exist_ok=True)
    train = replace(TRAIN, epochs=None, steps=12, batch_size=2, profile_at=5, profile_steps=2)
    checkpoint = CheckpointConfig((folder / "checkpoints").as_uri(), None, 6, 2, "auto")
    slow = 0.12 if context.rank == 2 else 0.0
    here = replace(context, model_dir=folder / "model", train=train, run="uneven")
    Trainer(_Uneven(slow), train, checkpoint, here).run()
    return None


def profiled_steps(context: Context, folder: Path) -> Any:
    """Run 9 steps, and profile the 4th to the 6th."""
    profiling = StepProfiler(context, StepClock(context.device), at=4, steps=3)
    for step in range(1, 10):
        profiling.on_step(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        dist.all_reduce(torch.zeros(1))
    profiling.close()
    return None
