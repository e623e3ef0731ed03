"""Evaluator of IAM policies. It supports the policy elements that infra/ uses, and raises an error for others.

Sources: IAM User Guide, "Policy evaluation logic", "IAM JSON policy elements: Condition operators", "Conditions with
multiple context keys or values" and "IAM policy elements: Variables and tags" (2026-11). moto's evaluator supports
neither resources nor conditions. @cloud-copilot/iam-simulate supports all elements, but needs Node. Where it is
installed, tests/infra/test_evaluator.py compares both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

Document = Mapping[str, Any]

_ELEMENTS = {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_ARN_PARTS = 6


class UnsupportedError(Exception):
    """A policy uses an element that this evaluator does not support."""


class Decision(StrEnum):
    """Decision of IAM, with the values of its policy simulator."""

    ALLOWED = "allowed"
    IMPLICIT = "implicitDeny"
    EXPLICIT = "explicitDeny"


@dataclass(frozen=True)
class Request:
    """A request to AWS: one action on one resource.

    Attributes:
        action: Action, such as `s3:GetObject`.
        resource: ARN, or `*` for an action without resources.
        context: Values by condition key. Several values are for keys that AWS documents as multivalued.
    """

    action: str
    resource: str
    context: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def values(self, key: str) -> tuple[str, ...] | None:
        """Return the values of a condition key, or None if the request lacks the key. Case is ignored."""
        return next(
            (values for name, values in self.context.items() if name.lower() == key.lower()), None
        )


@dataclass(frozen=True)
class Grant:
    """One action on one resource in one statement: the smallest part that a policy can lose."""

    sid: str
    action: str
    resource: str


def decide(policies: Sequence[Document], request: Request) -> Decision:
    """Return the decision of all policies of a principal. A Deny overrides every Allow."""
    effects = [
        statement["Effect"] for policy in policies for statement in _matching(policy, request)
    ]
    if "Deny" in effects:
        return Decision.EXPLICIT
    return Decision.ALLOWED if "Allow" in effects else Decision.IMPLICIT


def grants(policy: Document) -> Iterator[Grant]:
    """Yield all grants of a policy's Allow statements."""
    for statement in _statements(policy):
        if statement["Effect"] == "Allow":
            for action in sorted(as_list(statement["Action"])):
                for resource in sorted(as_list(statement["Resource"])):
                    yield Grant(statement.get("Sid", ""), action, resource)


def granting(policy: Document, request: Request) -> list[Grant]:
    """Return the grants of a policy that allow a request. Deny statements are ignored."""
    return [
        Grant(statement.get("Sid", ""), action, resource)
        for statement in _matching(policy, request)
        if statement["Effect"] == "Allow"
        for action in as_list(statement["Action"])
        if _is_action(action, request.action)
        for resource in as_list(statement["Resource"])
        if _is_resource(resource, request)
    ]


def as_list(value: Any) -> list[Any]:
    """Return a list, also for an element that IAM allows to be a single value."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _matching(policy: Document, request: Request) -> Iterator[Document]:
    for statement in _statements(policy):
        if (
            any(_is_action(action, request.action) for action in as_list(statement["Action"]))
            and any(_is_resource(resource, request) for resource in as_list(statement["Resource"]))
            and _is_condition_met(statement.get("Condition", {}), request)
        ):
            yield statement


def _statements(policy: Document) -> Iterator[Document]:
    for statement in as_list(policy["Statement"]):
        unknown = set(statement) - _ELEMENTS
        if unknown or statement.get("Principal", "*") not in ("*", {"AWS": "*"}):
            raise UnsupportedError(
                f"{statement.get('Sid', '')}: {sorted(unknown) or statement['Principal']}"
            )
        yield statement


def _is_action(pattern: str, action: str) -> bool:
    return _like(pattern.lower(), action.lower())


def _is_resource(pattern: str, request: Request) -> bool:
    resolved = _resolve(pattern, request)
    return pattern == "*" or (resolved is not None and _is_arn(resolved, request.resource))


def _is_condition_met(conditions: Document, request: Request) -> bool:
    """Return whether every key of every operator in a condition block matches one of its values."""
    return all(
        _test(operator, request, key, [str(value) for value in as_list(wanted)])
        for operator, keys in conditions.items()
        for key, wanted in keys.items()
    )


def _test(operator: str, request: Request, key: str, wanted: list[str]) -> bool:
    quantifier, _, name = operator.rpartition(":")
    base = name.removesuffix("IfExists")
    values = request.values(key)
    if base == "Null" and not quantifier and base == name:
        return (values is None) == (wanted[0].lower() == "true")
    if base not in _OPERATORS or quantifier not in ("", "ForAllValues"):
        raise UnsupportedError(operator)
    if values is None:
        return quantifier == "ForAllValues" or name != base or base in _NEGATED
    if not quantifier and len(values) != 1:
        raise UnsupportedError(f"{operator} on {key}, which has {len(values)} values")
    resolved = [each for each in (_resolve(value, request) for value in wanted) if each is not None]
    return all(_one(base, resolved, value) for value in values)


def _one(operator: str, wanted: list[str], value: str) -> bool:
    """Return whether a value of the request matches one of the wanted values; none, for a negated operator."""
    found = any(_OPERATORS[operator](each, value) for each in wanted)
    return not found if operator in _NEGATED else found


def _resolve(text: str, request: Request) -> str | None:
    """Return a text with the values of its variables, or None if the request lacks one: then nothing matches."""
    resolved = text
    for name in _VARIABLE.findall(text):
        values = request.values(name)
        if values is None:
            return None
        resolved = resolved.replace(f"${{{name}}}", values[0])
    return resolved


def _is_arn(pattern: str, arn: str) -> bool:
    """Match ARNs part by part. A wildcard matches no colon, except in the last part."""
    patterns, parts = pattern.split(":", _ARN_PARTS - 1), arn.split(":", _ARN_PARTS - 1)
    return len(patterns) == len(parts) and all(map(_like, patterns, parts))


def _like(pattern: str, text: str) -> bool:
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    wild = {"*": ".*", "?": "."}
    return re.compile("".join(wild.get(each) or re.escape(each) for each in pattern), re.DOTALL)


_OPERATORS: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda wanted, value: wanted == value,
    "StringNotEquals": lambda wanted, value: wanted == value,
    "StringLike": _like,
    "ArnEquals": _is_arn,
    "ArnLike": _is_arn,
    "ArnNotEquals": _is_arn,
    "Bool": lambda wanted, value: wanted.lower() == value.lower(),
    "NumericLessThan": lambda wanted, value: float(value) < float(wanted),
    "NumericLessThanEquals": lambda wanted, value: float(value) <= float(wanted),
}
_NEGATED = {"StringNotEquals", "ArnNotEquals"}
