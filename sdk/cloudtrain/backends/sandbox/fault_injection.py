"""Fault injection: missing capacity, interruptions, dead instances, throttling, errors, cut connections, slow calls."""

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

_EXAMPLE_TYPE = "ml.p4d.24xlarge"
_KINDS = ("throttle", "errors", "resets", "torn")


@dataclass(frozen=True)
class DeadInstance:
    """An instance whose processes are killed once per job, when the job reaches a step."""

    host: str
    step: int


@dataclass(frozen=True)
class FaultPlan:
    """The faults that a sandbox injects.

    Operations have AWS's names (`DescribeTrainingJob`, `PutObject`); `*` matches every operation. A value of 1 or more
    is the number of next calls that fail; a value below 1 is the probability that a call fails.

    Attributes:
        seed: Seed of the probabilities: the same seed and order of calls give the same faults.
        capacity_after_seconds: Duration of each wait for instances, during which the job is Pending.
        waited_seconds: Age of a new job: its creation time is set back, so that a long limit, such as
            `cluster.max_pending`, ends soon.
        capacity_error_after_seconds: Time after which such a wait ends with CapacityError, or None.
        no_capacity_types: Instance types without capacity: a job that accepts only these waits.
        interrupt_at_step: Steps at which a spot job loses its instances: the first attempt at the first, and so on.
        dead_instance: An instance that dies, or None.
        queue_instances: Instances that the jobs of each job queue may use at the same time.
        throttle: Calls that fail with `ThrottlingException`, in S3 `SlowDown`, without any effect.
        errors: Calls that fail with status 500, without any effect.
        resets: Calls that take effect, but whose connection is cut without a response.
        torn: Calls whose response ends in the middle of its body.
        slow_seconds: Delay of a call before it takes effect.
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
        """Return the plan that a parsed YAML or JSON document describes.

        Raises:
            UserError: A name is unknown, or a value is invalid.
        """
        if not isinstance(document, Mapping):
            raise UserError("the fault plan must be a mapping", "for example: capacity_after_seconds: 30")
        known = [each.name for each in dataclasses.fields(cls)]
        for name in document:
            if name not in known:
                raise UserError(f"fault plan: {name!r} is unknown", did_you_mean(str(name), known))
        values = {name: _READERS.get(name, _call_rates)(name, value) for name, value in document.items()}
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> FaultPlan:
        """Read a YAML file.

        Raises:
            UserError: The file cannot be read, or is no valid fault plan.
        """
        import yaml

        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: {error}", "write YAML such as: capacity_after_seconds: 30") from None
        return cls.from_document(document or {})


@dataclass(frozen=True)
class Fault:
    """The faults of one call. `kinds` is a subset of throttle, errors, resets and torn."""

    slow_seconds: float
    kinds: frozenset[str]


class FaultInjector:
    """Decides about faults by the current plan. Thread-safe."""

    def __init__(self, plan: FaultPlan) -> None:
        self._lock = threading.Lock()
        self.set_plan(plan)

    def set_plan(self, plan: FaultPlan) -> None:
        """Replace the plan and reset all counts."""
        with self._lock:
            self.plan = plan
            self._failed_calls: Counter[tuple[str, str]] = Counter()
            self._generators: dict[tuple[str, str], random.Random] = {}

    def next_fault(self, operation: str) -> Fault:
        """Return the faults of the next call of an operation."""
        with self._lock:
            slow = self.plan.slow_seconds
            kinds = frozenset(kind for kind in _KINDS if self._should_fail(kind, operation))
            return Fault(slow.get(operation, slow.get("*", 0.0)), kinds)

    def _should_fail(self, kind: str, operation: str) -> bool:
        calls: Mapping[str, float] = getattr(self.plan, kind)
        name = operation if operation in calls else "*"
        if name not in calls:
            return False
        key = (kind, name)
        if calls[name] >= 1:
            self._failed_calls[key] += 1
            return self._failed_calls[key] <= calls[name]
        # One generator for each entry of the plan, so that calls of other operations do not change its sequence.
        generator = self._generators.setdefault(key, random.Random(f"{self.plan.seed}:{kind}:{name}"))  # noqa: S311 (no secret)
        return generator.random() < calls[name]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(f"fault plan: {name} must be a number of at least 0, got {value!r}", f"for example {name}: 30")
    return float(value)


def _optional_number(name: str, value: Any) -> float | None:
    return None if value is None else _number(name, value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(
            f"fault plan: {name} must be an integer of at least 0, got {value!r}", f"for example {name}: 40"
        )
    return value


def _steps(name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_integer(name, each) for each in values)


def _instance_types(name: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    for each in values:
        if not isinstance(each, str) or not each.startswith("ml."):
            raise UserError(
                f"fault plan: {name} must list instance types, got {each!r}", f"for example {name}: [{_EXAMPLE_TYPE}]"
            )
    return tuple(values)


def _dead_instance(name: str, value: Any) -> DeadInstance | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != {"host", "step"}:
        raise UserError(
            f"fault plan: {name} must have host and step", f"for example {name}: {{host: algo-2, step: 40}}"
        )
    return DeadInstance(str(value["host"]), _integer(name, value["step"]))


def _call_rates(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise UserError(f"fault plan: {name} must map operations to numbers", f"for example {name}: {{'*': 0.1}}")
    return {str(operation): _number(f"{name}.{operation}", number) for operation, number in value.items()}


_READERS: Mapping[str, Any] = {
    "seed": _integer,
    "capacity_after_seconds": _number,
    "waited_seconds": _number,
    "capacity_error_after_seconds": _optional_number,
    "no_capacity_types": _instance_types,
    "interrupt_at_step": _steps,
    "dead_instance": _dead_instance,
    "queue_instances": _integer,
}
