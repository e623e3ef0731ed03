"""Limits of CreateTrainingJob and of tuning jobs, from the service model in the installed botocore.

botocore itself checks only types, required fields and minimums, and AWS checks the rest after the upload. The file is
read without importing botocore, which would take four times as long.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloudtrain.errors import did_you_mean
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

TRAINING_JOB = "CreateTrainingJobRequest"
TUNING_JOB = "CreateHyperParameterTuningJobRequest"
MODEL = "CreateModelInput"
ENDPOINT_CONFIG = "CreateEndpointConfigInput"
ENDPOINT = "CreateEndpointInput"
_RESERVABLE = "ReservedCapacityInstanceType"
_INPUTS = (TRAINING_JOB, TUNING_JOB, MODEL, ENDPOINT_CONFIG, ENDPOINT, _RESERVABLE)
"""Shapes of the operations' requests, and the types that a training plan can reserve."""
_MODEL = Path("data", "sagemaker", "2017-07-24")
_REGIONS = Path("data", "partitions.json")
_SHOWN = 60
_MOST_LISTED = 10
"""Most legal values that a hint lists."""
# AWS writes patterns for Java. Python's `re` lacks these Unicode classes; each has a replacement for use in a set.
# \w matches letters, digits and the underscore. Separators are listed, because \s would also match a newline.
_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\w",
    r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\p{Alnum}": "a-zA-Z0-9",
}


@dataclass(frozen=True)
class Violation:
    """One value of a request that AWS would reject.

    Attributes:
        is_key: Whether the key of a mapping's entry is invalid, not its value.
        bound: The limit, if it is a number.
        got: The value or length that was found, if the limit is a number.
    """

    path: FieldPath
    message: str
    hint: str
    is_key: bool = False
    bound: int | None = None
    got: int | None = None


def check_request(request: Mapping[str, Any], shape: str = TRAINING_JOB) -> list[Violation]:
    """Return everything in a CreateTrainingJob document, or one of another `shape`, that breaks AWS's model."""
    return list(_check(request, _shape(shape), ()))


def limit_of(*path: str, of: str = TRAINING_JOB) -> Mapping[str, Any]:
    """Return `min`, `max`, `pattern` and `enum` of a field, such as `limit_of("StoppingCondition", "MaxRuntime...")`.

    Members of lists and values of mappings are named `[]`. `of` is the shape of the request.
    """
    shape = _shape(of)
    for part in path:
        if part == "[]":
            shape = _shape((shape.get("member") or shape["value"])["shape"])
        else:
            shape = _shape(shape["members"][part]["shape"])
    return shape


def members_of(*path: str, of: str = TRAINING_JOB) -> tuple[str, ...]:
    """Return the names of the members of a field; without a path, those of the request."""
    return tuple(limit_of(*path, of=of).get("members", ()))


def check_types(members: Mapping[str, Any]) -> list[Violation]:
    """Return every unknown member and every value of a wrong type in some members of a CreateTrainingJob document."""
    return list(_check_types(members, _shape(TRAINING_JOB), ()))


@functools.cache
def instance_types() -> frozenset[str]:
    """Return the instance types of the installed AWS model."""
    return frozenset(limit_of("ResourceConfig", "InstanceType")["enum"])


@functools.cache
def reservable_types() -> tuple[str, ...]:
    """Return the instance types that a training plan can reserve, by the installed AWS model (SearchTrainingPlanOfferings)."""
    return tuple(_shape(_RESERVABLE)["enum"])


@functools.cache
def regions() -> frozenset[str]:
    """Return the regions that the installed botocore knows."""
    return frozenset(
        name for partition in _partitions() for name in partition["regions"] if "global" not in name
    )


@functools.cache
def _partitions() -> tuple[Mapping[str, Any], ...]:
    return tuple(load_json((_botocore() / _REGIONS).read_text(encoding="utf-8"))["partitions"])


def is_newer_region(name: str) -> bool:
    """Return whether an unknown region's name begins like that of a known area."""
    area, _, number = name.rpartition("-")
    return (
        name not in regions()
        and number.isdigit()
        and area in {known.rpartition("-")[0] for known in regions()}
    )


def partition_of(region: str) -> str:
    """Return a region's partition, such as `aws` or `aws-cn`."""
    return str(_partition(region)["id"])


def dns_suffix(region: str) -> str:
    """Return the end of a region's host names, such as `amazonaws.com`."""
    return str(_partition(region)["outputs"]["dnsSuffix"])


def _partition(region: str) -> Mapping[str, Any]:
    return next(
        (each for each in _partitions() if re.match(each["regionRegex"], region)), _partitions()[0]
    )


def model_version() -> str:
    """Return the version of the botocore that the limits come from."""
    import importlib.metadata

    return importlib.metadata.version("botocore")


def _botocore() -> Path:
    found = importlib.util.find_spec("botocore")
    assert found is not None  # noqa: S101 (boto3 is a dependency: without botocore nothing was installed)
    assert found.origin is not None  # noqa: S101
    return Path(found.origin).parent


@functools.cache
def _shapes() -> Mapping[str, Any]:
    """Return the shapes of the operations' inputs by name.

    They are 2 % of a file of 5 MB, so later commands read them from a cache file. Its name depends on the model file.
    Without a writable folder, the next command takes 20 ms longer.
    """
    packed = _botocore() / _MODEL / "service-2.json.gz"
    path = packed if packed.is_file() else packed.with_suffix("")
    status = path.stat()
    stamp = f"{path}:{status.st_size}:{status.st_mtime_ns}"
    identity = hashlib.sha256(stamp.encode()).hexdigest()[:24]
    base = os.environ.get("XDG_CACHE_HOME") or str(
        Path(os.environ.get("HOME", "~")).expanduser() / ".cache"
    )
    cache = Path(base) / "cloudtrain" / f"limits-{identity}.json"
    with contextlib.suppress(OSError, ValueError):
        shapes: Mapping[str, Any] = load_json(cache.read_bytes())
        if all(name in shapes for name in _INPUTS):
            return shapes
    shapes = _read_shapes(path)
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cache, dump_json(shapes))
    return shapes


def _read_shapes(path: Path) -> dict[str, Any]:
    """Return the shapes in the operations' inputs, without their documentation."""
    import gzip

    raw = path.read_bytes()
    every = load_json(gzip.decompress(raw) if path.suffix == ".gz" else raw)["shapes"]
    shapes: dict[str, Any] = {}
    waiting = [*_INPUTS]
    while waiting:
        name = waiting.pop()
        if name not in shapes:
            shape = shapes[name] = {
                key: value for key, value in every[name].items() if key != "documentation"
            }
            members = [
                *shape.get("members", {}).values(),
                *(shape[key] for key in ("member", "key", "value") if key in shape),
            ]
            waiting += [member["shape"] for member in members]
            if "members" in shape:
                shape["members"] = {
                    key: {"shape": member["shape"]} for key, member in shape["members"].items()
                }
    return shapes


def _shape(name: str) -> Mapping[str, Any]:
    shape: Mapping[str, Any] = _shapes()[name]
    return shape


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    for java, ours in _CLASSES.items():
        text = text.replace(java, ours)
    return re.compile(text)


_TYPES: Mapping[str, tuple[Any, str, str]] = {
    "structure": (Mapping, "a mapping of members", "write Member: value, indented below"),
    "map": (Mapping, "a mapping", "write key: value, indented below"),
    "list": ((list, tuple), "a list", "write it in brackets, or as lines that begin with a hyphen"),
    "string": (str, "text", "write it in quotes"),
    "boolean": (bool, "true or false", "write true or false"),
    "integer": (int, "an integer", "write digits only"),
    "long": (int, "an integer", "write digits only"),
}
"""Python's types, their name and what to write, by the type in AWS's model."""


def _check_types(value: Any, shape: Mapping[str, Any], path: FieldPath) -> Iterator[Violation]:
    kind = shape["type"]
    types, expected, hint = _TYPES[kind]
    if not isinstance(value, types) or (kind != "boolean" and isinstance(value, bool)):
        yield Violation(path, f"expected {expected}, got {_spelled(value)}", hint)
    elif kind == "structure":
        for name, item in value.items():
            if name in shape["members"]:
                yield from _check_types(
                    item, _shape(shape["members"][name]["shape"]), (*path, name)
                )
            else:
                hint = did_you_mean(str(name), shape["members"])
                message = f"no member of CreateTrainingJob (model of botocore {model_version()})"
                yield Violation((*path, name), message, hint, is_key=True)
    elif kind == "list":
        for index, item in enumerate(value):
            yield from _check_types(item, _shape(shape["member"]["shape"]), (*path, index))
    elif kind == "map":
        for key, item in value.items():
            yield from _check_types(item, _shape(shape["value"]["shape"]), (*path, key))


def _spelled(value: Any) -> str:
    """Return a value as a job file spells it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)[:_SHOWN]


def _check(value: Any, shape: Mapping[str, Any], path: FieldPath) -> Iterator[Violation]:
    kind = shape["type"]
    if kind == "structure":
        yield from _structure(value, shape, path)
    elif kind == "list":
        yield from _bounds(len(value), shape, path, " entries")
        for index, item in enumerate(value):
            yield from _check(item, _shape(shape["member"]["shape"]), (*path, index))
    elif kind == "map":
        yield from _bounds(len(value), shape, path, " entries")
        for key, item in value.items():
            for violation in _text(key, _shape(shape["key"]["shape"]), (*path, key)):
                yield replace(violation, message=f"name: {violation.message}", is_key=True)
            yield from _check(item, _shape(shape["value"]["shape"]), (*path, key))
    elif kind == "string":
        yield from _text(value, shape, path)
    elif kind in ("integer", "long", "float"):
        yield from _bounds(value, shape, path, "")


def _structure(
    value: Mapping[str, Any], shape: Mapping[str, Any], path: FieldPath
) -> Iterator[Violation]:
    members = shape["members"]
    for name in shape.get("required", ()):
        if name not in value:
            yield Violation((*path, name), "required field is missing", "give it")
    for name, item in value.items():
        if name in members:
            yield from _check(item, _shape(members[name]["shape"]), (*path, name))
        else:
            hint = f"pip install -U boto3 (its model is botocore {model_version()}'s)"
            yield Violation((*path, name), "field that the installed AWS model does not have", hint)


def _text(value: str, shape: Mapping[str, Any], path: FieldPath) -> Iterator[Violation]:
    enum = shape.get("enum")
    if enum is not None and value not in enum:
        # By default the hint lists all values.
        otherwise = None if len(enum) <= _MOST_LISTED else "see the AWS reference"
        hint = did_you_mean(value, enum, otherwise)
        yield Violation(path, f'expected one of AWS\'s {len(enum)} values, got "{value}"', hint)
        return
    yield from _bounds(len(value), shape, path, " characters")
    pattern = shape.get("pattern")
    if pattern is not None and not _pattern(pattern).fullmatch(value):
        shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
        yield Violation(path, f"{shown!r} has a form that AWS refuses", f"it must match {pattern}")


def _bounds(
    value: int, shape: Mapping[str, Any], path: FieldPath, what: str
) -> Iterator[Violation]:
    least = shape.get("min")
    most = shape.get("max")
    if least is not None and value < least:
        message = f"AWS allows at least {least}{what}, got {value}"
        yield Violation(path, message, f"use {least} or more", bound=least, got=value)
    if most is not None and value > most:
        message = f"AWS allows at most {most}{what}, got {value}"
        yield Violation(path, message, f"use {most} or fewer", bound=most, got=value)
