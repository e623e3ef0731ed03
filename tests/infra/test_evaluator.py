"""The evaluator of policies implements the rules of IAM that infra/ depends on."""

from __future__ import annotations

from typing import Any

import pytest
from support.iam_policy import (
    Decision,
    Grant,
    Request,
    UnsupportedError,
    decide,
    granting,
    grants,
)

pytestmark = pytest.mark.promise

BUCKET = "arn:aws:s3:::bucket"


def allow(
    action: Any = "s3:GetObject", resource: Any = f"{BUCKET}/*", **fields: Any
) -> dict[str, Any]:
    return {"Sid": "S", "Effect": "Allow", "Action": action, "Resource": resource, **fields}


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def under(condition: dict[str, Any], **context: Any) -> Decision:
    """Return the decision for a request with a context, by a policy that allows it under a condition."""
    values = {
        key: value if isinstance(value, tuple) else (value,) for key, value in context.items()
    }
    return decide(
        [policy(allow(Condition=condition))], Request("s3:GetObject", f"{BUCKET}/key", values)
    )


@pytest.mark.parametrize(
    ("action", "resource", "expected"),
    [
        ("s3:GetObject", f"{BUCKET}/a/b", Decision.ALLOWED),
        ("S3:getobject", f"{BUCKET}/a", Decision.ALLOWED),
        ("s3:GetObjectAcl", f"{BUCKET}/a", Decision.IMPLICIT),
        ("s3:GetObject", f"{BUCKET}", Decision.IMPLICIT),
        ("s3:GetObject", f"{BUCKET}2/a", Decision.IMPLICIT),
        ("s3:GetObject", "*", Decision.IMPLICIT),
    ],
)
def test_actions_and_resources(action: str, resource: str, expected: Decision) -> None:
    assert decide([policy(allow())], Request(action, resource)) == expected


def test_no_policy_allows_nothing() -> None:
    assert decide([], Request("s3:GetObject", f"{BUCKET}/a")) == Decision.IMPLICIT


def test_deny_overrides_allow_in_any_order_and_policy() -> None:
    denied = {**allow(resource=f"{BUCKET}/code/*"), "Effect": "Deny"}
    for policies in (
        [policy(denied, allow())],
        [policy(allow(), denied)],
        [policy(allow()), policy(denied)],
    ):
        assert decide(policies, Request("s3:GetObject", f"{BUCKET}/code/x")) == Decision.EXPLICIT
        assert decide(policies, Request("s3:GetObject", f"{BUCKET}/data/x")) == Decision.ALLOWED


@pytest.mark.parametrize(
    ("pattern", "arn", "expected"),
    [
        (
            "arn:aws:logs:eu:1:log-group:/a:*",
            "arn:aws:logs:eu:1:log-group:/a:log-stream:x/y",
            Decision.ALLOWED,
        ),
        ("arn:aws:iam::*:role/x", "arn:aws:iam::1:role/x", Decision.ALLOWED),
        # Before the last part of an ARN, a wildcard matches no colon.
        ("arn:aws:*:role/x", "arn:aws:iam::1:role/x", Decision.IMPLICIT),
        ("arn:aws:s3:::b/?", "arn:aws:s3:::b/xy", Decision.IMPLICIT),
        ("arn:aws:s3:::b/[x]*", "arn:aws:s3:::b/x", Decision.IMPLICIT),
        (
            "arn:aws:s3:::b/*/checkpoints/*",
            "arn:aws:s3:::b/run/steps/checkpoints/f",
            Decision.ALLOWED,
        ),
        ("arn:aws:s3:::b/*/checkpoints/*", "arn:aws:s3:::b/checkpoints/f", Decision.IMPLICIT),
        ("*", "*", Decision.ALLOWED),
        ("*", "arn:aws:s3:::b", Decision.ALLOWED),
    ],
)
def test_wildcards(pattern: str, arn: str, expected: Decision) -> None:
    assert decide([policy(allow(resource=pattern))], Request("s3:GetObject", arn)) == expected


def test_unset_policy_variables_match_nothing() -> None:
    own = policy(allow("iam:GetRole", "arn:aws:iam::1:user/${aws:username}"))
    ada = "arn:aws:iam::1:user/ada"
    assert (
        decide([own], Request("iam:GetRole", ada, {"aws:username": ("ada",)})) == Decision.ALLOWED
    )
    assert (
        decide([own], Request("iam:GetRole", ada, {"aws:username": ("bob",)})) == Decision.IMPLICIT
    )
    assert decide([own], Request("iam:GetRole", ada)) == Decision.IMPLICIT


# (condition, context, whether the condition is met)
CONDITIONS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"StringEquals": {"k": ["a", "b"]}}, {"k": "b"}, True),
    ({"StringEquals": {"k": "a"}}, {"k": "A"}, False),
    ({"StringEquals": {"K": "a"}}, {"k": "a"}, True),
    ({"StringEquals": {"k": "a"}}, {}, False),
    ({"StringEqualsIfExists": {"k": "a"}}, {}, True),
    ({"StringEqualsIfExists": {"k": "a"}}, {"k": "b"}, False),
    ({"StringEquals": {"k": "a", "l": "b"}}, {"k": "a", "l": "c"}, False),
    ({"StringEquals": {"k": "a"}, "Bool": {"l": "true"}}, {"k": "a", "l": "false"}, False),
    ({"StringNotEquals": {"k": ["a", "b"]}}, {"k": "b"}, False),
    ({"StringNotEquals": {"k": ["a", "b"]}}, {"k": "c"}, True),
    ({"StringNotEquals": {"k": "a"}}, {}, True),
    ({"StringLike": {"k": "ml.g5.*"}}, {"k": "ml.g5.xlarge"}, True),
    ({"StringLike": {"k": "ml.g5.*"}}, {"k": "mlxg5.xlarge"}, False),
    ({"ArnEquals": {"k": "arn:aws:kms:eu:1:key/*"}}, {"k": "arn:aws:kms:eu:1:key/x"}, True),
    ({"ArnEquals": {"k": "arn:aws:kms:*:key/x"}}, {"k": "arn:aws:kms:eu:1:key/x"}, False),
    ({"ArnNotEqualsIfExists": {"k": "arn:aws:kms:eu:1:key/x"}}, {}, True),
    (
        {"ArnNotEqualsIfExists": {"k": "arn:aws:kms:eu:1:key/x"}},
        {"k": "arn:aws:kms:eu:1:key/x"},
        False,
    ),
    ({"Bool": {"k": True}}, {"k": "true"}, True),
    ({"Bool": {"k": "true"}}, {}, False),
    ({"NumericLessThanEquals": {"k": "3600"}}, {"k": "3600"}, True),
    ({"NumericLessThanEquals": {"k": "3600"}}, {"k": "10000"}, False),
    ({"NumericLessThan": {"k": "1.2"}}, {"k": "1.3"}, False),
    ({"Null": {"k": "true"}}, {}, True),
    ({"Null": {"k": "false"}}, {}, False),
    ({"Null": {"k": "false"}}, {"k": "a"}, True),
    ({"ForAllValues:StringEquals": {"k": ["a", "b"]}}, {"k": ("a", "b")}, True),
    ({"ForAllValues:StringEquals": {"k": ["a", "b"]}}, {"k": ("a", "c")}, False),
    ({"ForAllValues:StringLike": {"k": ["ml.*"]}}, {"k": ("ml.a", "ml.b")}, True),
    # For this reason, submitter.tf also requires each of its keys with `Null`.
    ({"ForAllValues:StringEquals": {"k": "a"}}, {}, True),
]


@pytest.mark.parametrize(("condition", "context", "is_met"), CONDITIONS)
def test_conditions(condition: dict[str, Any], context: dict[str, Any], is_met: bool) -> None:
    assert under(condition, **context) == (Decision.ALLOWED if is_met else Decision.IMPLICIT)


@pytest.mark.parametrize(
    "statement",
    [
        {"Effect": "Allow", "NotAction": "s3:*", "Action": "s3:*", "Resource": "*"},
        allow(NotResource="*"),
        allow(Principal={"Service": "sagemaker.amazonaws.com"}),
        allow(Condition={"DateLessThan": {"aws:CurrentTime": "2027-01-01T00:00:00Z"}}),
        allow(Condition={"ForAnyValue:StringEquals": {"k": "a"}}),
    ],
)
def test_unknown_constructs_are_rejected(statement: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        decide([policy(statement)], Request("s3:GetObject", f"{BUCKET}/key", {"k": ("a",)}))


def test_several_values_of_a_key_need_a_quantifier() -> None:
    with pytest.raises(UnsupportedError, match="2 values"):
        under({"StringEquals": {"k": "a"}}, k=("a", "b"))


def test_grants_are_counted_by_action_and_resource() -> None:
    both = policy(allow(["s3:GetObject", "s3:PutObject"], [f"{BUCKET}/a/*", f"{BUCKET}/b/*"]))
    assert len(list(grants(both))) == 4
    assert granting(both, Request("s3:PutObject", f"{BUCKET}/b/x")) == [
        Grant("S", "s3:PutObject", f"{BUCKET}/b/*")
    ]
