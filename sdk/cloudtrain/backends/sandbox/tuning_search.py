"""Values of hyperparameters for the trials of a tuning job: validation of the ranges, random search and grid search.

Ranges and scaling types follow AWS's guide, "Define hyperparameter ranges" and "How hyperparameter tuning works".
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Ranges = Mapping[str, Sequence[Mapping[str, Any]]]
"""ParameterRanges of a request."""

CONTINUOUS = "ContinuousParameterRanges"
INTEGER = "IntegerParameterRanges"
CATEGORICAL = "CategoricalParameterRanges"


def check_ranges(ranges: Ranges, static: Mapping[str, str], strategy: str) -> Iterator[str]:
    """Yield a message for each mistake in the ranges of a tuning job."""
    every = [each for kind in (CONTINUOUS, INTEGER, CATEGORICAL) for each in ranges.get(kind, ())]
    names = [each["Name"] for each in every]
    if not names:
        yield "ParameterRanges must have at least one range"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"The hyperparameter {name} is in more than one range"
    for name in sorted({*names} & {*static}):
        yield f"The hyperparameter {name} is in ParameterRanges and in StaticHyperParameters"
    for kind, read in ((CONTINUOUS, float), (INTEGER, int)):
        for each in ranges.get(kind, ()):
            yield from _check_bounds(each, read)
    if strategy == "Grid" and (ranges.get(CONTINUOUS) or ranges.get(INTEGER)):
        yield "Only CategoricalParameterRanges are supported with the Grid strategy"


def _check_bounds(each: Mapping[str, Any], read: type[float | int]) -> Iterator[str]:
    name = each["Name"]
    scaling = each.get("ScalingType", "Auto")
    try:
        least = read(each["MinValue"])
        most = read(each["MaxValue"])
    except ValueError:
        yield f"MinValue and MaxValue of {name} must be numbers of its range's type"
        return
    if not (math.isfinite(least) and math.isfinite(most) and least <= most):
        yield f"MinValue of {name} must not be greater than MaxValue"
    elif scaling == "Logarithmic" and least <= 0:
        yield f"Logarithmic scaling of {name} needs a MinValue greater than 0"
    elif scaling == "ReverseLogarithmic" and (read is int or not (least >= 0 and most < 1)):
        yield f"ReverseLogarithmic scaling of {name} needs a continuous range within [0, 1)"


def sample(ranges: Ranges, source: random.Random) -> dict[str, str]:
    """Return one random value of each range, as the text of a hyperparameter."""
    values: dict[str, str] = {}
    for each in ranges.get(CONTINUOUS, ()):
        least = float(each["MinValue"])
        most = float(each["MaxValue"])
        value = _scaled(least, most, each.get("ScalingType", "Auto"), source)
        values[each["Name"]] = repr(min(max(value, least), most))
    for each in ranges.get(INTEGER, ()):
        first = int(each["MinValue"])
        last = int(each["MaxValue"])
        if each.get("ScalingType") == "Logarithmic":
            number = round(_scaled(first - 0.5, last + 0.5, "Logarithmic", source))
            values[each["Name"]] = str(min(max(number, first), last))
        else:
            values[each["Name"]] = str(source.randint(first, last))
    for each in ranges.get(CATEGORICAL, ()):
        values[each["Name"]] = source.choice(each["Values"])
    return values


def _scaled(least: float, most: float, scaling: str, source: random.Random) -> float:
    if scaling == "Logarithmic":
        return math.exp(source.uniform(math.log(least), math.log(most)))
    if scaling == "ReverseLogarithmic":
        return 1.0 - math.exp(source.uniform(math.log(1.0 - most), math.log(1.0 - least)))
    return source.uniform(least, most)


def grid(ranges: Ranges) -> list[dict[str, str]]:
    """Return all combinations of the categorical ranges."""
    found = ranges.get(CATEGORICAL, ())
    names = [each["Name"] for each in found]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(each["Values"] for each in found))
    ]
