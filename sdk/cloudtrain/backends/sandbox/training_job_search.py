"""SageMaker's Search over training jobs: filters joined by And over properties and tags, and sort order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from cloudtrain.backends.sandbox.request_validation import validation_error
from cloudtrain.backends.sandbox.training_job import TrainingJob

Document = Mapping[str, Any]

_ONLY_DESCRIBED = ("MlflowConfig", "ProfilerRuleConfigurations", "RemoteDebugConfig", "InfraCheckConfig")
"""Fields of DescribeTrainingJob that a search record lacks (botocore's model; a test compares)."""

_TEXT: Mapping[str, Callable[[str, str], bool]] = {
    "Equals": operator.eq,
    "NotEquals": operator.ne,
    "Contains": lambda actual, wanted: wanted in actual,
    "In": lambda actual, wanted: actual in wanted.split(","),
}
_NUMBERS: Mapping[str, Callable[[float, float], bool]] = {
    "Equals": operator.eq,
    "NotEquals": operator.ne,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqualTo": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqualTo": operator.le,
}


def record_of(job: TrainingJob) -> dict[str, Any]:
    """Return the search record of a job."""
    described = {name: value for name, value in job.describe().items() if name not in _ONLY_DESCRIBED}
    return {**described, "Tags": list(job.tags)}


def search_jobs(jobs: Iterable[TrainingJob], request: Document) -> list[dict[str, Any]]:
    """Return the records that match a request, in its sort order.

    Raises:
        ServiceError: The request is invalid, or uses a feature that the sandbox lacks.
    """
    expression = request.get("SearchExpression", {})
    if expression.get("Operator", "And") != "And" or set(expression) - {"Filters", "Operator"}:
        raise validation_error("cloudtrain sandbox: Search supports only Filters that are joined by And")
    filters = expression.get("Filters", ())
    records = [record for record in map(record_of, jobs) if all(_matches(record, each) for each in filters)]
    key = request.get("SortBy", "LastModifiedTime")
    is_descending = request.get("SortOrder", "Descending") == "Descending"
    return sorted(records, key=lambda record: (record.get(key, 0), record["TrainingJobName"]), reverse=is_descending)


def _matches(record: Document, condition: Document) -> bool:
    name, wanted = str(condition["Name"]), str(condition.get("Value", ""))
    test = str(condition.get("Operator", "Equals"))
    actual = _property(record, name)
    if test in ("Exists", "NotExists"):
        return (actual is not None) == (test == "Exists")
    if actual is None:
        return False
    try:
        if isinstance(actual, int | float) and not isinstance(actual, bool):
            return _NUMBERS[test](float(actual), _number(name, wanted))
        return _TEXT[test](str(actual), wanted)
    except KeyError:
        raise validation_error(f"The operator {test} is not supported for the property {name}") from None


def _property(record: Document, name: str) -> Any:
    head, _, rest = name.partition(".")
    if head == "Tags" and rest:
        return next((tag["Value"] for tag in record["Tags"] if tag["Key"] == rest), None)
    if head == "HyperParameters" and rest:
        return record.get(head, {}).get(rest)
    value = record.get(name)
    if rest or isinstance(value, dict | list):
        raise validation_error(f"cloudtrain sandbox: Search does not support nested properties of {name}")
    return value


def _number(name: str, text: str) -> float:
    """Return the number in a text; for a property that is a time, seconds since the epoch."""
    try:
        if name.endswith("Time"):
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        return float(text)
    except ValueError:
        raise validation_error(f"Invalid value {text} for the property {name}") from None
