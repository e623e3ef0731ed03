"""The methods of a Task: their arguments and return values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class TaskMethod:
    """A method that the entrypoint calls on a Task.

    Attributes:
        parameters: Names of its positional parameters, without `self`.
        is_required: Whether every Task must define it.
        returns: What it must return; empty if None is also valid.
        may_yield: Whether it may be a generator.
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
