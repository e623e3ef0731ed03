"""All checks of an account together, and the commands that run them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.aws_frontend import Answer, Front, quotas
from support.jobs import EXAMPLES, REPOSITORY, Cli
from support.preflight import ENOUGH, SCRIPT, Checks, budget

import cloudtrain
from cloudtrain.aws.iam_actions import ACTIONS
from cloudtrain.preflight import start_checks
from cloudtrain.support.checks import Check, Result

pytestmark = pytest.mark.aws


@pytest.mark.promise
def test_a_correct_account_passes_every_check(account: Front, checks: Checks) -> None:
    found = checks()
    assert {name: str(each.result) for name, each in found.items()} == dict.fromkeys(
        (
            *(
                "identity",
                "clock",
                "caller",
                "role",
                "trust",
                "permissions",
                "bucket",
                "data.train",
                "volume",
                "checkpoints",
            ),
            *("quota", "job quotas", "image", "network", "budget"),
        ),
        "pass",
    )
    assert "3 objects, 15 B" in found["data.train"].detail
    assert "0 of 8 in use, the job needs 2" in found["quota"].detail
    assert all(not each.fix for each in found.values())


@pytest.mark.promise
def test_checks_change_nothing(account: Front, checks: Checks) -> None:
    account.seen.clear()
    checks()
    assert {
        name
        for name in account.seen
        if not name.startswith(("Get", "List", "Describe", "Simulate", "Batch"))
    } == {
        *("HEAD /cloudtrain-test", "GET /cloudtrain-test"),
    }


def test_all_checks_run_in_parallel(account: Front, checks: Checks) -> None:
    """The first eight requests are answered together. Sequential requests would time out."""
    account.barrier = threading.Barrier(
        8, action=lambda: setattr(account, "barrier", None), timeout=60
    )
    found = checks()
    assert {each.result for each in found.values()} == {Result.PASS}


def test_checks_without_an_answer_in_time_are_unknown(
    account: Front, job: Callable[..., Path], checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    checks()  # moto loads a service at the first request, which takes seconds
    open_again = threading.Event()
    account.rules["DescribeBudgets"] = lambda request: open_again.wait(60) and None
    settings = cloudtrain.setup.find_settings()
    plan = cloudtrain.plan(job(SCRIPT, train_py=""), settings=settings)
    monkeypatch.setattr("cloudtrain.preflight.DEADLINE_SECONDS", 8.0)
    found = {each.name: each for each in start_checks(plan, settings, boto3.Session()).wait()}
    open_again.set()
    assert found["budget"] == Check("budget", Result.UNKNOWN, "did not answer in 8 s", "try again")
    assert {each.result for name, each in found.items() if name != "budget"} == {Result.PASS}


def test_an_unexpected_response_hides_no_other_check(account: Front, checks: Checks) -> None:
    account.respond(
        "DescribeBudgets", Answer.json({"Budgets": [budget(1, 1, BudgetLimit={"Unit": "USD"})]})
    )
    found = checks()
    assert found["budget"].result is Result.UNKNOWN
    assert "a bug in cloudtrain: KeyError" in found["budget"].detail
    assert {each.result for name, each in found.items() if name != "budget"} == {Result.PASS}


def test_an_account_that_cannot_be_reached(
    aws: dict[str, str], checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    found = checks()
    assert {each.result for name, each in found.items() if name != "network"} == {Result.UNKNOWN}
    assert "AWS_ENDPOINT_URL" in found["role"].fix


def test_the_command_prints_each_check_and_its_fix(account: Front, cli: Cli) -> None:
    account.respond(
        "ListServiceQuotas", quotas({**ENOUGH, "ml.p4d.24xlarge for training job usage": 0})
    )
    done = cli("check", EXAMPLES / "digits" / "job.yaml", "--instances", "2")
    assert done.code == 3
    lines = done.out.splitlines()
    assert lines[0].startswith("pass             identity     arn:aws:")
    failure = next(index for index, line in enumerate(lines) if line.startswith("fail"))
    assert lines[failure].split()[1:3] == ["quota", "ml.p4d.24xlarge"]
    assert (
        lines[failure + 1]
        .strip()
        .startswith("fix: aws service-quotas request-service-quota-increase")
    )
    assert lines[-1] == "14 checks: 13 passed, 1 failed"
    as_json = cli("check", EXAMPLES / "digits" / "job.yaml", "--instances", "2", "--json")
    assert as_json.code == 3
    assert [set(each) for each in as_json.json["checks"]] == [
        {"name", "result", "detail", "fix", "warning"}
    ] * 14
    assert {each["result"] for each in as_json.json["checks"]} == {"pass", "fail"}


def test_an_mlflow_server_that_does_not_answer(account: Front, checks: Checks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        found = checks(f"tracking.mlflow={uri}")["tracking"]
    assert (found.result, found.detail) == (Result.PASS, f"{uri} does not answer this machine")
    assert "Connection refused" in found.warning
    assert checks(f"tracking.mlflow={account.url}")["tracking"].warning == ""


def test_unknown_checks_are_no_failure(aws: dict[str, str], cli: Cli) -> None:
    done = cli("check", EXAMPLES / "digits" / "job.yaml")
    assert done.code == 0
    assert "could not check  quota" in done.out


@pytest.mark.promise
def test_submit_refuses_before_anything_is_uploaded(account: Front, cli: Cli) -> None:
    account.respond(
        "ListServiceQuotas", quotas({**ENOUGH, "ml.p4d.24xlarge for training job usage": 0})
    )
    job = EXAMPLES / "digits" / "job.yaml"
    account.seen.clear()
    done = cli("submit", job)
    assert done.code == 3
    assert "quota: ml.p4d.24xlarge for training job usage: 0 in us-west-2" in done.err
    assert "fix: aws service-quotas" in done.err
    assert "--skip-check" in done.err
    assert not [
        name for name in account.seen if name.startswith("PUT ") or name == "CreateTrainingJob"
    ]
    done = cli("submit", job, "--skip-check", environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    assert "CreateTrainingJob" in account.seen


def test_submit_reports_unknown_checks(aws: dict[str, str], cli: Cli) -> None:
    done = cli(
        "submit", EXAMPLES / "digits" / "job.yaml", environ={"CLOUDTRAIN_TRANSPORT": "boto3"}
    )
    assert done.code == 0, done.err
    assert "could not check: caller, permissions, quota, job quotas (why: " in done.err


def test_account_page_names_every_action() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "account.md").read_text()
    for action in ACTIONS.values():
        assert f"`{action}`" in page, action


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({"AWS_PROFILE": "nope"}, 3),
        ({"AWS_SECRET_ACCESS_KEY": ""}, 3),
        ({"AWS_ENDPOINT_URL": "foo"}, 3),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, 3),
    ],
)
def test_broken_configuration_is_reported_without_traceback(
    account: Front, cli: Cli, environ: dict[str, str], code: int
) -> None:
    done = cli("check", EXAMPLES / "digits" / "job.yaml", environ=environ)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert "bug" not in done.out + done.err
