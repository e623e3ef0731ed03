"""The hosts and ranks of a rehearsal: as many as this machine carries, in the layout of the job."""

from __future__ import annotations

from dataclasses import dataclass

from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import Plan
from cloudtrain_runtime.contract import TrainConfig

_MOST_HOSTS = 2
_MOST_RANKS = 8
"""More ranks on the CPU than this show nothing new and take long to start."""


@dataclass(frozen=True)
class Shape:
    """Hosts and ranks.

    Attributes:
        hosts: Number of simulated instances.
        ranks: Ranks per instance.
        problem: Why the job's layout does not fit on this machine, or an empty text.
    """

    hosts: int
    ranks: int
    problem: str = ""

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.hosts * self.ranks


def choose_shape(spec: JobSpec, plan: Plan, *, cpus: int, gpus: int) -> Shape:
    """Return the hosts and ranks of a rehearsal.

    Two hosts where the job has several, so that the loss of one can be shown. On GPUs one rank each; on CPUs one per
    core, at least two in all if the job has two ranks.

    Args:
        spec: The job.
        plan: Its plan for the cluster.
        cpus: Cores of this machine.
        gpus: Its GPUs.
    """
    train = plan.config.train
    if gpus and needs_cpu(train, min(spec.cluster.preferred_instances, _MOST_HOSTS), gpus):
        text = "the hosts would share a GPU, and this parallel layout needs a GPU per rank: CUDA_VISIBLE_DEVICES= hides it"
        return Shape(1, 1, text)
    hosts = min(spec.cluster.preferred_instances, _MOST_HOSTS)
    wanted = plan.cluster.processes_per_instance
    if not wanted:
        wanted = max(1, (plan.cluster.world_size or 2) // plan.cluster.instances)
    if gpus:
        carried = max(1, gpus // hosts)
    else:
        carried = max(1, min(cpus, _MOST_RANKS) // hosts)
        if hosts * carried == 1:
            # Two ranks share the core: one alone shows nothing of a process group.
            carried = 2
    ranks = min(wanted, carried)
    group = _group_size(spec)
    fitting = next((each for each in range(ranks, 0, -1) if (hosts * each) % group == 0), None)
    if fitting is None and not gpus:
        # More ranks than cores are slow, and still work on a CPU.
        larger = range(ranks, _MOST_RANKS // hosts + 1)
        fitting = next((each for each in larger if (hosts * each) % group == 0), None)
    if fitting is None:
        text = f"the parallel layout needs a multiple of {group} ranks, and this machine carries {hosts * ranks}"
        return Shape(hosts, ranks, text)
    return Shape(hosts, fitting)


def other_sizes(shape: Shape, spec: JobSpec) -> list[tuple[int, int]]:
    """Return pairs of hosts and ranks per host, other than the shape's, for a resume with another world size.

    `cluster.prefer` gives all types the same number of ranks, on other numbers of instances; this machine shows a
    reduced pair: half the ranks.
    """
    if shape.world_size == 1:
        return [(1, 2)]
    ranks = shape.ranks
    if shape.hosts == 1:
        ranks = max(1, ranks // 2)
    if ranks % _group_size(spec) != 0:
        return []
    return [(1, ranks)]


def _group_size(spec: JobSpec) -> int:
    """Return the number by which the world size must be divisible."""
    parallel = None if spec.train is None else spec.train.parallel
    if parallel is None:
        return 1
    return parallel.group_size * (parallel.shard or 1)


def needs_cpu(train: TrainConfig | None, ranks: int, gpus: int) -> bool:
    """Return whether ranks must leave the GPUs of this machine alone.

    Ranks that share a GPU use Gloo, which has the collectives of DDP for a GPU's tensors, and not those of sharded,
    tensor or pipeline parallel layouts.
    """
    return 0 < gpus < ranks and train is not None and not train.parallel.is_plain
