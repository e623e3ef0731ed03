"""The catalog's table of permissions has every field of a job, and agrees with AWS's reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from support.authorization_reference import PERMISSIONS, describe, differences, installed, is_key
from support.permissions import without_rights

from cloudtrain.catalog import service_limits
from cloudtrain.catalog.permissions import (
    CALLER,
    ROLE,
    actions,
    conditions,
    rights,
)
from cloudtrain.catalog.source import sources
from cloudtrain.job.fields import Section
from cloudtrain.job.request_members import DERIVED, FIELDS, REFUSED
from cloudtrain.job.spec import JobSpec

CREATE = "sagemaker:CreateTrainingJob"
OTHER_KINDS = {
    "accesspoint": "no job names an access point of S3",
    "accesspointobject": "no job names an access point of S3",
    "dataset": "CloudWatch's metrics of a training job belong to no dataset",
    **dict.fromkeys(
        ("document", "instance", "managed-instance", "task"),
        "a training container is none; AWS's guide allows `*` with a condition",
    ),
}
"""Kinds of resources that no job has."""


def fields_of(section: type[Section], path: str = "") -> Iterator[str]:
    """Yield the fields of job.yaml; those of a named entry follow `<name>`."""
    for name, field in section.model_fields.items():
        below, is_named = _section_in(field.annotation)
        at = f"{path}{name}"
        if below is None:
            yield at
        else:
            yield from fields_of(below, f"{at}.<name>." if is_named else f"{at}.")


def _section_in(kind: Any) -> tuple[type[Section] | None, bool]:
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind, False
    for inner in get_args(kind):
        found, is_named = _section_in(inner)
        if found is not None and found.__name__ != "Secret":  # a value of code.env
            return found, is_named or getattr(kind, "__origin__", None) is dict
    return None, False


def members(*path: str) -> Iterator[str]:
    """Yield the members of CreateTrainingJob that no field of job.yaml sets."""
    names = service_limits.members_of(*path) if path else service_limits.members_of()
    for name in names:
        below = (*path, name)
        member = ".".join(part for part in below if part != "[]")
        if member in FIELDS or member in REFUSED:
            continue
        limit = service_limits.limit_of(*below)
        if limit["type"] == "list" and any(each.startswith(f"{member}.") for each in FIELDS):
            yield from members(*below, "[]")
        elif limit.get("members"):
            yield from members(*below)
        else:
            yield member


def named() -> set[str]:
    found = {field for right in rights() for field in right.fields}
    return found | {field for each in conditions().values() for field in each.fields}


def is_without(field: str) -> bool:
    return any(field == each or field.startswith(f"{each}.") for each in without_rights())


DERIVED_WITHOUT = {
    "MlflowConfig.MlflowExperimentName",
    "MlflowConfig.MlflowRunName",
    "AlgorithmSpecification.TrainingInputMode",
    "AlgorithmSpecification.TrainingImageConfig.TrainingRepositoryAuthConfig.TrainingRepositoryCredentialsProviderArn",
}
"""Members that follow from fields of job.yaml, which have rows."""


def test_every_field_of_a_job_has_a_row() -> None:
    fields = [*fields_of(JobSpec), *(each for each in members() if each not in DERIVED_WITHOUT)]
    assert len(fields) > 130
    assert [each for each in fields if each not in named() and not is_without(each)] == []


def test_no_row_is_about_nothing() -> None:
    known = {*fields_of(JobSpec), *members(), *DERIVED}
    assert [each for each in named() if each not in known] == []
    rows = without_rights()
    unknown = [
        each for each in rows if not any(f"{field}.".startswith(f"{each}.") for field in known)
    ]
    assert unknown == []
    assert named() & set(rows) == set()


def test_every_kind_of_resource_is_in_a_right() -> None:
    """IAM decides about each kind that a request has, and all must allow it."""
    covered: dict[str, set[str]] = {}
    for right in rights():
        for action in right.actions:
            covered.setdefault(action, set()).update(right.resources)
    missing = [
        f"{name}: {kind}"
        for name, action in actions().items()
        for kind in action.kinds
        if kind not in covered[name] and kind not in OTHER_KINDS
    ]
    assert missing == []
    invented = [
        f"{name}: {kind}"
        for name, kinds in covered.items()
        for kind in kinds - {"*"}
        if kind not in actions()[name].kinds
    ]
    assert invented == []


def test_every_condition_key_has_a_row() -> None:
    assert set(conditions()) == set(actions()[CREATE].keys)
    for condition in conditions().values():
        assert bool(condition.unset) != bool(condition.members)
        assert bool(condition.fields) == bool(condition.members)
        for member in condition.members:
            assert member.partition(".")[0] in service_limits.members_of()
    for right in rights():
        for key in right.keys:
            assert all(
                any(is_key(each, key) for each in actions()[action].keys)
                for action in right.actions
                if key != "kms:GrantIsForAWSResource" or action == "kms:CreateGrant"
            )


def test_every_right_says_who_asks_and_where_it_is_from() -> None:
    assert len({right.name for right in rights()}) == len(rights())
    for right in rights():
        assert right.who in (CALLER, ROLE)
        assert bool(right.check) != bool(right.unchecked), right.name
        assert sources("permissions")[right.source].date >= "2026-10"


def test_the_table_agrees_with_awss_reference() -> None:
    document = json.loads(PERMISSIONS.read_text(encoding="utf-8"))
    found = describe(document, installed())
    assert list(differences(found, document["actions"])) == [], (
        "PYTHONPATH=tests python -m support.authorization_reference"
    )
