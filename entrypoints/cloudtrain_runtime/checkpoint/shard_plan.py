"""The plan of a save: which rank writes which part of the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from cloudtrain_runtime.checkpoint.rank_coordinator import RankCoordinator
from cloudtrain_runtime.checkpoint.shards import CheckpointWriter, StagingPlanner
from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.checkpoint.training_state import States


@dataclass(frozen=True)
class ShardPlan:
    """What this rank writes.

    Attributes:
        local: What this rank could write: everything that it holds.
        own: The part that it writes.
        metadata: DCP's metadata of the complete checkpoint, on rank 0 only.
    """

    local: SavePlan
    own: SavePlan
    metadata: Metadata | None


class ShardPlanner:
    """Distributes the state over the ranks, and reuses the plan while the structure of the state stays the same.

    Args:
        storage: Where the checkpoints are written.
        ranks: Coordinator of all ranks.
        planner: DCP's planner for this rank.
        is_main: Whether this is rank 0.
    """

    def __init__(self, storage: Storage, ranks: RankCoordinator, planner: StagingPlanner, *, is_main: bool) -> None:
        self._storage = storage
        self._ranks = ranks
        self._planner = planner
        self._is_main = is_main
        self._cached: ShardPlan | None = None

    def plan(self, states: States, unshared: frozenset[str]) -> ShardPlan:
        """Return what this rank writes. A collective operation of all ranks.

        Args:
            states: As `training_state.collect_states` returns them.
            unshared: Names of values that each rank may have its own of. The lowest rank's value is saved.

        Raises:
            SaveError: the plan failed on some rank.
        """
        local = self._ranks.run_on_all(lambda: self._plan_locally(states))
        cached = self._cached
        if cached is not None and not any(self._ranks.all_gather(lambda: local != cached.local)):
            return cached
        plans = self._ranks.gather_on_main(lambda: (local, unshared))
        own, metadata = self._ranks.scatter_from_main(lambda: self._plan_globally(plans))
        self._cached = ShardPlan(local, self._planner.finish_plan(own), metadata)
        return self._cached

    def _plan_locally(self, states: States) -> SavePlan:
        self._planner.set_up_planner(states, None, self._is_main)
        return self._planner.create_local_plan()

    def _plan_globally(self, plans: list[tuple[SavePlan, frozenset[str]]]) -> list[tuple[SavePlan, Metadata | None]]:
        shared, metadata = self._planner.create_global_plan(list(_without_duplicates(plans)))
        shared = CheckpointWriter(self._storage, "", lambda _: None).prepare_global_plan(shared)
        return [(plan, None if rank else metadata) for rank, plan in enumerate(shared)]


def _without_duplicates(plans: list[tuple[SavePlan, frozenset[str]]]) -> Iterator[SavePlan]:
    """Yield each rank's plan without the unshared values that a lower rank writes.

    A set of buffers is then saved as one rank has it, and not mixed from several ranks.
    """
    seen: set[str] = set()
    for plan, unshared in plans:
        names = {item.index.fqn for item in plan.items} & unshared
        yield replace(plan, items=[item for item in plan.items if item.index.fqn not in names & seen])
        seen |= names
