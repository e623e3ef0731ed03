"""The context of a process: rank, world size, hosts, device, folders, seed, step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cloudtrain_runtime.contract import (
    CODE_CHANNEL,
    CONFIG_CHANNEL,
    ML_ROOT_VARIABLE,
    MlTree,
    TrainConfig,
    sort_hosts,
)
from cloudtrain_runtime.contract.gpu_sharing import is_gpu_shared
from cloudtrain_runtime.contract.strict_json import load_json
from cloudtrain_runtime.process.environment import ml_tree, read_run_config, torchrun_variables


class Channels(dict[str, Path]):
    """Folder of each input channel by name; the error for any other name says how to add it."""

    def __missing__(self, name: str) -> Path:
        """Raise the error for a channel that the job does not have."""
        known = f"its channels: {', '.join(self)}" if self else "it has no channels"
        raise KeyError(
            f"the job has no channel {name!r} ({known}). Add to the job file: data: {{{name}: FOLDER}}"
        )


@dataclass
class StepCounter:
    """The number of optimizer steps done; shared between the training loop and `context().step`."""

    step: int = 0


@dataclass(frozen=True)
class Context:
    """The context of one process in a run. Outside of a run: one process, the working folder.

    Attributes:
        run: Run id, or an empty string outside of a run.
        rank: Index of this process among all.
        world_size: Number of processes on all hosts.
        local_rank: Index among the processes of this host.
        local_world_size: Number of processes on this host.
        host: Name of this host.
        hosts: All hosts; the first is the master.
        device: Device of this rank.
        backend: Collective backend: `nccl`, `gloo` or `smddp`.
        channels: Folder of each input channel by name.
        model_dir: Folder whose content becomes model.tar.gz at the end.
        output_dir: Folder whose content becomes output.tar.gz at the end.
        checkpoint_dir: Folder that scripts write checkpoints to; synchronized with S3 on a cluster.
        restarts: How often torchrun has restarted this group of ranks.
        seed: The job's seed.
        code: Digest of the code.
        request: Identity of the plan.
        train: The job's train section, or None for a script.
        training: Identity of the training, which its checkpoints record; empty outside of a run.
    """

    run: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    hosts: tuple[str, ...]
    device: torch.device
    backend: str
    channels: Mapping[str, Path]
    model_dir: Path
    output_dir: Path
    checkpoint_dir: Path
    restarts: int = 0
    seed: int = 0
    code: str = ""
    request: str = ""
    train: TrainConfig | None = None
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    progress: StepCounter = field(default_factory=StepCounter, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints events and writes the model."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Optimizer steps done so far, including those before a resume."""
        return self.progress.step


_current: Context | None = None


def context() -> Context:
    """Return the context of this process."""
    global _current  # noqa: PLW0603 (one process has one context)
    if _current is None:
        _current = read_context(os.environ)
    return _current


def read_context(environ: Mapping[str, str]) -> Context:
    """Return the context that an environment describes."""
    environ = {**environ, **torchrun_variables(environ)}
    config = read_run_config(environ)
    tree = ml_tree(environ)
    root = tree if config is not None else MlTree(Path.cwd())
    hosts = tuple(sort_hosts(load_json(environ.get("SM_HOSTS", "[]")) or ["localhost"]))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    distribution = ""
    # Local runs use torch's own backends in place of SMDDP.
    if config and ML_ROOT_VARIABLE not in environ:
        distribution = config.distribution
    device, backend = choose_device(local_rank, local_world_size, distribution, environ)
    if config and config.cuda_on_cpu:
        device = torch.device("cpu")
        backend = "gloo"
    named = load_json(environ.get("SM_CHANNELS", "[]"))
    return Context(
        run=config.run if config else "",
        rank=int(environ.get("RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        local_rank=local_rank,
        local_world_size=local_world_size,
        host=environ.get("SM_CURRENT_HOST") or hosts[0],
        hosts=hosts,
        device=device,
        backend=backend,
        channels=Channels(
            (name, root.data / name) for name in named if name not in (CODE_CHANNEL, CONFIG_CHANNEL)
        ),
        model_dir=Path(environ.get("SM_MODEL_DIR", root.model)),
        output_dir=Path(environ.get("SM_OUTPUT_DATA_DIR", root.output_data)),
        checkpoint_dir=root.checkpoints,
        restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        seed=config.train.seed if config and config.train else 0,
        code=config.code if config else "",
        request=config.request if config else "",
        train=config.train if config else None,
        training=config.training if config else {},
    )


def choose_device(
    local_rank: int, local_world_size: int, distribution: str, environ: Mapping[str, str]
) -> tuple[torch.device, str]:
    """Return the device of a rank and the collective backend of its group.

    NCCL needs a GPU per rank; ranks that share one, and ranks on a CPU, use Gloo. All hosts choose the same backend.
    """
    gpus = torch.cuda.device_count()
    if gpus == 0:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank % gpus)
    if is_gpu_shared(local_world_size, gpus, environ):
        return device, "gloo"
    if distribution in ("pytorchddp", "smdistributed"):
        return device, "smddp"
    return device, "nccl"
