"""The `metrics` section of job.yaml: names and regular expressions."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from cloudtrain.job.diagnostics import field_error
from cloudtrain.job.fields import matching

PROGRESS_METRICS = ("step", "total")
"""Names of the patterns that find a run's progress."""

_NESTED = re.compile(r"[+*]\)[+*{]")
_MAX_CHARACTERS = 500
"""Longest regular expression of a metric definition. Source: CreateTrainingJob, MetricDefinition."""


def _check_pattern(value: object) -> object:
    if not isinstance(value, str):
        raise field_error(f"expected a regular expression, got {value!r}", hint="for example 'loss=([0-9.]+)'")
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise field_error(f"not a regular expression: {error}", hint="for example 'loss=([0-9.]+)'") from None
    if groups != 1:
        raise field_error(
            f"expected one group that matches the value, got {groups}",
            hint="for example 'loss=([0-9.]+)'; (?:...) groups without capturing",
        )
    if _NESTED.search(value):
        message = "a repetition of a group that ends with a repetition can take hours for one line"
        raise field_error(message, hint="for example a+ in place of (?:a+)+")
    if len(value) > _MAX_CHARACTERS:
        raise field_error(f"{len(value)} characters; SageMaker allows {_MAX_CHARACTERS}", hint="shorten it")
    return value


def qualified_name(name: str) -> str:
    """Return the name under which `status` shows a metric: one without a split belongs to the training split."""
    return name if "/" in name else f"train/{name}"


MetricPattern = Annotated[str, BeforeValidator(_check_pattern)]
"""A regular expression with one group."""

_NAME = matching(re.compile(r"[A-Za-z0-9_.:/-]{1,255}"), "letters, digits and _ . : / -", "for example validation/loss")

MetricName = Annotated[str, _NAME]
"""Name of a metric; `step` and `total` are the progress."""
