"""The AWS permissions that each field of a job needs, of the caller or of the execution role."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloudtrain.catalog.source import load

CALLER = "caller"
ROLE = "role"
"""Who needs a permission: the credentials that submit, or the execution role of the job."""

_NAME = "permissions"


@dataclass(frozen=True)
class Right:
    """Actions that some fields of a job need, all on the same resources.

    Attributes:
        name: Short name, unique.
        who: `caller` or `role`.
        actions: IAM actions.
        resources: Name of the value that has the ARNs, by kind of resource. IAM decides each kind on its own, so all must
            be allowed. The kind `*` is for actions without resources.
        fields: Fields of job.yaml, or members of CreateTrainingJob that the settings or `request` set.
        source: Key of the document that says so.
        check: The check of the account that asks for it; empty if none does.
        unchecked: Why no check asks for it.
        variable: Variable of infra/ that allows it; empty if infra/ always does.
        by_resource: Whether a policy of a resource in the same account can allow it instead.
        keys: Condition keys whose values a policy may limit.
    """

    name: str
    who: str
    actions: tuple[str, ...]
    resources: Mapping[str, str]
    fields: tuple[str, ...]
    source: str
    check: str = ""
    unchecked: str = ""
    variable: str = ""
    by_resource: bool = False
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Condition:
    """A condition key of CreateTrainingJob.

    Attributes:
        type: Type of its values in IAM's policy simulator, such as `stringList`; empty for a key that is never set.
        fields: Fields of job.yaml, or members of the request, that set it.
        members: Members of the request that have its values, by their paths without places in lists.
        default: Its value where the request lacks the members; empty if AWS then has no value.
        older: Deprecated key with the same value, which some policies use.
        unset: Why no request of cloudtrain has the key.
    """

    type: str = ""
    fields: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    default: str = ""
    older: str = ""
    unset: str = ""


@dataclass(frozen=True)
class Action:
    """An IAM action, as the Service Authorization Reference describes it.

    Attributes:
        kinds: Kinds of resources; empty for an action without resources. One that tags has only those that a right names.
        required: Kinds that every request has.
        keys: Condition keys: all of CreateTrainingJob, and of the others those that a right names.
    """

    kinds: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@functools.cache
def rights() -> tuple[Right, ...]:
    """Return all rights, those of the caller first."""
    return tuple(Right(**_tuples(each)) for each in load(_NAME)["rights"])


@functools.cache
def conditions() -> Mapping[str, Condition]:
    """Return the condition keys of CreateTrainingJob."""
    return {key: Condition(**_tuples(each)) for key, each in load(_NAME)["conditions"].items()}


@functools.cache
def actions() -> Mapping[str, Action]:
    """Return the actions of all rights, by their names."""
    return {name: Action(**_tuples(each)) for name, each in load(_NAME)["actions"].items()}


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
