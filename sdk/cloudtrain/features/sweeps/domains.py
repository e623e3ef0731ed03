"""The values of one searched field: single values, or a range of numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cloudtrain_runtime.contract.strict_json import dump_json


def is_equal(value: object, other: object) -> bool:
    """Return whether two values of a job are equal; true and 1 are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def label_of(value: Any) -> str | int | float | bool | None:
    """Return the name of a choice: the value itself if it is plain, else JSON."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    return dump_json(value, sort_keys=True, default=str)


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

    def has(self, value: object) -> bool:
        """Return whether a value is one of them."""
        return any(is_equal(value, each) for each in self.values)

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

    @classmethod
    def of(cls, kind: str, low: float, high: float, step: float | None) -> Range:
        """Return the range of a kind of a sweep file, such as `log_int`."""
        is_integer = kind.endswith("int")
        if step is not None:
            # 1e-9 forgives the rounding of steps such as 0.1.
            high = low + math.floor((high - low) / step + 1e-9) * step
            high = int(high) if is_integer else round(high, 12)
        return cls(low, high, is_integer, kind.startswith("log_"), step)

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

    def has(self, value: object) -> bool:
        """Return whether a value is a number between the bounds."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low <= float(str(value)) <= self.high

    @property
    def count(self) -> int:
        """Number of values of a range with a step."""
        return round((self.high - self.low) / (self.step or 1)) + 1

    def value_at(self, index: int) -> float:
        """Return one value of a range with a step."""
        value = self.low + index * (self.step or 1)
        return int(value) if self.is_integer else round(value, 12)
