"""Nodes that a run has lost again and again: its next attempts avoid them, where others can take their place."""

from __future__ import annotations

from collections.abc import Iterable

from cloudtrain.backends.slurm.commands import Slurm
from cloudtrain.backends.slurm.slurm_output import Node


def avoid(slurm: Slurm, job: str, bad: Iterable[str], *, needed: int) -> tuple[str, ...]:
    """Let a job that waits in the queue get none of some nodes, unless it could never start without them.

    Args:
        slurm: Slurm's commands.
        job: Its id.
        bad: The nodes.
        needed: How many nodes it needs.

    Returns:
        The nodes that it avoids.

    Raises:
        CloudtrainError: Slurm refuses, or does not answer.
    """
    wanted = set(bad)
    found = slurm.job(job) if wanted else None
    if found is None:
        return ()
    nodes = slurm.nodes()
    excluded = {each.name for each in slurm.nodes(found.excluded)} if found.excluded else set()
    avoided = wanted & excluded
    for name in sorted(wanted - excluded):
        if _count_others(nodes, name, excluded | {name}) >= needed:
            excluded.add(name)
            avoided.add(name)
    if avoided:
        slurm.exclude(job, ",".join(sorted(excluded)))
    return tuple(sorted(avoided))


def _count_others(nodes: Iterable[Node], name: str, excluded: Iterable[str]) -> int:
    """Return how many nodes of the kind of one are in service, without the excluded ones."""
    by_name = {each.name: each for each in nodes}
    kind = by_name[name].kind if name in by_name else ""
    others = [each for each in by_name.values() if each.name not in set(excluded)]
    return sum(each.kind == kind and each.is_in_service for each in others)
