"""The identity of a training, which decides whether a run may resume from a checkpoint.

The plan computes it, and `run.json` and each manifest contain it. Two runs are the same training when entry, arguments,
data and `train` are equal except for the training length. Cluster, image, limits, tags and code may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

LENGTH_FIELDS: Final = frozenset({"epochs", "steps"})
"""Fields of `train` that say how long to train."""

_MOST_NAMED = 3


def is_same_training(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two identities are of the same training. An empty one is unknown and matches any."""
    return not one or not other or not list(_differences(one, other))


def describe_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how a checkpoint's training differs from this one, such as `train.seed is 1 there and 2 here`."""
    found = list(_differences(saved, own))
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def _differences(saved: Any, own: Any, name: str = "") -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        for key in sorted({*saved, *own}):
            below = f"{name}.{key}" if name else key
            yield from _differences(saved.get(key, _MISSING), own.get(key, _MISSING), below)
    # NaN is not equal to itself, and is the same argument.
    elif saved is not own and saved != own and repr(saved) != repr(own):
        yield f"{name} is {_describe(saved)} there and {_describe(own)} here"


_MISSING: Final = object()


def _describe(value: Any) -> str:
    if value is _MISSING:
        return "the default"
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text[:60]
