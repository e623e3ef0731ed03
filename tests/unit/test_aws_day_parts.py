"""Parts of `make aws-day`: the budget, the redaction, the table of assumptions and its page."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from aws_day import dry_run, page, report
from aws_day.__main__ import main
from aws_day.account import Account
from aws_day.assumptions import ASSUMPTIONS, BASES, INFERRED
from aws_day.budget import Ledger, OverBudgetError
from aws_day.options import TRIAL_NAMES, MistakesError, read_options
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


ROLE = "arn:aws:iam::123456789012:role/training"
RIGHT = {"role": ROLE, "bucket": "my-bucket", "region": "us-west-2", "budget": "10"}


def words_of(**changed: str) -> list[str]:
    """Return the options as `make aws-day` gives them."""
    given = {**RIGHT, **changed}
    return [
        word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)
    ]


def mistakes_of(environ: dict[str, str] | None = None, **changed: str) -> tuple[str, ...]:
    with pytest.raises(MistakesError) as caught:
        read_options(words_of(**changed), environ or {})
    return caught.value.mistakes


# ---------------------------------------------------------------- the options


def test_right_options_are_read() -> None:
    options = read_options([*words_of(trials="failure, warm pool"), "--dry-run"], {})
    assert (options.budget, options.at_once, options.is_dry_run) == (10.0, 3, True)
    assert options.trials == ("failure", "warm pool")
    assert {each.name for each in TRIALS} == set(TRIAL_NAMES)


def test_all_wrong_options_are_named_in_the_words_of_make() -> None:
    empty = mistakes_of(role="", bucket="", region="", budget="", at_once="")
    assert [each.partition(":")[0] for each in empty] == [
        *("ROLE", "BUCKET", "REGION", "BUDGET", "AT_ONCE")
    ]
    assert empty[2] == (
        "REGION: your environment names no region: give one, such as REGION=us-west-2"
    )
    assert empty[3] == "BUDGET: expected dollars above 0, such as BUDGET=10, got ''"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("role", "training", 'ROLE=training: "training" is no ARN of a role'),
        ("bucket", "My_B", "BUCKET=My_B: expected a bucket name of 3 to 63"),
        ("region", "us-wst-2", 'REGION=us-wst-2: .*; did you mean "us-west-2"'),
        ("region", "cn-north-1", "ROLE=.*: a role of aws does not work in cn-north-1"),
        ("budget", "0", r"BUDGET: .*, got '0'. make reads \$10 as 0: write 10 without a dollar"),
        ("budget", "nan", "BUDGET: expected dollars above 0, such as BUDGET=10, got 'nan'"),
        ("trials", "failur", "TRIALS=failur: there is no trial 'failur'; did you mean \"failure\""),
        ("trials", ",", "TRIALS: expected names of trials"),
        (
            "at_once",
            "0",
            "AT_ONCE: expected a whole number of 1 or more, such as AT_ONCE=3, got '0'",
        ),
        ("at_once", "1.5", "AT_ONCE: "),
    ],
)
def test_a_wrong_option_is_one_line(name: str, value: str, message: str) -> None:
    (mistake,) = mistakes_of(**{name: value})
    assert re.match(message, mistake), mistake
    assert "\n" not in mistake


def test_the_environment_may_name_the_region() -> None:
    environ = {"AWS_REGION": "eu-west-1"}
    assert read_options(words_of(region=""), environ).region == ""
    (mistake,) = mistakes_of({"AWS_REGION": "eu-wst-1"}, region="")
    assert 'did you mean "eu-west-1"' in mistake


def test_options_are_checked_with_the_standard_library() -> None:
    sources = os.pathsep.join(str(REPOSITORY / each) for each in ("tests", "sdk", "entrypoints"))
    done = subprocess.run(
        # No installed package is found without `site`.
        [sys.executable, "-S", "-B", "-m", "aws_day.options", *words_of(budget="0", at_once="x")],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("aws-day: ") == done.stderr.count("\n") == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_complains_before_it_installs(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "aws-day", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", "BUDGET=$10"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "aws-day: ROLE: expected the ARN of the execution role" in done.stderr
    assert "write 10 without a dollar sign" in done.stderr
    assert not (tmp_path / "venv").exists()


# ---------------------------------------------------------------- the dry run


def test_a_dry_run_ends_with_the_bill_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [*words_of(out=str(out), trials="failure,warm pool"), "--dry-run"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    requests = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(requests) == 3
    table = lines.index("trial          starts  largest bill")
    assert not any(line.startswith("{") for line in lines[table:])
    assert lines[table + 2].startswith("warm pool           2 ")
    assert not out.exists()


def test_a_budget_that_fits_no_trial_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(out=str(tmp_path / "out"), trials="failure,gpu", budget="0.01")
    assert main([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "aws-day: no trial can run: BUDGET=0.01 is too small: the cheapest trial needs BUDGET=0.03\n"
    )


def test_no_plan_at_all_is_an_error() -> None:
    reason = dry_run.why_nothing_runs([], {"gpu": "no plan: no image\n  of it"}, 10)
    assert reason == "no trial can run: gpu: no plan: no image of it"


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


def test_a_prefix_of_your_own_is_replaced() -> None:
    settings = dataclasses.replace(SETTINGS, prefix="team-vision/aws-day/aws-day-abcdef")
    redactor = report.redactor_of(settings, CALLER)
    assert redactor.text("s3://b/team-vision/aws-day/a") == "s3://b/<prefix>/aws-day/a"


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
        assert each.basis in BASES, each.key
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


def test_the_page_says_what_each_assumption_rests_on() -> None:
    text = page.page()
    for name, meaning in BASES.items():
        assert f"- **{name}** (" in text
        assert meaning in text
    # AWS's page of the log streams names no time.
    delay = next(each for each in ASSUMPTIONS if each.key == "logs.delay")
    assert delay.basis == INFERRED
    assert "| at most 15 s | inferred |" in text


def test_the_guide_names_the_starts_of_each_trial() -> None:
    text = (REPOSITORY / "docs/how-to/aws-day.md").read_text()
    for trial in TRIALS:
        starts = sum(trial.starts.get(name, 1) for name in trial.jobs(Times()))
        assert re.search(rf"^\| `{trial.name}` \| [^|]+ \| {starts} \|", text, re.MULTILINE), trial


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
