"""The search space: values by path of the job, sampled, enumerated, or proposed by an optimizer.

A field with a condition comes after the fields that it depends on, and has no value where the condition does not hold.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.features.sweeps.spec import Parameter, is_equal
from cloudtrain_runtime.contract.strict_json import dump_json

Values = Mapping[str, Any]
"""Values by path, such as `{"train.learning_rate": 0.01}`."""


Point = frozenset[tuple[str, bool, Any]]
"""Values by path in a form that can be compared: see `point_of`."""

_COUNTABLE_DRAWS = 100
_DRAWS = 10_000


@dataclass(frozen=True)
class Choice:
    """Single values. `labels` name them: the values themselves, or text for lists and mappings."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> tuple[str | int | float | bool | None, ...]:
        """Names of the values that are unique, plain and hashable."""
        return tuple(map(label_of, self.values))

    @property
    def bounds(self) -> tuple[Any, ...]:
        """All values."""
        return self.values

    def sample(self, rng: random.Random) -> Any:
        """Return a value at random."""
        return self.values[rng.randrange(len(self.values))]

    @property
    def is_countable(self) -> bool:
        """Whether there are only so many values."""
        return True

    def grid(self) -> Iterable[Any]:
        """Return all values."""
        return self.values

    def of_label(self, label: Any) -> Any:
        """Return the value with a label, in the spelling of the file."""
        return next(
            value
            for value, own in zip(self.values, self.labels, strict=True)
            if is_equal(own, label)
        )


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        low: Smallest value.
        high: Largest value; with a step, the largest that steps from `low` reach.
        is_integer: Whether values are integers.
        is_log: Whether values are sampled on a logarithmic scale.
        step: Distance between values; None for integers without gaps and for any number.
    """

    low: float
    high: float
    is_integer: bool = False
    is_log: bool = False
    step: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value."""
        return self.low, self.high

    def sample(self, rng: random.Random) -> float:
        """Return a value at random."""
        if self.step is not None:
            return self.value_at(rng.randrange(self.count))
        if self.is_integer and self.is_log:
            value = math.exp(rng.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(value), int(self.low)), int(self.high))
        if self.is_integer:
            return rng.randint(int(self.low), int(self.high))
        if self.is_log:
            return min(
                max(math.exp(rng.uniform(math.log(self.low), math.log(self.high))), self.low),
                self.high,
            )
        return rng.uniform(self.low, self.high)

    @property
    def is_countable(self) -> bool:
        """Whether there are only so many values: integers, or steps."""
        return self.is_integer or self.step is not None

    def grid(self) -> Iterable[float]:
        """Return all values of a range of integers, or of one with a step."""
        if self.is_integer and self.step is None:
            return range(int(self.low), int(self.high) + 1)
        return map(self.value_at, range(self.count))

    @property
    def count(self) -> int:
        """Number of values of a range with a step."""
        return round((self.high - self.low) / (self.step or 1)) + 1

    def value_at(self, index: int) -> float:
        """Return one value of a range with a step."""
        value = self.low + index * (self.step or 1)
        return int(value) if self.is_integer else round(value, 12)


@dataclass(frozen=True)
class Dimension:
    """One field of the job that is searched.

    Attributes:
        path: Path of the field, such as `train.learning_rate`.
        domain: Its values.
        conditions: Values of other fields by path; one of each must be chosen, else this field has no value.
    """

    path: str
    domain: Choice | Range
    conditions: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def is_active(self, values: Values) -> bool:
        """Return whether the field is searched beside these values of the fields before it."""
        return all(
            path in values and any(is_equal(values[path], each) for each in wanted)
            for path, wanted in self.conditions.items()
        )


@dataclass(frozen=True)
class Space:
    """A search space. Fields come after those that their conditions name."""

    dimensions: tuple[Dimension, ...]

    @classmethod
    def of(cls, parameters: Mapping[str, Parameter]) -> Space:
        """Return the space of a valid sweep file."""
        waiting, ordered = dict(parameters), list[Dimension]()
        while waiting:
            ready = [
                path for path, each in waiting.items() if not waiting.keys() & each.when.keys()
            ]
            for path in ready:
                parameter = waiting.pop(path)
                ordered.append(Dimension(path, domain_of(parameter), dict(parameter.when)))
        return cls(tuple(ordered))

    def __getitem__(self, path: str) -> Dimension:
        return next(each for each in self.dimensions if each.path == path)

    def fill(self, pick: Callable[[Dimension], Any]) -> dict[str, Any]:
        """Return a value for each active field, as `pick` returns them."""
        values: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.is_active(values):
                values[dimension.path] = pick(dimension)
        return values

    def sample(self, seed: int, number: int) -> dict[str, Any]:
        """Return the random values of a trial. Equal arguments give equal values, in any process."""
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 (no secret depends on it)
        return self.fill(lambda dimension: dimension.domain.sample(rng))

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield all combinations; the last field changes fastest. No combination comes twice."""
        yield from self._grid(0, {})

    def _grid(self, at: int, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if at == len(self.dimensions):
            yield dict(values)
            return
        dimension = self.dimensions[at]
        if not dimension.is_active(values):
            yield from self._grid(at + 1, values)
            return
        for value in dimension.domain.grid():
            yield from self._grid(at + 1, {**values, dimension.path: value})

    def grid_size(self, most: int) -> int:
        """Return the number of combinations, or `most` if there are more."""
        return sum(1 for _ in itertools.islice(self.grid(), most))

    @property
    def is_countable(self) -> bool:
        """Whether there are only so many combinations."""
        return all(each.domain.is_countable for each in self.dimensions)

    def new_sample(self, seed: int, number: int, taken: Collection[Point]) -> dict[str, Any] | None:
        """Return random values of a trial that no other trial has; None if all combinations are taken.

        Equal arguments give equal values, in any process.

        Args:
            seed: Seed of the sweep.
            number: Number of the trial.
            taken: The points of the other trials.
        """
        draws = _COUNTABLE_DRAWS if self.is_countable else _DRAWS
        for attempt in range(number, number + draws):
            values = self.sample(seed, attempt)
            if point_of(values) not in taken:
                return values
        if not self.is_countable:
            return self.sample(seed, number)
        # Few are left, or those that are left are rarely drawn.
        free = (values for values in self.grid() if point_of(values) not in taken)
        left = list(itertools.islice(free, _COUNTABLE_DRAWS))
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 (no secret depends on it)
        return rng.choice(left) if left else None

    def variations(self) -> Iterator[tuple[Dimension, int, dict[str, Any]]]:
        """Yield each bound and each choice of each field, with only the values that its conditions need.

        Yields:
            The field, the index of the bound or choice, and the values.
        """
        for dimension in self.dimensions:
            needed = self._needed(dimension)
            for index, value in enumerate(dimension.domain.bounds):
                yield dimension, index, {**needed, dimension.path: value}

    def _needed(self, dimension: Dimension) -> dict[str, Any]:
        """Return the first values that make a field active."""
        values: dict[str, Any] = {}
        for path, wanted in dimension.conditions.items():
            values |= {**self._needed(self[path]), path: wanted[0]}
        return values


def domain_of(parameter: Parameter) -> Choice | Range:
    """Return the values of a parameter of a valid sweep file."""
    if parameter.choice is not None:
        return Choice(parameter.choice)
    (low, high), step = parameter.bounds, parameter.step
    is_integer, is_log = parameter.kind.endswith("int"), parameter.kind.startswith("log_")
    if step is not None:
        # 1e-9 forgives the rounding of steps such as 0.1.
        high = low + math.floor((high - low) / step + 1e-9) * step
        high = int(high) if is_integer else round(high, 12)
    return Range(low, high, is_integer, is_log, step)


def point_of(values: Values) -> Point:
    """Return values in a form that is equal for equal values of a job; true and 1 are not."""
    return frozenset(
        (path, isinstance(value, bool), label_of(value)) for path, value in values.items()
    )


def label_of(value: Any) -> str | int | float | bool | None:
    """Return the name of a choice: the value itself if it is plain, else JSON."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    return dump_json(value, sort_keys=True, default=str)
