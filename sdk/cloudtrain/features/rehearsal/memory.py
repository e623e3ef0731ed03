"""The check `memory`: whether one rank's state and activations fit the job's instance type."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cloudtrain import catalog
from cloudtrain.backends.container.filesystem import host_names, prepare_tree
from cloudtrain.features.rehearsal.rank_memory import RankMemory, rank_capacity
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain.support.checks import Check, failed, passed, unknown
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import MlTree, TrainConfig

NAME = "memory"
_PROBE = "cloudtrain_runtime.training.memory_probe"
_MARGIN = 0.9
"""Share of the capacity that an estimate may use. Allocators leave gaps, and activations are an estimate."""

_CERTAIN = 1.2
"""An estimate above this share of the capacity fails the check; between that and the margin it is unknown."""

_OUT_OF_MEMORY = re.compile(r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)")

RunProgram = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Runs a program in the folder of the code, until the time of the rehearsal is over."""


class ProbeError(Exception):
    """The memory could not be measured. The message gives the reason in one line."""


def check_memory(
    spec: JobSpec, plan: Plan, channels: Mapping[str, Path], folder: Path, run: RunProgram
) -> Check:
    """Compare the memory that a rank of the cluster needs with what its instance type has.

    Args:
        spec: The job.
        plan: Its plan for the cluster.
        channels: Folder of each channel whose data is on this machine.
        folder: Folder for the files of the check.
        run: Runs a program.
    """
    train = plan.config.train
    cluster = plan.cluster
    if plan.config.task is None or train is None:
        return unknown(
            NAME, "the memory of a script is not measured; train it as a Task to have it estimated"
        )
    if train.parallel.pipeline > 1:
        return unknown(NAME, "the memory of pipeline stages is not computed")
    if cluster.world_size == 0 or cluster.processes_per_instance is None:
        return unknown(NAME, f"the catalog does not have the GPUs of {cluster.instance_type}")
    capacities = []
    for name in spec.cluster.types:
        instance = catalog.find_instance(name)
        found = None
        if instance is not None:
            found = rank_capacity(instance, cluster.processes_per_instance)
        if found is None:
            return unknown(NAME, f"the catalog does not have the memory of {name}")
        capacities.append((found, name))
    try:
        memory = probe(plan, channels, folder, run)
    except ProbeError as error:
        return unknown(NAME, str(error))
    capacity, name = min(capacities)
    return _verdict(train, memory, capacity, name, ranks=cluster.world_size)


def explain_out_of_memory(reason: str) -> Check | None:
    """Return why training cannot be shown on this machine's GPU; None if the memory was enough.

    It is no failure of the job, whose GPU may be larger: the check `memory` judges that one.
    """
    found = _OUT_OF_MEMORY.search(reason)
    if found is None:
        return None
    detail = f"a GPU here is too small for the job: an allocation of {found['size']} failed"
    return unknown("trains", detail)


def probe(plan: Plan, channels: Mapping[str, Path], folder: Path, run: RunProgram) -> RankMemory:
    """Measure, in a process of its own, what a rank of the cluster needs. See `check_memory` for the arguments.

    Raises:
        ProbeError: the Task failed, or there was not enough time.
    """
    tree = MlTree(folder / "memory")
    hosts = host_names(1)
    prepare_tree(tree, plan.request, hosts[0], hosts)
    for name, place in channels.items():
        (tree.data / name).symlink_to(place)
    tree.run_config.parent.mkdir(parents=True, exist_ok=True)
    tree.run_config.write_text(plan.config.to_json(), encoding="utf-8")
    world_size = str(plan.cluster.world_size)
    command = [sys.executable, "-m", _PROBE, "--root", str(tree.root), "--world-size", world_size]
    try:
        done = run(command)
    except subprocess.TimeoutExpired:
        raise ProbeError("the rehearsal's time ended before the memory was measured") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ProbeError(f"the memory could not be measured in one process: {reason}")
    try:
        return RankMemory.from_probe(lines[-1])
    except ValueError as error:
        raise ProbeError(str(error)) from None


def _verdict(
    train: TrainConfig, memory: RankMemory, capacity: int, instance_type: str, *, ranks: int
) -> Check:
    peak = memory.peak_bytes(train.batch_size)
    size = (
        f"a rank needs about {format_size(peak)} of {format_size(capacity)} (one rank's part of {instance_type}): "
        f"{memory.describe(train.batch_size)}"
    )
    if peak <= _MARGIN * capacity:
        return passed(NAME, size)
    advice = _advice(train, memory, capacity, ranks // train.parallel.group_size)
    if memory.state_bytes > capacity:
        return failed(NAME, f"the state alone does not fit; {size}{advice}")
    # Tensor parallelism divides some activations; they are measured without it.
    if peak > _CERTAIN * capacity and train.parallel.tensor == 1:
        return failed(NAME, f"{size}{advice}")
    text = f"{size}, which is too near to the limit for an estimate{advice}"
    return unknown(NAME, text)


def _advice(train: TrainConfig, memory: RankMemory, capacity: int, data_ranks: int) -> str:
    """Return the largest micro-batch that fits, and the fields that save memory."""
    text = ""
    batch = smaller_batch(memory, train.batch_size, capacity)
    if batch is not None:
        accumulate = train.accumulate * train.batch_size // batch
        text = f". This fits: train.batch_size={batch} and train.accumulate={accumulate} (the global batch stays the same)"
    others = []
    if train.precision == "fp32":
        others.append("train.precision=bf16")
    if not train.activation_checkpointing:
        others.append("train.activation_checkpointing=true")
    if train.parallel.data == "ddp" and data_ranks > 1:
        others.append("train.parallel.data=fsdp")
    if others:
        text += f". These need less memory: {', '.join(others)}"
    return text


def smaller_batch(memory: RankMemory, size: int, capacity_bytes: float) -> int | None:
    """Return the largest micro-batch below a size that fits, or None.

    Only divisors of the size keep the samples of a step as they are.
    """
    divisors = (each for each in range(size // 2, 0, -1) if size % each == 0)
    limit = _MARGIN * capacity_bytes
    return next((each for each in divisors if memory.peak_bytes(each) <= limit), None)
