"""Comparison of checkpoints, tensor by tensor: whether a resumed training has reached the same state.

Run as a program (`python -m cloudtrain_runtime.checkpoint.comparison REFERENCE OTHER...`) it prints one JSON object:
a `result` with a comparison per other checkpoint, or an `error`. Each argument names one checkpoint by its uri.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.errors import JobError

_RANDOM = "rng."
"""Prefix of the states of random generators, one per rank."""
_NAMES = 5
"""Entries that a comparison names at most."""


@dataclass(frozen=True)
class Difference:
    """How a checkpoint differs from another one.

    Attributes:
        entries: Entries of both, such as tensors.
        different: Number of entries that are not equal bit for bit.
        missing: Number of entries that only one of them has.
        names: First names of these entries.
        largest: Largest absolute difference of two elements; infinite where one is not a number or shapes differ.
        relative: Largest difference of two tensors: the norm of the difference by the norm of the reference.
        random: Number of states of random generators that are not equal; these do not count as entries.
        state: Names of the values in the manifest, such as the position in the data, that are not equal.
    """

    entries: int
    different: int
    missing: int
    names: tuple[str, ...]
    largest: float
    relative: float
    state: tuple[str, ...]
    random: int = 0


def compare(
    left: tuple[Mapping[str, Any], Mapping[str, Any]], right: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Difference:
    """Compare two checkpoints, each as `Inspection.load` returns it: entries, and the state in the manifest."""
    (entries, state), (others, other_state) = left, right
    # A script that seeds no generator of Python or NumPy has other ones in each run.
    drawn = [{name: each for name, each in found.items() if name.startswith(_RANDOM)} for found in (entries, others)]
    random = sum(not _is_equal(drawn[0].get(name), drawn[1].get(name)) for name in {**drawn[0], **drawn[1]})
    entries, others = (
        {name: each for name, each in found.items() if not name.startswith(_RANDOM)} for found in (entries, others)
    )
    common = sorted(entries.keys() & others.keys())
    missing = sorted(entries.keys() ^ others.keys())
    found = {name: _distance(entries[name], others[name]) for name in common}
    different = [name for name, distance in found.items() if distance is not None]
    distances = [distance for distance in found.values() if distance is not None]
    return Difference(
        len(entries.keys() | others.keys()),
        len(different),
        len(missing),
        tuple([*missing, *different][:_NAMES]),
        max((each[0] for each in distances), default=0.0),
        max((each[1] for each in distances), default=0.0),
        tuple(name for name in sorted(state.keys() | other_state.keys()) if state.get(name) != other_state.get(name)),
        random,
    )


def _distance(left: Any, right: Any) -> tuple[float, float] | None:
    """Return the largest absolute and the relative difference of two entries; None if they are equal bit for bit."""
    import torch

    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return None if _is_equal(left, right) else (math.inf, math.inf)
    if left.shape != right.shape or left.dtype != right.dtype:
        return math.inf, math.inf
    if left.numel() == 0 or torch.equal(left, right):
        return None
    first, second = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (left, right))
    difference = (first - second).abs()
    if not bool(torch.isfinite(difference).all()):
        is_same_place = torch.equal(torch.isfinite(first), torch.isfinite(second))
        rest = torch.where(torch.isfinite(difference), difference, torch.zeros_like(difference))
        same_values = is_same_place and torch.equal(first.nan_to_num(), second.nan_to_num())
        return None if same_values and not bool(rest.any()) else (math.inf, math.inf)
    return float(difference.max()), float(difference.norm() / max(float(first.abs().norm()), 1e-300))


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


def main(argv: Sequence[str]) -> int:
    """Compare the first checkpoint with the others; return 0, or 1 if an error was printed."""
    try:
        first, *others = map(_read, argv)
        found = [asdict(compare(first, other)) for other in others]
    except (JobError, OSError) as error:
        print(dump_json({"event": "error", "message": str(error) or type(error).__name__}), flush=True)
        return 1
    print(dump_json({"event": "result", "differences": [_json(each) for each in found]}), flush=True)
    return 0


def _json(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a difference whose infinite numbers are text, which JSON can hold."""
    return {name: str(value) if value == math.inf else value for name, value in found.items()}


def _read(uri: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    inspection = Inspection(uri)
    return inspection.load(inspection.find())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
