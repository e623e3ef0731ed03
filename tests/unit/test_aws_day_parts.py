"""Parts of `make aws-day`: the budget, the redaction, the table of assumptions and its page."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from aws_day import page, report
from aws_day.account import Account
from aws_day.assumptions import ASSUMPTIONS
from aws_day.budget import Ledger, OverBudgetError
from aws_day.redaction import Redactor
from aws_day.times import Times
from aws_day.trials import TRIALS, chain, differences
from support.jobs import REPOSITORY

from cloudtrain import Settings

SETTINGS = Settings(
    role="arn:aws:iam::210987654321:role/vision-training",
    bucket="acme-training-data",
    region="us-west-2",
    prefix="cloudtrain/aws-day/aws-day-abcdef",
    subnets=("subnet-0a1b2c3d",),
    kms_key="alias/acme-key",
)
CALLER = {
    "Account": "210987654321",
    "Arn": "arn:aws:sts::210987654321:assumed-role/admins/ada.lovelace",
    "UserId": "AROAEXAMPLEEXAMPLE12:ada.lovelace",
}


def result(*answers: dict[str, Any], **fields: Any) -> dict[str, Any]:
    common = {"schema": 1, "service": "AWS", "date": "2026-12-01", "region": "us-west-2"}
    return {**common, "cloudtrain": "0.1.0", "answers": list(answers), "trials": [], **fields}


# ---------------------------------------------------------------- the budget


def test_a_reservation_that_leaves_too_little_is_refused() -> None:
    ledger = Ledger(1.0)
    ledger.reserve("a", 0.7)
    with pytest.raises(
        OverBudgetError, match=r"largest bill is 0.40 USD, and 0.30 of 1.00 USD are left"
    ):
        ledger.reserve("b", 0.4)
    assert ledger.committed_usd == 0.7
    ledger.reserve("c", 0.3)
    assert ledger.left_usd == pytest.approx(0)


def test_a_bill_replaces_its_reservation() -> None:
    ledger = Ledger(1.0)
    ledger.reserve("a", 0.9)
    ledger.settle("a", 0.1)
    ledger.reserve("b", 0.9)
    assert ledger.to_json() == {"budget_usd": 1.0, "reserved_usd": 1.8, "committed_usd": 1.0}
    ledger.release("b")
    assert ledger.committed_usd == pytest.approx(0.1)


def test_a_bill_above_its_reservation_counts_in_full() -> None:
    ledger = Ledger(1.0)
    ledger.reserve("a", 0.1)
    ledger.settle("a", 0.8)
    with pytest.raises(OverBudgetError):
        ledger.reserve("b", 0.3)


def test_reservations_of_threads_never_exceed_the_budget() -> None:
    ledger = Ledger(1.0)
    taken: list[str] = []

    def take(name: str) -> None:
        try:
            ledger.reserve(name, 0.3)
        except OverBudgetError:
            return
        taken.append(name)

    threads = [threading.Thread(target=take, args=(str(number),)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 3


# ---------------------------------------------------------------- the result


def test_no_name_of_the_account_is_in_the_file(tmp_path: Path) -> None:
    values = [
        *(SETTINGS.role, SETTINGS.bucket, "vision-training", "210987654321", "ada.lovelace"),
        *(CALLER["Arn"], CALLER["UserId"], "subnet-0a1b2c3d", "alias/acme-key"),
        *("AKIAIOSFODNN7EXAMPLE", "ip-10-0-3-7.us-west-2.compute.internal", "10.0.3.7"),
        *("ada@example.com", str(Path.home()), "sg-0123456789abcdef0"),
    ]
    text = " and ".join(f"'{value}', s3://{SETTINGS.bucket}/x" for value in values)
    content = result({"key": "a", "observed": [text, {text: text}]}, trials=[{"reason": text}])
    path = tmp_path / "aws-day.json"
    report.write(path, content, report.redactor_of(SETTINGS, CALLER))
    written = path.read_text()
    assert [value for value in values if str(value) in written] == []
    assert "s3://<bucket>/x" in written


def test_redaction_keeps_numbers_statuses_and_types() -> None:
    redactor = report.redactor_of(SETTINGS, CALLER)
    kept = {
        "seconds": 1795979321.123456,
        "stream": "algo-1-1795979321",
        "job": "aws-day-abcdef-complete-261129-185127-b34ada",
        "type": "ml.m5.large",
        "statuses": ["Starting", "MaxRuntimeExceeded"],
        "versions": "2.13.0",
    }
    assert redactor.document(kept) == kept


def test_a_short_user_name_is_replaced_as_a_word_only() -> None:
    redactor = Redactor({"al": "<user>", "root": "<user>"})
    assert redactor.text("al: algo-1 of al at /home/al, root") == (
        "<user>: algo-1 of <user> at /home/<user>, root"
    )


def test_a_user_may_be_called_like_a_trial(tmp_path: Path) -> None:
    answer = {"key": "stop.grace", "trial": "grace", "observed": "of grace", "grace": 6}
    redactor = Redactor({"grace": "<user>"})
    written = report.write(tmp_path / "a.json", {"answers": [answer]}, redactor)
    assert written == {"answers": [{**answer, "observed": "of <user>"}]}


def test_a_result_that_is_not_redacted_is_not_written(tmp_path: Path) -> None:
    class Broken(Redactor):
        def document(self, value: Any) -> Any:
            return value

    path = tmp_path / "aws-day.json"
    with pytest.raises(ValueError, match="still contains <bucket>"):
        report.write(path, {"a": "acme-training-data"}, Broken({"acme-training-data": "<bucket>"}))
    assert not path.exists()


# ---------------------------------------------------------------- the assumptions


def test_each_assumption_has_its_trial_and_a_document() -> None:
    assert len({each.key for each in ASSUMPTIONS}) == len(ASSUMPTIONS)
    assert {each.trial for each in ASSUMPTIONS} == {each.name for each in TRIALS} | {"all"}
    for each in ASSUMPTIONS:
        assert each.document.startswith("https://"), each.key
        assert (REPOSITORY / each.used_in).exists(), each.key
        assert each.expected_with(Times())


@pytest.mark.parametrize("observed", [None, [], {}, "x", -1, True, {"world": "x"}])
def test_an_observation_of_another_form_differs(observed: Any) -> None:
    answers = {each.key: (observed, "") for each in ASSUMPTIONS}
    verdicts = {each["key"]: each["verdict"] for each in report.judge(answers, {}, Times())}
    assert set(verdicts.values()) <= {"holds", "differs"}
    assert verdicts["stop.grace"] == verdicts["statuses.complete"] == "differs"


def test_statuses_may_wait_but_not_change_their_order() -> None:
    def verdict(*statuses: str) -> str:
        found = report.judge({"statuses.complete": (list(statuses), "")}, {}, Times())
        return next(each["verdict"] for each in found if each["key"] == "statuses.complete")

    rest = ("Downloading", "Training", "Uploading", "Completed")
    assert verdict("Starting", *rest) == verdict("Starting", "Pending", *rest) == "holds"
    assert verdict("Starting", "Training", "Downloading", "Uploading", "Completed") == "differs"
    assert verdict("Starting", *rest[:-1]) == "differs"


def test_the_exit_code_counts_differences_and_failures() -> None:
    trial = {"name": "a", "outcome": "failed", "reason": "x"}
    assert report.exit_code(result({"key": "a", "verdict": "holds"})) == 0
    assert report.exit_code(result({"key": "a", "verdict": "not run"})) == 0
    assert report.exit_code(result({"key": "a", "verdict": "differs"})) == 1
    assert report.exit_code(result({"key": "a", "verdict": "no answer"})) == 1
    assert report.exit_code(result({"key": "a", "verdict": "holds"}, trials=[trial])) == 1


def test_a_request_is_compared_with_its_description() -> None:
    sent = {"A": {"B": [1, {"C": "s3://x/y"}]}, "E": False, "Tags": [1]}
    assert differences(sent, {"A": {"B": [1, {"C": "s3://x/y/"}]}, "More": 1}) == []
    assert differences(sent, {"A": {"B": [1, {"C": "s3://x/z"}]}}) == [
        "A.B[1].C: sent 's3://x/y', returned 's3://x/z'"
    ]
    assert differences(sent, {}) == [
        "A: sent {'B': [1, {'C': 's3://x/y'}]}, returned None"
    ]  # fmt: skip


def test_the_chain_depends_on_every_step() -> None:
    assert len({chain(steps) for steps in range(20)}) == 20


def test_only_the_prefix_of_the_day_is_deleted() -> None:
    account = Account(
        Settings(role=SETTINGS.role, bucket="b", region="us-west-2"), "aws-day-abcdef"
    )
    with pytest.raises(ValueError, match="cloudtrain/ is not the prefix of this day"):
        account.clean()


# ---------------------------------------------------------------- the page


def test_the_page_is_the_one_of_this_repository() -> None:
    assert page.PAGE.read_text() == page.page(), "run `PYTHONPATH=tests python -m aws_day.page`"


def test_without_results_the_page_says_that_nobody_has_sent_one(tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert "Nobody has sent a result yet" in text
    for each in ASSUMPTIONS:
        assert f"| `{each.key}` |" in text
    assert text.count("| never |") == len(ASSUMPTIONS)


def test_the_page_shows_the_newest_answer_of_an_account(tmp_path: Path) -> None:
    held = {"key": "stop.grace", "verdict": "holds", "observed": 119.5}
    differed = {"key": "stop.grace", "verdict": "differs", "observed": 30.5}
    (tmp_path / "b.json").write_text(json.dumps(result(held)))
    (tmp_path / "a.json").write_text(json.dumps(result(differed, date="2026-12-24")))
    (tmp_path / "c.json").write_text(json.dumps(result(held, service="sandbox", date="2027-01-01")))
    text = page.page(tmp_path)
    assert "Nobody has sent" not in text
    assert "2 results:" in text
    assert "**differs**: 30.5" in text
    assert "| 2026-12-24 | us-west-2 | 0.1.0 | 0 | 1 | 0 | 0 |" in text


def test_markup_in_a_result_stays_text(tmp_path: Path) -> None:
    answer = {"key": "stop.again", "verdict": "differs", "observed": "<script>|\nx"}
    (tmp_path / "a.json").write_text(json.dumps(result(answer, region="a|b<i>")))
    text = page.page(tmp_path)
    assert "<script>" not in text
    assert "a\\|b&lt;i>" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "a.json: expected a result of `make aws-day`"),
        ("{", "a.json: "),
        ('{"schema": 2}', "with schema 1"),
        (json.dumps(result(date=3)), "date: expected text, got 3"),
        (json.dumps(result(answers="x")), "answers: expected a list"),
        (json.dumps(result({"key": "a", "verdict": "maybe"})), "expected a verdict of holds"),
        (json.dumps(result({"verdict": "holds"})), "expected a key"),
    ],
)
def test_a_malformed_result_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        page.page(tmp_path)
