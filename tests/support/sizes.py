"""How many random inputs tests try: few in `make check`, more in `make test-all`, most with CLOUDTRAIN_TEST_SIZE=nightly."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

VARIABLE = "CLOUDTRAIN_TEST_SIZE"
_SCALES = {"quick": 0.2, "ci": 1.0, "nightly": 10.0}
_SCALE = _SCALES[os.environ.get(VARIABLE, "ci")]
_Case = TypeVar("_Case")


def tries(number: int) -> int:
    """Return how many inputs a test tries that tries this many in CI."""
    return max(1, round(number * _SCALE))


def sample(cases: Iterable[_Case]) -> list[_Case]:
    """Return all cases, or an equal share of them in a quick test: the same ones each time."""
    every = list(cases)
    number = min(len(every), tries(len(every)))
    return random.Random(number).sample(every, number)  # noqa: S311 (test data)
