"""Options of optimizers, such as the learning rate, as texts: to compare those of a run with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

SETTINGS = "cloudtrain.settings"
"""Name of the record of settings among the objects of a checkpoint. A keyword argument cannot have it."""

Options = dict[str, Any]
"""Options of one group of an optimizer by name."""
Texts = Mapping[str, str]
"""Settings as texts by name, which can be compared and saved whatever their type is."""


def group_options(optimizer: Optimizer) -> list[Options]:
    """Return copies of the options of an optimizer's groups, without their parameters."""
    return [
        {key: copy_value(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def describe_options(optimizer: Optimizer) -> list[Texts]:
    """Return the options of an optimizer's groups as texts."""
    return [as_texts(group) for group in group_options(optimizer)]


def option_differences(
    saved: Sequence[Texts], own: Sequence[Texts], what: str = "optimizer"
) -> list[str]:
    """Return the options of an optimizer's groups that differ, as `describe_changes` does, once for all groups."""
    found: dict[str, None] = {}
    for before, now in zip(saved, own, strict=False):
        found |= dict.fromkeys(describe_changes(before, now, what))
    return list(found)


def describe_changes(before: Texts, now: Texts, what: str) -> Iterator[str]:
    """Yield each public setting that differs, such as `optimizer: lr was 0.1 and is 0.01`."""
    for key in changed_names(before, now):
        # What the schedule derives from the rates and from its step, and its private state, says
        # nothing new.
        if not key.startswith("_") and key != "base_lrs":
            yield f"{what}: {key} was {before[key]} and is {now[key]}"


def changed_names(before: Texts, now: Texts) -> list[str]:
    """Return the names with different values. Only common ones: another version of PyTorch has others."""
    return [key for key in now if key in before and before[key] != now[key]]


def copy_value(value: Any) -> Any:
    """Return an option that a change of the optimizer does not change."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def as_texts(options: Mapping[Any, Any]) -> Texts:
    """Return settings as texts."""
    return {str(key): as_text(value) for key, value in options.items()}


def as_text(value: Any) -> str:
    """Return a setting as text, equal for equal values; of a function or an object its type."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {as_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__
