"""Fault injection: missing capacity, interruptions, dead instances, throttling, errors, cut connections, slow calls."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cloudtrain.errors import UserError
from cloudtrain.job.diagnostics import diagnostics_of
from cloudtrain.job.document import dotted
from cloudtrain.job.fields import matching

_KINDS = ("throttle", "errors", "resets", "torn")

_Integer = Annotated[int, Field(ge=0, strict=True)]
_Number = Annotated[float, Field(ge=0, strict=True)]
_InstanceType = Annotated[
    str, matching(re.compile(r"ml\..+"), "an instance type", "for example: ml.p4d.24xlarge")
]
_OneOrMore = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeadInstance(_Model):
    """An instance whose processes are killed once per job, when the job reaches a step."""

    host: str
    step: _Integer


class FaultPlan(_Model):
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
        queue_instances: Instances that the jobs of the job queue may use at the same time.
        throttle: Calls that fail with `ThrottlingException`, in S3 `SlowDown`, without any effect.
        errors: Calls that fail with status 500, without any effect.
        resets: Calls that take effect, but whose connection is cut without a response.
        torn: Calls whose response ends in the middle of its body.
        slow_seconds: Delay of a call before it takes effect.
    """

    seed: _Integer = 0
    capacity_after_seconds: _Number = 0.0
    waited_seconds: _Number = 0.0
    capacity_error_after_seconds: _Number | None = None
    no_capacity_types: Annotated[tuple[_InstanceType, ...], _OneOrMore] = ()
    interrupt_at_step: Annotated[tuple[_Integer, ...], _OneOrMore] = ()
    dead_instance: DeadInstance | None = None
    queue_instances: _Integer = 4
    throttle: dict[str, _Number] = {}
    errors: dict[str, _Number] = {}
    resets: dict[str, _Number] = {}
    torn: dict[str, _Number] = {}
    slow_seconds: dict[str, _Number] = {}

    @classmethod
    def from_document(cls, document: Any) -> FaultPlan:
        """Return the plan that a parsed YAML or JSON document describes.

        Raises:
            UserError: A name is unknown, or a value is invalid.
        """
        if not isinstance(document, Mapping):
            raise UserError(
                "the fault plan must be a mapping", "for example: capacity_after_seconds: 30"
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = diagnostics_of(cls, error)[0]
            raise UserError(
                f"fault plan: {dotted(first.path)}: {first.message}", first.hint
            ) from None

    @classmethod
    def from_file(cls, path: Path) -> FaultPlan:
        """Read a YAML file.

        Raises:
            UserError: The file cannot be read, or is no valid fault plan.
        """
        import yaml

        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(
                f"{path}: {error}", "write YAML such as: capacity_after_seconds: 30"
            ) from None
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
        generator = self._generators.setdefault(
            key,
            random.Random(f"{self.plan.seed}:{kind}:{name}"),  # noqa: S311
        )
        return generator.random() < calls[name]
