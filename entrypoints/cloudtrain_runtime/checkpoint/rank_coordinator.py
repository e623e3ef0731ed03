"""Operations that all ranks of a save perform together, with shared error handling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from cloudtrain_runtime.process.process_group import gather
from cloudtrain_runtime.process.run_context import Context

T = TypeVar("T")


class SaveError(Exception):
    """A save failed on at least one rank. Every rank raises it."""


class RankCoordinator:
    """Runs the phases of a save on all ranks together. A failure on one rank raises `SaveError` on every rank.

    Every method is a collective operation: all ranks call it, in the same order.

    Args:
        group: Process group of all ranks that nothing else uses; None for one rank.
    """

    def __init__(self, context: Context, group: dist.ProcessGroup | None) -> None:
        self._context = context
        self._group = group
        self.is_main = context.is_main

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Run an action on every rank; return this rank's own result."""
        value, error = self._try(action)
        for found in gather(error, self._context, self._group):
            if found is not None:
                raise SaveError(found)
        return value  # type: ignore[return-value] # without an error there is a value

    def all_gather(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; return the results of all ranks, in rank order, on every rank."""
        return gather(self.run_on_all(action), self._context, self._group)

    def gather_on_main(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; return the results of all ranks on rank 0, an empty list elsewhere."""
        value = self.run_on_all(action)
        if self._group is None:
            return [value]
        # torch fills the list of the receiving rank; the others pass None.
        values: list[Any] | None = None
        if self.is_main:
            values = [None] * self._context.world_size
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def broadcast_from_main(self, action: Callable[[], T]) -> T:
        """Run an action on rank 0; return its result on every rank."""
        outcome: list[Any] = [self._try(action) if self.is_main else None]
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        return self._unwrap(outcome[0])  # type: ignore[no-any-return]

    def scatter_from_main(self, action: Callable[[], list[T]]) -> T:
        """Run an action on rank 0 that returns one element per rank; return each rank's own element."""
        elements: list[Any] | None = None
        if self.is_main:
            values, error = self._try(action)
            # After an error there are no values: each rank gets the error.
            each_value = values or self._context.world_size * (None,)
            elements = [(value, error) for value in each_value]
        if self._group is None:
            return self._unwrap((elements or [])[0])  # type: ignore[no-any-return]
        own: list[Any] = [None]
        dist.scatter_object_list(own, elements, src=0, group=self._group)
        return self._unwrap(own[0])  # type: ignore[no-any-return]

    def _try(self, action: Callable[[], T]) -> tuple[T | None, str | None]:
        try:
            return action(), None
        except Exception as error:  # noqa: BLE001 (the other ranks must learn of any failure, or they wait forever)
            return None, f"rank {self._context.rank}: {type(error).__name__}: {error}"

    def _unwrap(self, outcome: tuple[Any, str | None]) -> Any:
        value, error = outcome
        if error is not None:
            raise SaveError(error)
        return value
