"""`SweepSpec`: the validated, frozen content of sweep.yaml."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cloudtrain.errors import did_you_mean
from cloudtrain.features.sweeps.domains import Choice, Range, is_equal
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.fields import Dollars, Duration, FiniteFloat, Integer, Section, short_for
from cloudtrain.job.job_fields import JobName
from cloudtrain.runs.main_metric import is_higher_better, is_lower_better

GRID, RANDOM, BAYESIAN, HYPERBAND = "grid", "random", "bayesian", "hyperband"
SAGEMAKER_ENGINE = "sagemaker"
FUNCTION = "function/"
"""Begin of the metric's name where a function of Python returns the objective."""

_KINDS = ("choice", "int", "log_int", "uniform", "log_uniform")
_KIND_HINT = "such as {choice: [16, 32]}, {int: [2, 8]}, {uniform: [0.0, 0.5]} or {log_uniform: [1e-5, 1e-2]}"


def _one_or_more(value: object) -> object:
    """Return a list for a single value."""
    return value if isinstance(value, list | tuple) else [value]


Values = Annotated[tuple[Any, ...], BeforeValidator(_one_or_more)]
"""Values, of which a single one needs no brackets."""


class Parameter(Section):
    """The values of one field of the job: exactly one of choice, int, log_int, uniform and log_uniform."""

    choice: tuple[Any, ...] | None = Field(None, examples=[[16, 32, 64]])
    """Values to choose from."""
    int: tuple[Integer, Integer] | None = Field(None, examples=[[2, 8]])
    """Smallest and largest integer."""
    log_int: tuple[Integer, Integer] | None = Field(None, examples=[[8, 512]])
    """Smallest and largest integer, sampled on a logarithmic scale."""
    uniform: tuple[FiniteFloat, FiniteFloat] | None = Field(None, examples=[[0.0, 0.5]])
    """Smallest and largest number."""
    log_uniform: tuple[FiniteFloat, FiniteFloat] | None = Field(None, examples=[[1e-5, 1e-2]])
    """Smallest and largest number, sampled on a logarithmic scale."""
    step: Annotated[FiniteFloat, Field(gt=0)] | None = Field(None, examples=[4])
    """Distance between values (with int and uniform)."""
    when: dict[str, Values] = Field(default_factory=dict, examples=[{"train.schedule": ["cosine"]}])
    """Search this field only if others of the space have one of these values; else it keeps the job's own value."""

    @property
    def kinds(self) -> list[str]:
        """Names of the given kinds: one, if the parameter is valid."""
        return [name for name in _KINDS if getattr(self, name) is not None]

    @property
    def domain(self) -> Choice | Range:
        """The values of a parameter that has one kind."""
        if self.choice is not None:
            return Choice(self.choice)
        (kind,) = self.kinds
        low, high = getattr(self, kind)
        return Range.of(kind, low, high, self.step)

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        given = self.kinds
        if len(given) != 1:
            yield Diagnostic(
                f"give exactly one of {', '.join(_KINDS)}",
                (),
                _KIND_HINT,
                tuple((n,) for n in _KINDS),
            )
            return
        if self.choice is not None:
            yield from self._choice_errors(self.choice)
        else:
            yield from self._range_errors(given[0])
        if self.step is not None and given[0] not in ("int", "uniform"):
            yield Diagnostic(
                "has an effect with int and uniform only",
                ("step",),
                "remove it",
                (("step",), (given[0],)),
            )

    def _choice_errors(self, choice: tuple[Any, ...]) -> Iterator[Diagnostic]:
        if not choice:
            yield Diagnostic(
                "expected at least one value", ("choice",), "for example choice: [16, 32]"
            )
        for index, value in enumerate(choice):
            if any(is_equal(value, other) for other in choice[:index]):
                yield Diagnostic(f"given twice: {value}", ("choice", index), "remove one")

    def _range_errors(self, kind: str) -> Iterator[Diagnostic]:
        low, high = getattr(self, kind)
        if low >= high:
            hint = f"write [{high}, {low}]"
            if low == high:
                hint = f"write choice: [{low}], or the value into the job"
            yield Diagnostic(
                f"expected the smallest and then the largest value, got [{low}, {high}]",
                (kind,),
                hint,
            )
        elif kind.startswith("log_") and low <= 0:
            hint = f"use a lower bound above 0, or {kind.removeprefix('log_')}"
            yield Diagnostic(f"a logarithmic scale has no value {low}", (kind, 0), hint)
        elif self.step is not None and self.step > high - low:
            yield Diagnostic(
                f"larger than the range of {high - low:g}", ("step",), f"use at most {high - low:g}"
            )
        elif self.step is not None and kind == "int" and not float(self.step).is_integer():
            yield Diagnostic(
                "expected an integer for a range of integers",
                ("step",),
                f"use {math.ceil(self.step)}",
            )


class Objective(Section):
    """What the sweep improves."""

    metric: str = Field(examples=["validation/loss"])
    """Metric of the runs, as split/name. Its value at the end of a run counts."""
    goal: Literal["min", "max"] | None = None
    """Whether smaller or larger is better; default: by the metric's name, such as max for accuracy."""

    @property
    def is_maximized(self) -> bool:
        """Whether larger values are better."""
        return self.goal == "max" if self.goal is not None else is_higher_better(self.metric)

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        split, slash, name = self.metric.partition("/")
        if not (split and slash and name):
            hint = f'did you mean "validation/{name or split}"?'
            yield Diagnostic(f'expected split/name, got "{self.metric}"', ("metric",), hint)
        elif self.goal is None and is_higher_better(self.metric) == is_lower_better(self.metric):
            message = f"it is unknown whether a larger or a smaller {self.metric} is better"
            yield Diagnostic(message, ("goal",), "goal: min or goal: max", (("metric",), ("goal",)))


class SweepLimits(Section):
    """Limits of the sweep's cost and time."""

    cost: Annotated[Dollars, Field(gt=0)] | None = None
    """Budget of all trials together. A trial starts only if its highest cost and the reserve for its stop fit into it."""
    time: Annotated[Duration, Field(ge=60)] | None = None
    """Time since the start of the sweep after which running trials are stopped and no others start."""


class Rungs(Section):
    """Lengths at which hyperband compares trials and lets the best of them continue."""

    first: Annotated[Integer, Field(ge=1)] | None = Field(None, examples=[50])
    """Length of every trial at first, in steps or epochs as in the job; default: 1/factor^2 of the job's length."""
    factor: Integer = Field(default=3, ge=2)
    """The best 1/factor of the trials of a rung continue, to a length that is larger by this factor."""


class SweepSpec(Section):
    """A search for the best values of a job's fields, as sweep.yaml describes it.

    Raises:
        SpecError: a field is unknown, missing or invalid. The error lists every problem.
    """

    name: JobName | None = Field(None, examples=["digits-rate"])
    """Start of the sweep's id; default: the job's name."""
    job: str | dict[str, Any] = Field(examples=["job.yaml"])
    """Path of the job file, relative to this file; or the content of a job file."""
    space: dict[str, Parameter] = Field(
        examples=[{"train.learning_rate": {"log_uniform": [1e-5, 1e-2]}}]
    )
    """Values to search, by the path of a field in the job."""
    objective: Annotated[Objective, short_for("metric")] = Field(
        examples=[{"metric": "validation/loss"}]
    )
    """The metric, and whether it is to be small or large."""
    engine: Literal["optuna", "sagemaker"] = "optuna"
    """What proposes and starts trials: a controller on this machine (optuna), or a tuning job of SageMaker."""
    strategy: Literal["grid", "random", "bayesian", "hyperband"] = "bayesian"
    """How values are proposed: all of them, at random, by results (TPE), or at random with rungs (ASHA)."""
    trials: Annotated[Integer, Field(ge=1, le=10_000)] | None = Field(None, examples=[20])
    """Number of trials; default with grid: all values."""
    parallel: Integer = Field(default=1, ge=1, le=100)
    """Most trials that run at the same time; fewer where the budget does not allow more."""
    limits: SweepLimits = Field(default_factory=SweepLimits.model_construct)
    """Limits of the sweep's cost and time."""
    pruning: Literal["none", "median", "asha"] = "none"
    """Stop trials early: those below the median at the same step, or outside of the best quarter (asha)."""
    rungs: Rungs | None = None
    """Lengths at which trials are compared (with strategy hyperband)."""
    seed: Integer = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of all proposals."""

    def _cross_field_errors(self) -> Iterator[Diagnostic]:
        if not self.space:
            yield Diagnostic(
                "expected at least one field of the job", ("space",), f"for example {_EXAMPLE}"
            )
        if self.trials is None and self.strategy != GRID:
            yield Diagnostic("required field is missing", ("trials",), "for example trials: 20")
        yield from self._strategy_errors()
        for path, parameter in self.space.items():
            at = ("space", path)
            if not all(path.split(".")):
                yield Diagnostic(
                    "expected the path of a field",
                    at,
                    "for example train.learning_rate",
                    is_key=True,
                )
            yield from (each.below(at) for each in _condition_errors(path, parameter, self.space))
            is_valid = len(parameter.kinds) == 1
            if self.strategy == GRID and is_valid and not parameter.domain.is_countable:
                hint = "write choice: [...], or step: with int or uniform"
                yield Diagnostic(
                    "a grid needs single values, and this is a range without steps", at, hint
                )

    def _strategy_errors(self) -> Iterator[Diagnostic]:
        if self.rungs is not None and self.strategy != HYPERBAND:
            message = "has an effect with strategy: hyperband only"
            yield Diagnostic(
                message, ("rungs",), "remove it, or use pruning: asha", (("rungs",), ("strategy",))
            )
        if self.pruning != "none" and self.strategy == HYPERBAND:
            message = "hyperband has its own rule for the trials that continue"
            yield Diagnostic(message, ("pruning",), "remove it", (("pruning",), ("strategy",)))


_EXAMPLE = "space: {train.learning_rate: {log_uniform: [1e-5, 1e-2]}}"


def _condition_errors(
    path: str, parameter: Parameter, space: Mapping[str, Parameter]
) -> Iterator[Diagnostic]:
    """Yield the errors in `when` of a parameter; paths begin at the parameter."""
    for name, values in parameter.when.items():
        at = ("when", name)
        if name == path or name not in space:
            hint = did_you_mean(
                name, [other for other in space if other != path], "name another field of the space"
            )
            yield Diagnostic("expected another field of the space", at, hint, is_key=True)
            continue
        if name in _ancestors(name, space):
            yield Diagnostic("the conditions form a circle", at, "remove one of them", is_key=True)
            return
        for index, value in enumerate(values):
            # A parameter without a kind is reported itself.
            if len(space[name].kinds) == 1 and not space[name].domain.has(value):
                hint = "use integers of its range"
                if space[name].choice is not None:
                    hint = "use one of its values"
                yield Diagnostic(f"{name} never has the value {value}", (*at, index), hint)


def _ancestors(path: str, space: Mapping[str, Parameter]) -> set[str]:
    """Return the fields on which a field depends, directly or not."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        parameter = space.get(waiting.pop())
        new = set(parameter.when) - found if parameter is not None else set[str]()
        found |= new
        waiting += new
    return found
