"""Seeds: of every random state of a process, and numbers drawn from them that are the same everywhere."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch

_WORD = 2**64 - 1
# splitmix64: G. Steele, D. Lea, C. Flood, Fast splittable pseudorandom number generators, 2014.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)  # noqa: NPY002 (users' transforms draw from the global state)


def random_number(*parts: int) -> int:
    """Return a number below 2**64 that looks random, and is the same for the same parts everywhere."""
    state = 0
    for part in parts:
        state = _mixed(state + _GOLDEN + part)
    return state


def random_numbers(*parts: int) -> Iterator[int]:
    """Yield such numbers without end."""
    state = random_number(*parts)
    while True:
        state = (state + _GOLDEN) & _WORD
        yield _mixed(state)


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31
