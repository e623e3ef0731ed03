"""Order of the samples in an epoch: a permutation with random access, or what a Task's own sampler draws.

A permutation of 10^9 samples in memory takes 8 GB and minutes on every rank; this one needs no memory, and any position
can be computed directly. It is a Feistel network over pairs (left, right), applied again while the result is outside of
the samples (cycle walking).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from cloudtrain_runtime.errors import TaskError
from cloudtrain_runtime.process.seeds import (
    IsolatedRandomState,
    random_number,
    random_numbers,
    random_rows,
)

ORDER_VERSION: Final = 1
"""Changes whenever the same seed, epoch and length would give another order."""

_ROUNDS = 6
"""With 4, places and samples a few apart are correlated; with 6 they pass what torch.randperm passes."""

TABLE_LENGTH: Final = 1024
"""Up to this length the order is a table: a network over so few samples would exclude most permutations."""

_LONGEST_TABLED_SIDE = 2**16
"""Up to this side, about 4 * 10**9 samples, the numbers of each round are in a table, because a lookup is faster."""

_HALF_BITS = 31
_HALF = 2**_HALF_BITS
_HALF_MASK = _HALF - 1
_MIDDLE = 15


class GlobalOrder:
    """The order of the samples in one epoch.

    The same on every machine and with every version of PyTorch: it uses integers below 2**63 and no torch generator.

    Args:
        length: Samples in the dataset, below 2**62.
        seed: Seed of the run's order; any integer.
        epoch: Epoch, from 0.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self.length = length
        self._rounds = _draw_rounds(seed, epoch)
        self._sides = (_HALF, _HALF)
        self._moves: list[torch.Tensor] = []
        self._type = torch.int64
        self._table: torch.Tensor | None = None
        if length <= TABLE_LENGTH:
            self._table = _table(length, self._rounds)
            return
        root = math.isqrt(length - 1) + 1
        # Minimise the positions outside of the samples, among sides that differ by at most an
        # eighth.
        side = min(range(root, root + min(64, root // 8)), key=lambda side: -length % side)
        self._sides = (-(-length // side), side)
        if side <= _LONGEST_TABLED_SIDE:
            if math.prod(self._sides) <= torch.iinfo(torch.int32).max:
                # Half of the memory to read and write.
                self._type = torch.int32
            self._moves = [
                _drawn(torch.arange(self._sides[1 - turn % 2]), *each, self._sides[turn % 2]).to(
                    self._type
                )
                for turn, each in enumerate(self._rounds)
            ]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at some positions of the order: int64 of any shape, each from 0 to length - 1."""
        if self._table is not None:
            return self._table[positions]
        samples = self._permute(positions.flatten())
        # The network covers less than one row more than the samples, so this loop rarely runs.
        while len(outside := (samples >= self.length).nonzero().flatten()):
            samples[outside] = self._permute(samples[outside])
        return samples.view(positions.shape)

    def _permute(self, values: torch.Tensor) -> torch.Tensor:
        """Return a permutation of 0 to rows * columns - 1, applied to some of them."""
        rows, columns = self._sides
        values = values.to(self._type)
        sign = torch.iinfo(self._type).bits - 1
        left = torch.div(values, columns, rounding_mode="floor")
        right = torch.sub(values, left, alpha=columns)
        spare = torch.empty_like(values)
        size = rows
        other = columns
        for turn in range(_ROUNDS):
            tables = self._moves
            moved = (
                torch.index_select(tables[turn], 0, right, out=spare)
                if tables
                else _drawn(right, *self._rounds[turn], size)
            )
            # From -size to -1, and size again where the sum is below 0: the modulo, without
            # dividing.
            left.add_(moved)
            left.add_(torch.bitwise_right_shift(left, sign, out=moved).bitwise_and_(size))
            left, right = right, left
            size, other = other, size
        return left.mul_(columns).add_(right).to(torch.int64)


def orders_of_seeds(length: int, seeds: Sequence[int], epoch: int) -> list[list[int]]:
    """Return the samples of `GlobalOrder(length, seed, epoch)` in their order, for each of the seeds.

    A short order takes some fifty operations on a few numbers, so several of them take hardly longer than one.
    """
    if length > TABLE_LENGTH:
        positions = torch.arange(length)
        return [GlobalOrder(length, seed, epoch).at(positions).tolist() for seed in seeds]
    numbers = random_rows([(seed, epoch) for seed in seeds], 2 * _ROUNDS) & _HALF_MASK
    columns = numbers.split(1, dim=1)
    rounds = [(columns[at] | 1, columns[at + 1]) for at in range(0, 2 * _ROUNDS, 2)]
    orders: list[list[int]] = _table(length, rounds).tolist()
    return orders


def _draw_rounds(seed: int, epoch: int) -> list[tuple[int, int]]:
    """Return the factor and the offset of each round."""
    numbers = random_numbers(seed, epoch)
    return [(next(numbers) & _HALF_MASK | 1, next(numbers) & _HALF_MASK) for _ in range(_ROUNDS)]


def _table(length: int, rounds: Iterable[tuple[Any, Any]]) -> torch.Tensor:
    """Return the order of a few samples, or with factors and offsets [order, 1] several orders, one per row."""
    left = torch.zeros(length, dtype=torch.int64)
    right = torch.arange(length)
    for factor, offset in rounds:
        left = left + _drawn(right, factor, offset, _HALF)
        left.add_(torch.bitwise_right_shift(left, 63).bitwise_and_(_HALF))
        left, right = right, left
    return torch.argsort(left.mul(_HALF).add_(right))


def _drawn(side: torch.Tensor, factor: Any, offset: Any, size: int) -> torch.Tensor:
    """Return a random number from -size to -1 for each value of the other side.

    Args:
        side: The values.
        factor: Of the round: a number, or a tensor with one for each row.
        offset: The same.
        size: Values of this side.
    """
    mixed = side.mul(factor).add_(offset).bitwise_and_(_HALF_MASK)
    # The middle bits of the square mix better than any linear combination.
    mixed.mul_(mixed).bitwise_right_shift_(_MIDDLE).bitwise_or_(-_HALF)
    return mixed.mul_(size).bitwise_right_shift_(_HALF_BITS)


class TaskOrder:
    """The order of one epoch that a Task's own sampler draws.

    Args:
        sampler: Yields the indices of an epoch.
        samples: Samples in the dataset.
        seed: Seed of the run's order.
        epoch: Epoch, from 0.

    Raises:
        TaskError: the sampler yields something other than indices of the dataset, or not as many as its length.
    """

    def __init__(self, sampler: Iterable[int], samples: int, seed: int, epoch: int) -> None:
        drawn = random_number(seed, epoch) >> 1
        any_sampler: Any = sampler
        with IsolatedRandomState(drawn):
            if hasattr(any_sampler, "set_epoch"):
                any_sampler.set_epoch(epoch)
            if isinstance(getattr(any_sampler, "generator", None), torch.Generator):
                any_sampler.generator.manual_seed(drawn)
            indices = list(sampler)
        wrong = [type(index).__name__ for index in indices if not hasattr(index, "__index__")]
        if wrong:
            raise TaskError(
                f"sampler() must yield the index of one sample at a time; it yielded a {wrong[0]} "
                "(cloudtrain makes the batches)"
            )
        if len(indices) != len(any_sampler):
            raise TaskError(
                f"sampler() must yield as many indices as its length in each epoch: its length is {len(any_sampler)}, "
                f"and it yielded {len(indices)} in epoch {epoch}"
            )
        self._indices = torch.tensor([int(index) for index in indices])
        least = int(self._indices.min())
        most = int(self._indices.max())
        if least < 0 or most >= samples:
            raise TaskError(
                f"sampler() must yield indices from 0 to {samples - 1}; it yielded {least} to {most}"
            )

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at some positions of the order: int64 of any shape."""
        return self._indices[positions]

    @property
    def checksum(self) -> int:
        """A number that differs for another order."""
        return int((self._indices * torch.arange(1, len(self._indices) + 1)).sum())


Order = GlobalOrder | TaskOrder
