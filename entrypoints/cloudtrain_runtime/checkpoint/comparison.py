"""Comparison of checkpoints, tensor by tensor: whether a resumed training has reached the same state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_RANDOM = "rng."
"""Prefix of the states of random generators, one per rank."""
_NAMES = 5
"""Entries that a comparison names at most."""


def compare(
    left: tuple[Mapping[str, Any], Mapping[str, Any]],
    right: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> dict[str, Any]:
    """Compare two checkpoints, each as `Inspection.load` returns it: entries, and the state in the manifest.

    Returns:
        Values by name:

        - `entries`: number of entries of both, such as tensors;
        - `different`: number of entries that are not equal bit for bit;
        - `missing`: number of entries that only one of them has;
        - `names`: first names of these entries;
        - `largest`: largest absolute difference of two elements; infinite where one is not a number or shapes differ;
        - `relative`: largest difference of two tensors: the norm of the difference by the norm of the reference;
        - `random`: number of states of random generators that are not equal; these do not count as entries;
        - `state`: names of the values in the manifest, such as the position in the data, that are not equal.
    """
    entries, state = left
    others, other_state = right
    names = sorted(entries.keys() | others.keys())
    found = {name: _distance(entries.get(name), others.get(name)) for name in names}
    changed = {name: distance for name, distance in found.items() if distance is not None}
    # A script that seeds no generator of Python or NumPy has other ones in each run.
    random = [name for name in changed if name.startswith(_RANDOM)]
    for name in random:
        del changed[name]
    missing = [name for name in changed if name not in entries or name not in others]
    different = [name for name in changed if name not in missing]
    return {
        "entries": sum(not name.startswith(_RANDOM) for name in names),
        "different": len(different),
        "missing": len(missing),
        "names": [*missing, *different][:_NAMES],
        "largest": max((changed[name][0] for name in different), default=0.0),
        "relative": max((changed[name][1] for name in different), default=0.0),
        "random": len(random),
        "state": [
            name
            for name in sorted(state.keys() | other_state.keys())
            if state.get(name) != other_state.get(name)
        ],
    }


_INFINITE = (math.inf, math.inf)


def _distance(left: Any, right: Any) -> tuple[float, float] | None:
    """Return the largest absolute and the relative difference of two entries; None if they are equal bit for bit."""
    import torch

    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return None if _is_equal(left, right) else _INFINITE
    if left.shape != right.shape or left.dtype != right.dtype:
        return _INFINITE
    if left.numel() == 0 or torch.equal(left, right):
        return None
    first, second = (
        each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (left, right)
    )
    difference = (first - second).abs()
    if not bool(torch.isfinite(difference).all()):
        is_same_place = torch.equal(torch.isfinite(first), torch.isfinite(second))
        rest = torch.where(torch.isfinite(difference), difference, torch.zeros_like(difference))
        same_values = is_same_place and torch.equal(first.nan_to_num(), second.nan_to_num())
        is_same = same_values and not bool(rest.any())
        return None if is_same else _INFINITE
    # A reference of zeros has the norm 0.
    reference = max(float(first.abs().norm()), 1e-300)
    return float(difference.max()), float(difference.norm() / reference)


def _is_equal(left: Any, right: Any) -> bool:
    """Return whether two objects of a checkpoint are equal, at any depth."""
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_is_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)
