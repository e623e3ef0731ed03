"""The search space: values by path of the job, sampled, enumerated, or proposed by an optimizer.

A field with a condition comes after the fields that it depends on, and has no value where the condition does not hold.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.features.sweeps.domains import Choice, Range, is_equal, label_of
from cloudtrain.features.sweeps.spec import Parameter

Values = Mapping[str, Any]
"""Values by path, such as `{"train.learning_rate": 0.01}`."""


Point = frozenset[tuple[str, bool, Any]]
"""Values by path in a form that can be compared: see `point_of`."""

_COUNTABLE_DRAWS = 100
_DRAWS = 10_000


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
        waiting = dict(parameters)
        ordered = list[Dimension]()
        while waiting:
            ready = [
                path for path, each in waiting.items() if not waiting.keys() & each.when.keys()
            ]
            for path in ready:
                parameter = waiting.pop(path)
                ordered.append(Dimension(path, parameter.domain, dict(parameter.when)))
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


def point_of(values: Values) -> Point:
    """Return values in a form that is equal for equal values of a job; true and 1 are not."""
    return frozenset(
        (path, isinstance(value, bool), label_of(value)) for path, value in values.items()
    )
