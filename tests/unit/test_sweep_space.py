"""The search space: sampling, grids, conditions and the variations that are planned before a sweep."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain.features.sweeps.domains import Choice, Range
from cloudtrain.features.sweeps.space import Space, point_of
from cloudtrain.features.sweeps.spec import Parameter

WHEN = {"train.schedule": ("cosine",)}


def space_of(**parameters: dict[str, Any]) -> Space:
    return Space.of(
        {path.replace("__", "."): Parameter(**fields) for path, fields in parameters.items()}
    )


def conditional() -> Space:
    return space_of(
        train__warmup={"choice": ["5 steps", "10 steps"], "when": WHEN},
        train__schedule={"choice": ["constant", "cosine"]},
        train__batch_size={"int": [8, 16], "step": 4},
    )


@given(st.integers(0, 2**32 - 1), st.integers(0, 10_000))
def test_samples_are_inside_and_repeatable(seed: int, number: int) -> None:
    space = space_of(
        a={"log_uniform": [1e-5, 1e-2]},
        b={"uniform": [-1.0, 2.0]},
        c={"int": [3, 9], "step": 2},
        d={"log_int": [1, 1000]},
        e={"uniform": [0.0, 1.0], "step": 0.1},
    )
    values = space.sample(seed, number)
    assert values == space.sample(seed, number)
    assert 1e-5 <= values["a"] <= 1e-2
    assert -1 <= values["b"] <= 2
    assert values["c"] in (3, 5, 7, 9)
    assert isinstance(values["d"], int)
    assert 1 <= values["d"] <= 1000
    assert values["e"] in [round(index / 10, 12) for index in range(11)]


def test_a_logarithmic_scale_has_equal_decades() -> None:
    rng, domain = random.Random(0), Range(1e-4, 1.0, is_log=True)  # noqa: S311 (no secret)
    samples = [domain.sample(rng) for _ in range(4000)]
    shares = [
        sum(low <= value < 10 * low for value in samples) / 4000 for low in (1e-4, 1e-3, 1e-2, 1e-1)
    ]
    assert all(0.22 < share < 0.28 for share in shares)


def test_a_field_without_its_condition_has_no_value() -> None:
    samples = [conditional().sample(0, number) for number in range(50)]
    assert {values["train.schedule"] for values in samples} == {"constant", "cosine"}
    assert all(
        ("train.warmup" in values) == (values["train.schedule"] == "cosine") for values in samples
    )


def test_a_grid_has_each_combination_once() -> None:
    grid = list(conditional().grid())
    assert len(grid) == conditional().grid_size(1000) == 3 + 2 * 3
    assert len({tuple(sorted(values.items())) for values in grid}) == len(grid)
    assert conditional().grid_size(5) == 5


def test_variations_have_each_bound_and_choice_once() -> None:
    found = [
        (dimension.path, index, values) for dimension, index, values in conditional().variations()
    ]
    assert found == [
        ("train.schedule", 0, {"train.schedule": "constant"}),
        ("train.schedule", 1, {"train.schedule": "cosine"}),
        ("train.batch_size", 0, {"train.batch_size": 8}),
        ("train.batch_size", 1, {"train.batch_size": 16}),
        ("train.warmup", 0, {"train.schedule": "cosine", "train.warmup": "5 steps"}),
        ("train.warmup", 1, {"train.schedule": "cosine", "train.warmup": "10 steps"}),
    ]


@pytest.mark.parametrize(("high", "expected"), [(1.0, 1.0), (0.95, 0.9), (0.3, 0.3)])
def test_a_range_ends_at_its_last_step(high: float, expected: float) -> None:
    domain = space_of(a={"uniform": [0.0, high], "step": 0.1})["a"].domain
    assert domain.bounds == (0.0, expected)
    assert [*domain.grid()][-1] == expected


@pytest.mark.parametrize("seed", range(5))
def test_no_combination_is_drawn_twice(seed: int) -> None:
    space, drawn = conditional(), list[dict[str, Any]]()
    while (values := space.new_sample(seed, len(drawn), set(map(point_of, drawn)))) is not None:
        drawn.append(values)
    assert len(drawn) == space.grid_size(1000)
    assert set(map(point_of, drawn)) == set(map(point_of, space.grid()))


def test_rare_and_uncountable_values_are_drawn() -> None:
    rare = space_of(a={"log_int": [1, 400]})
    taken = {point_of({"a": value}) for value in range(1, 400)}
    assert rare.new_sample(0, 399, taken) == {"a": 400}
    free = space_of(
        a={"uniform": [0.0, 1.0], "when": {"b": ("x",)}}, b={"choice": ["x", "y", True, 1]}
    )
    assert not free.is_countable
    others = {point_of({"b": value}) for value in ("y", True, 1)}
    assert len(others) == 3
    assert "a" in (free.new_sample(0, 3, others) or {})
    assert free.new_sample(0, 7, set()) == free.sample(0, 7)


def test_choices_keep_true_apart_from_one() -> None:
    choice = Choice((True, 1, "1", ["a"], None))
    assert choice.labels == (True, 1, "1", '["a"]', None)
    assert [choice.of_label(label) for label in choice.labels] == [True, 1, "1", ["a"], None]
    assert choice.of_label(label=True) is True
