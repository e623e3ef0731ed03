"""Warnings about a script whose source does not fit the plan."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.script_conventions import Conventions
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import warning

_CHECKPOINTS = "/opt/ml/checkpoints"


def warn_about_script(spec: JobSpec, conventions: Conventions, processes: int | None) -> Iterator[Diagnostic]:
    """Warn about ranks and checkpoints in a script's source.

    Args:
        spec: The job.
        conventions: What was found in the script's source.
        processes: Ranks per instance that cloudtrain starts; None when it is unknown before the start.
    """
    if spec.code.script is None:
        return
    if processes != 1:
        yield from _warn_of_own_ranks(conventions, processes)
    is_alone = processes == 1 and spec.cluster.instances == 1
    if not conventions.joins and not conventions.starts_ranks and not is_alone:
        yield warning(
            f"{spec.code.script} shows no sign of torch.distributed or of a framework that uses it: without a process "
            "group each rank trains a model of its own. Join the ranks (torch.distributed.init_process_group), or use "
            "one instance and cluster.processes_per_instance: 1"
        )
    if not conventions.saves and not _names_checkpoints(spec):
        yield warning(
            f"{spec.code.script} shows no sign of checkpoints that are kept: it neither imports cloudtrain_runtime nor "
            f"names {_CHECKPOINTS}, and the job has no code.outputs. An interrupted run starts from the beginning"
            + ("" if spec.limits.hang is None else ", and limits.hang, which needs reports of progress, has no effect")
        )


def _warn_of_own_ranks(conventions: Conventions, processes: int | None) -> Iterator[Diagnostic]:
    started = f"cloudtrain starts {processes or 'several'} ranks on each instance"
    if conventions.spawn is not None:
        yield warning(
            f"{conventions.spawn} starts processes with torch.multiprocessing.spawn, and {started}, each of which "
            "would do so: where these are its ranks, use cluster.processes_per_instance: 1"
        )
    if conventions.launcher is not None:
        yield warning(
            f"{conventions.launcher} starts a launcher of ranks (torchrun, accelerate launch or deepspeed), and "
            f"{started}, each of which would do so: use cluster.processes_per_instance: 1"
        )
    if conventions.own_rank is not None:
        yield warning(
            f"{conventions.own_rank}, which torchrun has set for each rank: where the script computes its own ranks, "
            "use cluster.processes_per_instance: 1"
        )


def _names_checkpoints(spec: JobSpec) -> bool:
    """Return whether the job has outputs, or passes the script the folder of checkpoints."""
    args = spec.code.args
    values = [*(args.values() if isinstance(args, dict) else args), *spec.code.variables.values()]
    return bool(spec.code.outputs) or any(_CHECKPOINTS in str(value) for value in values)
