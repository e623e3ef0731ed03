"""Decides what IAM policies allow, for the part of their language that infra/ writes; anything else is refused.

Sources: IAM User Guide, "Policy evaluation logic", "IAM JSON policy elements: Condition operators", "Conditions with
multiple context keys or values" and "IAM policy elements: Variables and tags" (2026-11). moto's evaluator knows neither
resources nor conditions; @cloud-copilot/iam-simulate knows all of it, but needs Node, so a test compares the two where
it is installed (tests/infra/test_evaluator.py).
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
    """A policy says something that this evaluator does not know: it never guesses."""


class Decision(StrEnum):
    """What IAM would answer, in its simulator's words."""

    ALLOWED = "allowed"
    IMPLICIT = "implicitDeny"
    EXPLICIT = "explicitDeny"


@dataclass(frozen=True)
class Request:
    """One action on one resource, as IAM sees it.

    Attributes:
        action: Such as `s3:GetObject`.
        resource: ARN, or `*` where the action knows no resources.
        context: Values by condition key; a key with several values is one that AWS documents as such.
    """

    action: str
    resource: str
    context: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def values(self, key: str) -> tuple[str, ...] | None:
        """Return the values of a condition key, whose case does not count; None where the request has none."""
        return next((values for name, values in self.context.items() if name.lower() == key.lower()), None)


@dataclass(frozen=True)
class Grant:
    """The smallest part of a policy that can be taken away: one action on one resource in one statement."""

    sid: str
    action: str
    resource: str


def decide(policies: Sequence[Document], request: Request) -> Decision:
    """Return what several policies of one principal say together: a Deny counts more than any Allow."""
    effects = [statement["Effect"] for policy in policies for statement in _matching(policy, request)]
    if "Deny" in effects:
        return Decision.EXPLICIT
    return Decision.ALLOWED if "Allow" in effects else Decision.IMPLICIT


def grants(policy: Document) -> Iterator[Grant]:
    """Yield everything that a policy allows."""
    for statement in _statements(policy):
        if statement["Effect"] == "Allow":
            for action in sorted(as_list(statement["Action"])):
                for resource in sorted(as_list(statement["Resource"])):
                    yield Grant(statement.get("Sid", ""), action, resource)


def granting(policy: Document, request: Request) -> list[Grant]:
    """Return the parts of a policy that allow a request, whatever denies it."""
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
    """Return what IAM allows to be one or many as many."""
    return list(value) if isinstance(value, list | tuple) else [value]


# ---------------------------------------------------------------- statements


def _matching(policy: Document, request: Request) -> Iterator[Document]:
    for statement in _statements(policy):
        if (
            any(_is_action(action, request.action) for action in as_list(statement["Action"]))
            and any(_is_resource(resource, request) for resource in as_list(statement["Resource"]))
            and _holds(statement.get("Condition", {}), request)
        ):
            yield statement


def _statements(policy: Document) -> Iterator[Document]:
    for statement in as_list(policy["Statement"]):
        unknown = set(statement) - _ELEMENTS
        if unknown or statement.get("Principal", "*") not in ("*", {"AWS": "*"}):
            raise UnsupportedError(f"{statement.get('Sid', '')}: {sorted(unknown) or statement['Principal']}")
        yield statement


def _is_action(pattern: str, action: str) -> bool:
    return _like(pattern.lower(), action.lower())


def _is_resource(pattern: str, request: Request) -> bool:
    resolved = _resolve(pattern, request)
    return pattern == "*" or (resolved is not None and _is_arn(resolved, request.resource))


# ---------------------------------------------------------------- conditions


def _holds(conditions: Document, request: Request) -> bool:
    """Tell whether a condition block is true: every key of every operator must be, of its values one suffices."""
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
    """Compare one value of the request: with any of those wanted, and where the operator is negated with none."""
    found = any(_OPERATORS[operator](each, value) for each in wanted)
    return not found if operator in _NEGATED else found


def _resolve(text: str, request: Request) -> str | None:
    """Return a text with its variables filled in, or None where the request lacks one: then nothing matches."""
    resolved = text
    for name in _VARIABLE.findall(text):
        values = request.values(name)
        if values is None:
            return None
        resolved = resolved.replace(f"${{{name}}}", values[0])
    return resolved


def _is_arn(pattern: str, arn: str) -> bool:
    """Compare ARNs part by part: a wildcard does not reach over a colon, but in the last part, which may hold some."""
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
