"""The check of this machine's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from support.aws_frontend import Answer, Front
from support.preflight import ACCOUNT, Checks, only_failure

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws

_CALLER = (
    '<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>'
    f"<Arn>arn:aws:iam::{ACCOUNT}:root</Arn><UserId>x</UserId><Account>{ACCOUNT}</Account>"
    "</GetCallerIdentityResult></GetCallerIdentityResponse>"
)
_EXPIRED = "<ErrorResponse><Error><Code>SignatureDoesNotMatch</Code><Message>expired</Message></Error></ErrorResponse>"


def answer_at(seconds: int, body: str = _CALLER, status: int = 200) -> Answer:
    """Return a response of STS whose Date is that many seconds after this machine's clock."""
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
    return Answer(body.encode(), status, {"Content-Type": "text/xml", "Date": date})


@pytest.mark.parametrize(("seconds", "side"), [(7200, "behind"), (-7200, "ahead of")])
def test_a_wrong_clock_fails(account: Front, checks: Checks, seconds: int, side: str) -> None:
    account.rules["GetCallerIdentity"] = lambda request: answer_at(seconds)
    failure = only_failure(checks(), "clock")
    assert f"{side} AWS's clock; AWS rejects requests that are more than 5m off" in failure.detail
    assert "timedatectl" in failure.fix


def test_a_rejection_for_the_clock_is_explained(account: Front, checks: Checks) -> None:
    account.rules["GetCallerIdentity"] = lambda request: answer_at(1200, _EXPIRED, 403)
    found = checks()
    assert {name for name, each in found.items() if each.result is Result.FAIL} == {
        "identity",
        "clock",
    }


def test_a_small_difference_is_a_warning(account: Front, checks: Checks) -> None:
    assert checks()["clock"].warning == ""
    account.rules["GetCallerIdentity"] = lambda request: answer_at(150)
    found = checks()["clock"]
    assert found.result is Result.PASS
    assert "behind AWS's clock: synchronise" in found.warning
