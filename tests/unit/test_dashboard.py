"""The dashboard's data: thinned curves, records of runs, comparison, access, and the report's embedded data."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.jobs import Cli, until
from support.recorded_runs import step_events, write_run

import cloudtrain.features.dashboard
from cloudtrain.features.dashboard.access import AccessControl
from cloudtrain.features.dashboard.feed import RunFeed
from cloudtrain.features.dashboard.page import live_page, report_page
from cloudtrain.features.dashboard.run_record import RunRecord, run_document, thin_values
from cloudtrain.runs.comparison import Comparison, compare_metrics, settings_of
from cloudtrain.runs.history import MetricHistory, MetricValue
from cloudtrain.runs.log_lines import LogLine
from cloudtrain_runtime.contract import format_event

VENDOR = Path(cloudtrain.features.dashboard.__file__).parent / "static" / "vendor"


def values_of(numbers: list[float | None]) -> list[MetricValue]:
    return [MetricValue(step, float(step), number) for step, number in enumerate(numbers)]


def step(number: int, loss: float | None, host: str = "algo-1") -> LogLine:
    return LogLine(host, format_event("step", {"step": number, "loss": loss}), time=1000.0 + number)


def record_of(*losses: float | None) -> RunRecord:
    record = RunRecord()
    for number, loss in enumerate(losses, 1):
        record.add(step(number, loss))
    return record


def test_deleted_runs_disappear_from_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.features.dashboard.feed._ALL_AGAIN_SECONDS", 0.0)
    home = tmp_path / "runs-home"
    kept, deleted = "demo-261120-101500-1a2b3c", "demo-261120-101500-4d5e6f"
    for run in (kept, deleted):
        write_run(home, run, step_events(1))
    feed = RunFeed()
    until(lambda: len(feed.changes(0)[1]) == 2)
    shutil.rmtree(home / "runs" / deleted)
    until(lambda: feed.changes(0)[2] == [f"local:{deleted}"])
    assert [row["reference"] for row in feed.changes(0)[1]] == [f"local:{kept}"]


@pytest.mark.parametrize(
    ("error", "command"),
    [
        ("ValueError: 3", "cloudtrain submit JOB --local"),
        ("OSError: [Errno 28] No space left on device", None),
    ],
)
def test_a_failed_run_has_the_command_after_the_fix(
    tmp_path: Path, error: str, command: str | None
) -> None:
    """The page offers it in place of a resume, which would start the old code."""
    name = "demo-261120-101500-1a2b3c"
    lines = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', error]
    write_run(tmp_path / "runs-home", name, [], state="FAILED", lines=lines)
    run = cloudtrain.get_run(name)
    document = run_document(run, RunRecord.read(run), run.status(), {})
    assert document["explanation"]["message"] == error
    assert document["explanation"]["submit"] == command


def test_a_spike_of_one_step_survives_thinning() -> None:
    numbers: list[float | None] = [1.0] * 100_000
    numbers[54_321], numbers[76_543], numbers[12_345] = 9.0, -9.0, None
    thinned = thin_values(values_of(numbers), 2_000)
    assert len(thinned) <= 2_000
    assert {each.step for each in thinned} >= {0, 12_345, 54_321, 76_543, 99_999}


@given(
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=300),
    st.integers(5, 60),
)
def test_thinning_keeps_range_order_and_ends(numbers: list[float | None], most: int) -> None:
    values = values_of(numbers)
    thinned = thin_values(values, most)
    assert len(thinned) <= max(most, 5)
    assert [each.step for each in thinned] == sorted({each.step for each in thinned})
    finite = [each.value for each in values if each.value is not None]
    kept = [each.value for each in thinned if each.value is not None]
    assert (min(kept), max(kept)) == (min(finite), max(finite)) if finite else not kept
    assert thinned[:1] == values[:1]
    assert thinned[-1:] == values[-1:]


def test_new_values_are_appended_or_replaced() -> None:
    record, sent = record_of(3.0, 2.0), dict[str, tuple[int, int]]()
    appended, replaced = record.new_values(sent)
    assert (appended, replaced["train/loss"]["values"]) == ({}, [3.0, 2.0])
    record.add(step(3, 1.0))
    appended, replaced = record.new_values(sent)
    assert (appended["train/loss"]["steps"], replaced) == ([3], {})
    assert record.new_values(sent) == ({}, {})


def test_a_restart_replaces_the_curve() -> None:
    record, sent = record_of(3.0, 2.0, 1.0), dict[str, tuple[int, int]]()
    record.new_values(sent)
    record.add(LogLine("algo-1", format_event("started", {"step": 1}), time=2000.0))
    record.add(step(2, 2.5))
    _, replaced = record.new_values(sent)
    assert replaced["train/loss"]["values"] == [3.0, 2.5]


def test_a_value_that_is_not_finite_stays_in_the_curve() -> None:
    assert record_of(1.0, None, 2.0).curves()["train/loss"]["values"] == [1.0, None, 2.0]


def test_a_zoomed_curve_has_the_range_alone() -> None:
    curve = record_of(*map(float, range(1, 101))).curves(first=40, last=60)["train/loss"]
    assert (curve["steps"][0], curve["steps"][-1], len(curve["steps"])) == (40, 60, 21)


def test_lines_after_a_number_are_returned_once() -> None:
    record = RunRecord()
    for text in ("one", "[rank1]: two"):
        record.add(LogLine("algo-2", text, time=5.0))
    lines = record.lines_after(0)
    assert [(line["host"], line["rank"], line["text"]) for line in lines] == [
        ("algo-2", None, "one"),
        ("algo-2", 1, "two"),
    ]
    assert record.lines_after(lines[-1]["number"]) == []


def history_of(**metrics: list[float | None]) -> MetricHistory:
    history = MetricHistory()
    for name, values in metrics.items():
        for number, value in enumerate(values, 1):
            history.add({"event": "evaluation", "split": "validation", "step": number, name: value})
    return history


def test_the_best_value_and_its_run_are_found() -> None:
    loss, accuracy = compare_metrics(
        [
            history_of(loss=[2.0, 1.0, 1.5], accuracy=[0.5, 0.7, 0.6]),
            history_of(loss=[3.0, 1.2], accuracy=[0.9, 0.8]),
        ]
    )
    assert (loss.metric, loss.best, loss.last, loss.winner) == (
        "validation/loss",
        (1.0, 1.2),
        (1.5, 1.2),
        0,
    )
    assert (accuracy.best, accuracy.winner) == ((0.7, 0.9), 1)


def test_a_metric_of_unknown_direction_has_no_winner() -> None:
    (score,) = compare_metrics([history_of(score=[1.0, 2.0]), history_of(score=[3.0])])
    assert (score.best, score.winner) == ((2.0, 3.0), None)


def test_only_settings_that_differ_are_compared() -> None:
    plans = [
        {
            "job": {"train": {"epochs": epochs, "batch_size": 8}},
            "bundle": {"digest": "a"},
            "batch": {"global": 8},
        }
        for epochs in (2, 3)
    ]
    found = Comparison.of(
        ["local:one", "local:two"], [*plans, {}][:2], [MetricHistory(), MetricHistory()]
    )
    assert [(each.path, each.values) for each in found.settings] == [("train.epochs", (2, 3))]
    assert settings_of({}) == {}


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost:9999", "[::1]:80", "LOCALHOST"])
def test_loopback_names_are_accepted_with_any_port(host: str) -> None:
    access = AccessControl("secret")
    assert (
        access.rejection_reason({"host": host, "authorization": "Bearer secret"}, needs_token=True)
        == ""
    )


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"host": "evil.example"}, "not reached as 'evil.example'"),
        ({"host": "127.0.0.1.evil.example:80"}, "not reached as"),
        ({"host": ""}, "not reached as ''"),
        ({"host": "[::1"}, "not reached as"),
        ({"host": "127.0.0.1:8787", "origin": "http://evil.example"}, "other web pages"),
        ({"host": "127.0.0.1:8787", "origin": "http://127.0.0.1:8788"}, "other web pages"),
        ({"host": "127.0.0.1:8787", "origin": "null"}, "other web pages"),
        ({"host": "127.0.0.1:8787", "origin": "http://["}, "other web pages"),
        ({"host": "127.0.0.1:8787", "origin": "http://127.0.0.1:8787/x"}, "other web pages"),
        ({"host": "127.0.0.1:8787", "sec-fetch-site": "cross-site"}, "other web pages"),
        ({"host": "127.0.0.1:8787", "authorization": ""}, "token is missing or wrong"),
        ({"host": "127.0.0.1:8787", "authorization": "Bearer Secret"}, "token is missing or wrong"),
    ],
)
def test_foreign_requests_are_rejected(headers: dict[str, str], reason: str) -> None:
    given = {"authorization": "Bearer secret", **headers}
    assert reason in AccessControl("secret").rejection_reason(given, needs_token=True)


def test_a_proxys_name_is_accepted_when_allowed() -> None:
    access = AccessControl("secret", ["hub.example"])
    headers = {
        "host": "hub.example",
        "origin": "https://hub.example",
        "authorization": "Bearer secret",
    }
    assert access.rejection_reason(headers, needs_token=True) == ""


def test_embedded_data_cannot_end_its_element() -> None:
    attack = "</script><script>alert(1)</script><!--"
    page = report_page("a <title>", {"text": attack})
    assert attack not in page
    assert "a &lt;title&gt;" in page
    embedded = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1]) == {"text": attack}


def test_pages_load_nothing_from_elsewhere() -> None:
    for page in (live_page(), report_page("title", {})):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]+)"', page)
        assert not [each for each in loaded if "//" in each]
        assert "url(" not in page


def test_vendored_files_have_the_recorded_checksums() -> None:
    recorded = dict(
        re.findall(r"^([0-9a-f]{64})  (\S+)$", (VENDOR / "README.md").read_text(), re.MULTILINE)
    )
    files = [path for path in VENDOR.iterdir() if path.name != "README.md"]
    assert {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in files} == recorded


def test_a_report_is_written_into_a_new_folder(cli: Cli, tmp_path: Path) -> None:
    run = "digits-261120-101500-000001"
    write_run(tmp_path / "home", run, step_events(3))
    environ = {"CLOUDTRAIN_HOME": str(tmp_path / "home")}
    path = tmp_path / "new" / "report.html"
    done = cli("report", run, "-o", path, "--json", environ=environ)
    assert done.json == {"path": str(path), "bytes": path.stat().st_size}
    refused = cli("report", run, "-o", path / "below.html", environ=environ)
    assert refused.code == 2
    assert "below.html: cannot be written: " in refused.err
    assert "choose another file" in refused.err
