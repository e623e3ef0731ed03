"""The methods of a Task: what the entrypoint gives to each, and what it expects back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class TaskMethod:
    """A method that the entrypoint calls on a Task.

    Attributes:
        parameters: Names of what it is given, by position, after `self`.
        is_required: Whether every Task must have it.
        returns: What it must return; empty where None is an answer, too.
        may_yield: Whether a generator will do.
    """

    parameters: tuple[str, ...]
    is_required: bool = False
    returns: str = ""
    may_yield: bool = False


TASK_METHODS: Final[Mapping[str, TaskMethod]] = {
    "model": TaskMethod((), is_required=True, returns="an nn.Module"),
    "datasets": TaskMethod((), is_required=True, returns='a mapping such as {"train": dataset}'),
    "loss": TaskMethod(("model", "batch"), is_required=True, returns="a scalar tensor"),
    "optimizer": TaskMethod(("model",), returns="a torch.optim.Optimizer"),
    "parallelize": TaskMethod(("model", "mesh"), may_yield=True),
    "pipeline": TaskMethod(("model", "stages"), returns="the modules of the chain", may_yield=True),
    "schedule": TaskMethod(("optimizer",)),
    "metrics": TaskMethod(("model", "batch"), returns="a mapping from name to tensor"),
    "predict": TaskMethod(("model", "batch"), returns="the predicted and the true class of each sample"),
    "collate": TaskMethod(("samples",), returns="a batch"),
}
"""Every method of a Task that the entrypoint calls, in the order of `Task`."""
