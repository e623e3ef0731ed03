"""The check of the weights that `train.init_from` names."""

from __future__ import annotations

import json
import shlex

import pytest
from support.aws_frontend import Front, simulation
from support.preflight import Checks, only_failure, put, save

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws

BASE = "s3://cloudtrain-test/base"


def test_weights_that_exist_are_named(account: Front, checks: Checks) -> None:
    put("base/model.pt", b"123")
    save(20, run="other", place="folder")
    expected = {
        f"{BASE}/model.pt": f"the run starts with {BASE}/model.pt (3 B)",
        BASE: f"the run starts with {BASE}/model.pt (3 B)",
        "s3://cloudtrain-test/folder/": "the run starts with step 20 of run other",
        "s3://cloudtrain-test/folder/step-00000020": "the run starts with step 20 of run other",
    }
    for uri, detail in expected.items():
        found = checks(f"train.init_from={uri}")["initial weights"]
        assert (found.result, found.detail) == (Result.PASS, detail)
    assert "initial weights" not in checks()


@pytest.mark.parametrize(
    ("uri", "detail", "fix"),
    [
        (
            f"{BASE}/model.pt",
            f"there is no object {BASE}/model.pt",
            f"copy it: aws s3 cp FILE {BASE}/model.pt",
        ),
        (
            BASE,
            f"there is neither model.pt nor a complete checkpoint at {BASE}",
            f"list the folder: aws s3 ls {BASE}/",
        ),
        (
            "s3://no-such-bucket/model.pt",
            "there is no object s3://no-such-bucket/model.pt",
            "copy it: aws s3 cp FILE ",
        ),
    ],
)
def test_weights_that_are_missing(
    account: Front, checks: Checks, uri: str, detail: str, fix: str
) -> None:
    put("base/model.pth", b"123")
    save(20, place="base", size=4)  # incomplete
    failure = only_failure(checks(f"train.init_from={uri}"), "initial weights")
    assert failure.detail == detail
    assert failure.fix.startswith(fix)


def test_a_run_that_resumes_needs_no_weights(account: Front, checks: Checks) -> None:
    save(20, run="other", place="elsewhere")
    options = (
        f"train.init_from={BASE}/model.pt",
        "checkpoint.resume=s3://cloudtrain-test/elsewhere",
    )
    assert checks(*options)["initial weights"].result is Result.PASS


def test_weights_that_the_role_may_not_read(account: Front, checks: Checks) -> None:
    put("base/model.pt", b"123")
    account.rules["SimulatePrincipalPolicy"] = simulation({"s3:GetObject": "implicitDeny"})
    failure = checks(f"train.init_from={BASE}/model.pt")["permissions"]
    assert failure.result is Result.FAIL
    document = json.loads(shlex.split(failure.fix)[-1])
    resources = [
        each["Resource"] for each in document["Statement"] if each["Action"] == ["s3:GetObject"]
    ]
    assert "arn:aws:s3:::cloudtrain-test/base/model.pt" in resources
