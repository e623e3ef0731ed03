"""How many random inputs tests try: few in `make check`, more in `make test-all`, most with CLOUDTRAIN_TEST_SIZE=nightly."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

VARIABLE = "CLOUDTRAIN_TEST_SIZE"
SEEDS_VARIABLE = "CLOUDTRAIN_TEST_SEEDS"
_SCALES = {"quick": 0.2, "ci": 1.0, "nightly": 10.0}
_SCALE = _SCALES[os.environ.get(VARIABLE, "ci")]
IS_NIGHTLY = _SCALE > 1
_Case = TypeVar("_Case")


def tries(number: int) -> int:
    """Return how many inputs a test tries that tries this many in CI."""
    return max(1, round(number * _SCALE))


def seed_blocks(number: int, block: int) -> list[range]:
    """Return the seeds of a simulation, in blocks for tests: so many in CI, or as many as `make simulate` asks for."""
    count = int(os.environ.get(SEEDS_VARIABLE) or tries(number))
    return [range(first, min(first + block, count)) for first in range(0, count, block)]


def combinations(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one of each of these values: all of them in the nightly size, else each value in one row or more."""
    if IS_NIGHTLY:
        return list(itertools.product(*values))
    rows = max(map(len, values))
    return [tuple(each[row % len(each)] for each in values) for row in range(rows)]


def sample(cases: Iterable[_Case]) -> list[_Case]:
    """Return all cases, or an equal share of them in a quick test: the same ones each time."""
    every = list(cases)
    number = min(len(every), tries(len(every)))
    return random.Random(number).sample(every, number)  # noqa: S311 (test data)
