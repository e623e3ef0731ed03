"""Seeds of all random generators of a process, and reproducible hash-based random numbers."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_WORD = 2**64 - 1
# splitmix64: G. Steele, D. Lea, C. Flood, Fast splittable pseudorandom number generators, 2014.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
# The words that seed MT19937, those of the pool of NumPy's SeedSequence, and the constants with which it spreads these.
_MT_WORDS = 624
_POOL_WORDS = 4
_SPREAD_START = 0x8B51F9DD
_SPREAD = 0x58F38DED


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), Python and NumPy."""
    torch.manual_seed(seed)
    _seed_python(seed)


def seed_worker(seed: int) -> None:
    """Seed the generators of a loader's worker as `seed_everything` does, in a tenth of the time.

    `torch.manual_seed` also keeps the seed for devices that are not initialized, with the call stack: 0.3 ms.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    _seed_python(seed)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)  # noqa: NPY002 (users' transforms draw from the global state)


class IsolatedRandomState:
    """Separate CPU random states of torch, Python and NumPy for a `with` block, which start from a seed.

    Draws inside of the block do not affect the random states outside of it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._outside = _states()
        torch.default_generator.manual_seed(self._seed)
        random.seed(self._seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_bit_generator(_bit_generator(self._seed % 2**32))

    def __exit__(self, *failure: object) -> None:
        _set_states(self._outside)


class ContinuedRandomState(IsolatedRandomState):
    """Such states that continue from one `with` block to the next."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._inside: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if self._inside is None:
            super().__enter__()
            return
        self._outside = _states()
        _set_states(self._inside)

    def __exit__(self, *failure: object) -> None:
        self._inside = _states()
        super().__exit__(*failure)


def _states() -> tuple[Any, ...]:
    # NumPy's bit generator is exchanged as one object: copying its state would take longer than
    # everything else. A process that has not imported NumPy has drawn nothing from it.
    numpy = sys.modules.get("numpy")
    own = None
    if numpy is not None:
        own = numpy.random.get_bit_generator()
    return torch.default_generator.get_state(), random.getstate(), own


def _set_states(states: tuple[Any, ...]) -> None:
    general, python, own = states
    torch.default_generator.set_state(general)
    random.setstate(python)
    if own is not None:
        sys.modules["numpy"].random.set_bit_generator(own)


def _bit_generator(seed: int) -> Any:
    """Return `numpy.random.MT19937(seed)`, in a quarter of the time."""
    import numpy as np

    return np.random.MT19937(_seed_sequence_type()(seed))


@functools.cache
def _seed_sequence_type() -> Any:
    """Return a SeedSequence that draws the words of an MT19937 at once. NumPy's does it one by one.

    Source: O'Neill's seed_seq_fe, as in NumPy's documentation of SeedSequence, which never changes its numbers.
    """
    import numpy as np

    factors = np.full(_MT_WORDS + 1, _SPREAD, dtype=np.uint32)
    factors[0] = _SPREAD_START
    hashes = np.multiply.accumulate(factors, dtype=np.uint32)
    before = hashes[:-1].reshape(-1, _POOL_WORDS)
    after = hashes[1:].reshape(-1, _POOL_WORDS)

    class QuickSeedSequence(np.random.SeedSequence):
        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
            if n_words != _MT_WORDS or dtype is not np.uint32:
                return super().generate_state(n_words, dtype)
            words = self.pool ^ before
            words *= after
            words ^= words >> 16
            # MT19937 reads the words one by one.
            return words.ravel().tolist()

        def __reduce__(self) -> Any:
            # A class of a function cannot be pickled.
            return np.random.SeedSequence, (self.entropy,)

    return QuickSeedSequence


def random_number(*parts: int) -> int:
    """Return a pseudo-random number below 2**64 that depends only on the parts."""
    state = 0
    for part in parts:
        state = _mixed(state + _GOLDEN + part)
    return state


def random_numbers(*parts: int) -> Iterator[int]:
    """Yield an endless sequence of such numbers."""
    state = random_number(*parts)
    while True:
        state = (state + _GOLDEN) & _WORD
        yield _mixed(state)


def random_rows(parts: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """Return the first `count` of `random_numbers(*row)` for each row of parts, as int64 of the same 64 bits."""
    starts = torch.tensor([[_signed(random_number(*row))] for row in parts])
    words = starts + torch.arange(1, count + 1) * _signed(_GOLDEN)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # Without the copies of the sign that a shift brings in.
        words ^= (words >> shift) & (_WORD >> shift)
        words *= _signed(factor)
    return words


def _signed(word: int) -> int:
    """Return the integer of the same 64 bits in two's complement."""
    return word - 2**64 if word >> 63 else word


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31
