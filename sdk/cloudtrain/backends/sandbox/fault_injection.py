"""Scripted weather: no capacity, interruptions, instances that die, throttling, errors, cut connections, slow S3."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.errors import UserError, did_you_mean

_TYPE = "ml.p4d.24xlarge"
_KINDS = ("throttle", "errors", "resets", "torn")


@dataclass(frozen=True)
class DeadInstance:
    """An instance whose processes are killed when its job has reached a step, once per job."""

    host: str
    step: int


@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong, and when.

    Operations are named as AWS names them (`DescribeTrainingJob`, `PutObject`), `*` means every one. A number of 1 or
    more means the next so many calls, one below 1 the probability of each call.

    Attributes:
        seed: Decides what the probabilities decide: the same seed and order of calls give the same faults.
        capacity_after_seconds: How long each wait for instances takes; a job is Pending meanwhile.
        waited_seconds: How long a new job has waited already: it was created so much earlier. It shows the end of a
            long wait, such as of `cluster.max_pending`, soon.
        capacity_error_after_seconds: When such a wait ends with CapacityError, or None.
        no_capacity_types: Instance types of which there are none: who wants only these waits.
        interrupt_at_step: Steps at which a spot job loses its instances: the first attempt at the first, and so on.
        dead_instance: An instance that dies, or None.
        queue_instances: Instances that the jobs of each job queue may have at once.
        throttle: Calls that are answered `ThrottlingException`, in S3 `SlowDown`; nothing is done.
        errors: Calls that are answered with status 500; nothing is done.
        resets: Calls that are done, and whose connection is then cut without an answer.
        torn: Calls whose answer ends in the middle of its body.
        slow_seconds: Seconds that a call waits before it is done.
    """

    seed: int = 0
    capacity_after_seconds: float = 0.0
    waited_seconds: float = 0.0
    capacity_error_after_seconds: float | None = None
    no_capacity_types: tuple[str, ...] = ()
    interrupt_at_step: tuple[int, ...] = ()
    dead_instance: DeadInstance | None = None
    queue_instances: int = 4
    throttle: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    resets: Mapping[str, float] = field(default_factory=dict)
    torn: Mapping[str, float] = field(default_factory=dict)
    slow_seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_document(cls, document: Any) -> FaultPlan:
        """Read what a YAML or JSON file holds.

        Raises:
            UserError: an unknown name, or a value of the wrong kind.
        """
        if not isinstance(document, Mapping):
            raise UserError("the weather must be a mapping", "for example: capacity_after_seconds: 30")
        legal = [each.name for each in dataclasses.fields(cls)]
        for name in document:
            if name not in legal:
                raise UserError(f"weather: {name!r} is unknown", did_you_mean(str(name), legal))
        values = {name: _READERS.get(name, _calls)(name, value) for name, value in document.items()}
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> FaultPlan:
        """Read a YAML file.

        Raises:
            UserError: it cannot be read, or holds something else.
        """
        import yaml

        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: {error}", "write YAML such as: capacity_after_seconds: 30") from None
        return cls.from_document(document or {})


@dataclass(frozen=True)
class Fault:
    """What happens to one call. `kinds` are of throttle, errors, resets and torn."""

    slow_seconds: float
    kinds: frozenset[str]


class FaultInjector:
    """The weather now. May be asked and changed by many threads."""

    def __init__(self, weather: FaultPlan) -> None:
        self._lock = threading.Lock()
        self.change(weather)

    def change(self, weather: FaultPlan) -> None:
        """Begin this weather; counts begin anew."""
        with self._lock:
            self.weather = weather
            self._done: Counter[tuple[str, str]] = Counter()
            self._dice: dict[tuple[str, str], random.Random] = {}

    def fault(self, operation: str) -> Fault:
        """Return what happens to the next call of an operation."""
        with self._lock:
            slow = self.weather.slow_seconds
            kinds = frozenset(kind for kind in _KINDS if self._strikes(kind, operation))
            return Fault(slow.get(operation, slow.get("*", 0.0)), kinds)

    def _strikes(self, kind: str, operation: str) -> bool:
        calls: Mapping[str, float] = getattr(self.weather, kind)
        name = operation if operation in calls else "*"
        if name not in calls:
            return False
        key = (kind, name)
        if calls[name] >= 1:
            self._done[key] += 1
            return self._done[key] <= calls[name]
        # Dice of their own for each line of the script: calls of other operations do not change what they show.
        dice = self._dice.setdefault(key, random.Random(f"{self.weather.seed}:{kind}:{name}"))  # noqa: S311 (no secret)
        return dice.random() < calls[name]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(f"weather: {name} must be a number of at least 0, got {value!r}", f"for example {name}: 30")
    return float(value)


def _maybe_number(name: str, value: Any) -> float | None:
    return None if value is None else _number(name, value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"weather: {name} must be a whole number, got {value!r}", f"for example {name}: 40")
    return value


def _steps(name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_whole(name, each) for each in values)


def _types(name: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    for each in values:
        if not isinstance(each, str) or not each.startswith("ml."):
            raise UserError(f"weather: {name} must name instance types, got {each!r}", f"for example {name}: [{_TYPE}]")
    return tuple(values)


def _dead(name: str, value: Any) -> DeadInstance | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != {"host", "step"}:
        raise UserError(f"weather: {name} must have host and step", f"for example {name}: {{host: algo-2, step: 40}}")
    return DeadInstance(str(value["host"]), _whole(name, value["step"]))


def _calls(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise UserError(f"weather: {name} must map operations to numbers", f"for example {name}: {{'*': 0.1}}")
    return {str(operation): _number(f"{name}.{operation}", number) for operation, number in value.items()}


_READERS: Mapping[str, Any] = {
    "seed": _whole,
    "capacity_after_seconds": _number,
    "waited_seconds": _number,
    "capacity_error_after_seconds": _maybe_number,
    "no_capacity_types": _types,
    "interrupt_at_step": _steps,
    "dead_instance": _dead,
    "queue_instances": _whole,
}
