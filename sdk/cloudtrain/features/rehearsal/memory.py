"""The check `memory`: whether one rank's state and activations fit the job's instance type."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace

from cloudtrain import catalog
from cloudtrain.backends.container.filesystem import host_names, prepare_tree
from cloudtrain.features.rehearsal.base import RehearsalContext
from cloudtrain.features.rehearsal.gpu_fit import (
    Variant,
    fits,
    parse_out_of_memory,
    smaller_batch,
    variants,
)
from cloudtrain.features.rehearsal.rank_memory import GPU_RESERVED_BYTES, RankMemory, rank_capacity
from cloudtrain.support.checks import Check, Result
from cloudtrain.support.units import format_size
from cloudtrain_runtime.contract import MlTree, TrainConfig

NAME = "memory"
_PROBE = "cloudtrain_runtime.training.memory_probe"
_MOST_OPTIONS = 2
"""Changes that the detail of a failed check names."""
_CERTAIN = 1.2
"""An estimate above this share of the capacity fails the check; between that and the margin it is unknown."""


def check_memory(context: RehearsalContext) -> Iterable[Check]:
    """Compare the memory that a rank of the cluster needs with what its instance type has."""
    train = context.plan.config.train
    cluster = context.plan.cluster
    if context.plan.config.task is None or train is None:
        return [
            _unknown(
                "the memory of a script is not measured; train it as a Task to have it estimated"
            )
        ]
    if train.parallel.pipeline > 1:
        return [_unknown("the memory of pipeline stages is not computed")]
    if cluster.world_size == 0 or cluster.processes_per_instance is None:
        return [_unknown(f"the catalog does not have the GPUs of {cluster.instance_type}")]
    capacities = []
    for name in context.spec.cluster.types:
        instance = catalog.find_instance(name)
        found = None
        if instance is not None:
            found = rank_capacity(instance, cluster.processes_per_instance)
        if found is None:
            return [_unknown(f"the catalog does not have the memory of {name}")]
        capacities.append((found, name))
    try:
        memory = probe(context, train)
    except ProbeError as error:
        return [_unknown(str(error))]
    capacity, name = min(capacities)
    return [_verdict(context, train, memory, capacity, f"one rank's part of {name}")]


class ProbeError(Exception):
    """The memory could not be measured. The message gives the reason in one line."""


def explain_out_of_memory(
    context: RehearsalContext, log: str, ranks: int, ranks_per_gpu: int = 1
) -> Check | None:
    """Return why training cannot be shown on this machine's GPU, and what fits it; None if the memory was enough.

    It is no failure of the job, whose GPU may be larger: the check `memory` judges that one.

    Args:
        context: The job.
        log: Output of the rehearsed run.
        ranks: Number of its ranks.
        ranks_per_gpu: Ranks that share a GPU.
    """
    found = parse_out_of_memory(log)
    train = context.plan.config.train
    if found is None:
        return None
    size = "" if found.capacity is None else f" of {format_size(found.capacity)}"
    detail = f"a GPU here{size} is too small for the job: an allocation of {format_size(found.tried)} failed"
    if train is not None and found.capacity is not None:
        capacity = max(0, found.capacity // ranks_per_gpu - GPU_RESERVED_BYTES)
        try:
            memory = probe(context, train, ranks)
            advice = _advice(_fitting(context, train, memory, capacity, ranks))
            detail += f"; {memory.describe(train.batch_size)}{advice}"
        except ProbeError as error:
            detail += f"; {error}"
    return Check("trains", Result.UNKNOWN, detail)


def probe(context: RehearsalContext, train: TrainConfig, ranks: int | None = None) -> RankMemory:
    """Measure, in a process of its own, what a rank needs with a train section.

    Args:
        context: The job.
        train: The train section.
        ranks: Number of all ranks; by default that of the cluster.

    Raises:
        ProbeError: the Task failed, or there was not enough time.
    """
    tree = MlTree(context.folder / "memory")
    hosts = host_names(1)
    prepare_tree(tree, context.plan.request, hosts[0], hosts)
    for name, folder in context.channels.items():
        link = tree.data / name
        if not link.is_symlink():
            link.symlink_to(folder)
    tree.run_config.parent.mkdir(parents=True, exist_ok=True)
    config = replace(context.plan.config, train=train)
    tree.run_config.write_text(config.to_json(), encoding="utf-8")
    world_size = str(ranks or context.plan.cluster.world_size)
    command = [context.python, "-m", _PROBE, "--root", str(tree.root), "--world-size", world_size]
    try:
        done = context.run(command)
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
    context: RehearsalContext, train: TrainConfig, memory: RankMemory, capacity: int, place: str
) -> Check:
    peak = memory.peak_bytes(train.batch_size)
    size = f"a rank needs about {format_size(peak)} of {format_size(capacity)} ({place}): "
    size += memory.describe(train.batch_size)
    if fits(memory, train.batch_size, capacity):
        return Check(NAME, Result.PASS, size)
    advice = _advice(_fitting(context, train, memory, capacity, context.plan.cluster.world_size))
    if memory.state_bytes > capacity:
        return Check(NAME, Result.FAIL, f"the state alone does not fit; {size}{advice}")
    # Tensor parallelism divides some activations; they are measured without it.
    if peak > _CERTAIN * capacity and train.parallel.tensor == 1:
        return Check(NAME, Result.FAIL, f"{size}{advice}")
    text = f"{size}, which is too near to the limit for an estimate{advice}"
    return Check(NAME, Result.UNKNOWN, text)


def _advice(found: Iterable[Variant]) -> str:
    options = [f"{each.change} ({each.effect})" for each in found]
    if not options:
        return ". No smaller batch, precision or sharding fits"
    return f". These fit: {'; '.join(options)}"


def _fitting(
    context: RehearsalContext, train: TrainConfig, memory: RankMemory, capacity: int, ranks: int
) -> Iterator[Variant]:
    """Yield a few changes that fit; each but the smaller batch is measured."""
    found = 0
    batch = smaller_batch(memory, train, capacity)
    if batch is not None:
        found += 1
        yield batch
    for variant in variants(train, max(1, ranks // train.parallel.group_size)):
        try:
            measured = probe(context, variant.train, ranks)
        except ProbeError:
            continue
        if fits(measured, train.batch_size, capacity):
            found += 1
            yield variant
        elif (both := smaller_batch(measured, variant.train, capacity)) is not None and found == 0:
            found += 1
            yield Variant(f"{variant.change}, {both.change}", both.train, variant.effect)
        if found == _MOST_OPTIONS:
            return


def _unknown(detail: str) -> Check:
    return Check(NAME, Result.UNKNOWN, detail)
