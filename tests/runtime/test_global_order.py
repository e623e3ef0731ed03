"""Global order of an epoch: a permutation for every length, portable, and well shuffled."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain_runtime.data.global_order import GlobalOrder, orders_of_seeds

GOLDEN = {
    (5, 0, 0): [3, 1, 0, 2, 4],
    (1000, 7, 3): [448, 919, 85, 558, 597],
    (1025, 7, 3): [363, 169, 660, 382, 799],
    (60_000, 7, 3): [26395, 2072, 19558, 22157, 35495],
    (10**9, 7, 3): [356618827, 334259303, 783378555, 855914817, 439000015],
    (10**9, -1, 0): [568781335, 630704549, 321185551, 13922767, 31825180],
    (2**31 - 1, 7, 3): [637467344, 1649451294, 270613398, 305780078, 1674400210],
    (2**31 + 1, 7, 3): [637467344, 1649451294, 270613398, 305780078, 1674400210],
    (2**62 - 1, 2**70, 10**6): [
        819233591460258773,
        3586411190297810119,
        2415193568258597882,
        3722839136288465673,
        3459485501074341917,
    ],
}
"""The first five samples by length, seed and epoch. A change of these values requires a new ORDER_VERSION."""


def full_order(length: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    return GlobalOrder(length, seed, epoch).at(torch.arange(length))


@pytest.mark.parametrize(("case", "expected"), GOLDEN.items())
def test_the_order_never_changes(case: tuple[int, int, int], expected: list[int]) -> None:
    assert GlobalOrder(*case).at(torch.arange(5)).tolist() == expected


@settings(deadline=None)
@given(
    length=st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025, 2000])),
    seeds=st.lists(st.integers(), min_size=1, max_size=5),
    epoch=st.integers(0, 2**40),
)
def test_orders_of_several_seeds_are_those_of_each(
    length: int, seeds: list[int], epoch: int
) -> None:
    expected = [full_order(length, seed, epoch).tolist() for seed in seeds]
    assert orders_of_seeds(length, seeds, epoch) == expected


def is_permutation(length: int, seed: int, epoch: int) -> bool:
    return (
        torch.bincount(full_order(length, seed, epoch), minlength=length).tolist() == [1] * length
    )


@pytest.mark.parametrize("first", range(1, 2001, 250))
def test_every_small_length_has_a_permutation(first: int) -> None:
    assert [n for n in range(first, first + 250) if not is_permutation(n, n % 7, n % 3)] == []


@settings(deadline=None)
@given(length=st.integers(2001, 70_000), seed=st.integers(), epoch=st.integers(0, 2**40))
def test_any_medium_length_has_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert is_permutation(length, seed, epoch)


@pytest.mark.parametrize("length", [2**16, 2**16 + 1, 999_983, 10**6])
def test_large_lengths_have_a_permutation(length: int) -> None:
    assert is_permutation(length, 1, 1)


@settings(deadline=None)
@given(length=st.sampled_from([10**9, 2**40 + 1, 2**62 - 1]), data=st.data())
def test_single_positions_give_the_same_samples_in_range(length: int, data: st.DataObject) -> None:
    positions = data.draw(
        st.lists(st.integers(0, length - 1), min_size=1, max_size=50, unique=True)
    )
    order = GlobalOrder(length, 3, 4)
    samples = order.at(torch.tensor(positions)).tolist()
    assert samples == [int(order.at(torch.tensor([position]))) for position in positions]
    assert len(set(samples)) == len(positions)
    assert all(0 <= sample < length for sample in samples)


def test_the_samples_have_the_shape_of_the_positions() -> None:
    for length in (10, 10**6):
        assert GlobalOrder(length, 0, 0).at(torch.zeros(3, 4, dtype=torch.int64)).shape == (3, 4)


CELLS = 16


def excess(counts: torch.Tensor, freedom: int) -> float:
    """Return how many standard deviations the chi-square of equally likely cells is above its mean."""
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def cross_table(left: torch.Tensor, right: torch.Tensor, length: int) -> torch.Tensor:
    """Return the counts of pairs in CELLS x CELLS cells of equal size."""
    cells = (left * CELLS // length) * CELLS + right * CELLS // length
    return torch.bincount(cells, minlength=CELLS * CELLS).double()


@pytest.mark.parametrize("length", [1040, 16_000, 16 * 10**8])
def test_sample_orders_are_uniform_and_independent(length: int) -> None:
    """Tables: position x sample, sample x next sample, sample x the position's sample in another epoch or seed."""
    step = max(1, length // 1600)
    positions = torch.arange(0, length - 1, step)
    tables = [torch.zeros(CELLS * CELLS, dtype=torch.float64) for _ in range(4)]
    for seed in range(150):
        order = GlobalOrder(length, seed, 0)
        samples = order.at(positions)
        others = (
            order.at(positions + 1),
            GlobalOrder(length, seed, 1).at(positions),
            GlobalOrder(length, seed + 1, 0).at(positions),
        )
        tables[0] += cross_table(positions, samples, length)
        for index, other in enumerate(others, start=1):
            tables[index] += cross_table(samples, other, length)
    assert all(excess(table, CELLS * CELLS - 1) < 5 for table in tables)


def test_all_orders_of_very_few_samples_are_equally_likely() -> None:
    for length in (2, 3, 4, 5):
        counts: dict[tuple[int, ...], int] = {}
        tries = 40 * math.factorial(length)
        for seed in range(tries):
            key = tuple(full_order(length, seed % 50, seed // 50).tolist())
            counts[key] = counts.get(key, 0) + 1
        assert len(counts) == math.factorial(length)
        assert excess(torch.tensor(list(counts.values())).double(), len(counts) - 1) < 5


@pytest.mark.parametrize("length", [1500, 60_000, 10**9])
def test_neighbouring_samples_are_uncorrelated(length: int) -> None:
    side = math.isqrt(length - 1) + 1
    for seed in range(3):
        samples = GlobalOrder(length, seed, 0).at(torch.arange(min(length, 100_000))).double()
        scaled = (samples - samples.mean()) / samples.std()
        for lag in {1, 2, 3, 7, 32, 64, side - 1, side, side + 1} - {
            *range(len(scaled) // 2, 10**6)
        }:
            correlation = float((scaled[:-lag] * scaled[lag:]).mean())
            assert abs(correlation) * math.sqrt(len(scaled) - lag) < 5, (seed, lag)
