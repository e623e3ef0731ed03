"""Values of a status read the same on every screen: commands, notebooks and the dashboard."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from support.run_statuses import (
    FAILED,
    INTERRUPTED,
    PENDING,
    RESUMED,
    STOPPED,
    TRAINING,
    at,
    steps,
)

import cloudtrain
from cloudtrain.console.panel import Panel
from cloudtrain.console.runs import print_runs, status_rows
from cloudtrain.console.status_fields import device_row
from cloudtrain.features.dashboard.run_record import run_row
from cloudtrain.runs.notebook_list import RunList
from cloudtrain.runs.progress import fold_events
from cloudtrain.runs.shown_metrics import describe_metric
from cloudtrain.runs.status import (
    State,
    Status,
    describe_checkpoint,
    describe_cost,
    describe_progress,
    describe_state,
    describe_steps,
    shown_reason,
    summarize_status,
)
from cloudtrain.support.units import format_duration, format_size, format_usd

NOW = at(1400).timestamp()
STATIC = Path(cloudtrain.__file__).parent / "features" / "dashboard" / "static"

SLOW = fold_events([*steps(0, 610, began=175, total=10**12)])
STATUSES = {
    "pending": PENDING,
    "training": TRAINING,
    "interrupted": INTERRUPTED,
    "resumed": RESUMED,
    "stopped": STOPPED,
    "failed": FAILED,
    "succeeded": dataclasses.replace(STOPPED, state=State.SUCCEEDED, reason="Training completed"),
    "spot": dataclasses.replace(TRAINING, is_spot=True),
    "costly": dataclasses.replace(TRAINING, cost_usd=1234.5),
    "without a price": dataclasses.replace(TRAINING, cost_usd=None, usd_per_hour=None),
    "without a total": dataclasses.replace(
        TRAINING, progress=fold_events(steps(0, 610, began=175, total=None))
    ),
    "for years": dataclasses.replace(TRAINING, progress=SLOW),
    "local": Status("x", "local", State.RUNNING, cost_usd=0.0, started=at(0)),
}


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: NOW)


@pytest.fixture(params=STATUSES)
def status(request: pytest.FixtureRequest) -> Status:
    return STATUSES[request.param]


@pytest.fixture
def screens(status: Status, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each screen shows of the status."""
    panel = Panel(status, NOW, clock=lambda: NOW)
    lines = panel.lines(1000, console=Console(file=io.StringIO(), width=1000))
    print_runs([status], is_filtered=False)
    return {
        "status": "\n".join(f"{name} {text}" for name, text in status_rows(status, NOW)),
        "follow": "\n".join(line.plain for line in lines),
        "list": capsys.readouterr().out,
        "notebook": summarize_status(status, NOW).to_text(),
        "table": html.unescape(RunList([status])._repr_html_()),
        "page": "\n".join(run_row(status, None)["texts"].values()),
    }


def test_every_screen_shows_the_same_reason(status: Status, screens: dict[str, str]) -> None:
    reason = shown_reason(status)
    shown = ["status", "list", "notebook", "page"]
    shown += [] if status.state is State.SUCCEEDED else ["follow"]
    assert {name: reason in screens[name] for name in shown} == dict.fromkeys(shown, True)
    assert describe_state(status) in screens["status"]
    assert describe_state(status) in screens["notebook"]
    if not reason and status.reason:
        assert [name for name, text in screens.items() if status.reason in text] == []


def test_every_screen_shows_the_same_progress(status: Status, screens: dict[str, str]) -> None:
    progress = describe_progress(status, NOW)
    shown = ["status", "follow", "notebook"]
    shown += [] if shown_reason(status) else ["list"]
    assert {name: progress in screens[name] for name in shown} == dict.fromkeys(shown, True)
    texts = run_row(status, None)["texts"]
    assert progress == ", ".join(filter(None, (texts["steps"], texts["left"] if progress else "")))


def test_every_screen_shows_the_same_cost(status: Status, screens: dict[str, str]) -> None:
    cost = describe_cost(status, status.cost_usd)
    shown = ["status", "follow", "notebook", "table", "page"]
    assert {name: cost in screens[name] for name in shown} == dict.fromkeys(shown, True)
    if not cost:
        assert [name for name, text in screens.items() if "USD" in text] == []


def test_every_screen_shows_the_same_checkpoint(status: Status, screens: dict[str, str]) -> None:
    checkpoint = describe_checkpoint(status, NOW)
    shown = ["status", "follow", "notebook"]
    assert {name: checkpoint in screens[name] for name in shown} == dict.fromkeys(shown, True)


def test_the_texts_of_the_corpus() -> None:
    found = {name: describe_cost(each, each.cost_usd) for name, each in STATUSES.items()}
    assert found["spot"] == "at most 17.75 USD"
    assert found["costly"] == "1,234.50 USD"
    assert found["without a price"] == "price unknown"
    assert found["pending"] == "0.00 USD"
    assert found["local"] == ""
    assert describe_steps(STATUSES["without a total"]) == "step 610, 1 epoch"
    assert describe_progress(STATUSES["for years"], NOW).endswith(" steps, more than a year left")
    assert shown_reason(STATUSES["interrupted"]) == "Training job waiting for capacity"
    assert shown_reason(TRAINING) == ""


def test_memory_is_shown_as_every_size() -> None:
    progress = fold_events([{"event": "step", "step": 1, "memory_bytes": 500_000_000}])
    row = device_row(dataclasses.replace(TRAINING, progress=progress))
    assert row == ("device", f"{format_size(500_000_000)} of memory per rank at most")


NUMBERS = [
    0,
    1,
    0.5,
    -2.5,
    12.3456,
    999.96,
    1234.5678,
    12346,
    99999.6,
    1e6,
    0.0001234,
    1.234567e-5,
    1e-30,
]
SECONDS = [-5, 0, 1, 59.6, 60, 61, 3599, 3600, 3661, 86399, 86400, 90061, 172805, 1e7]
BYTES = [0, 1, 999, 1000, 1840, 999_940, 1_000_000, 5e8, 1.84e9, 2e12, 3.4e15]
USD = [0, 0.01, 17.75, 999.99, 1234.5, 12345.678, 1234567.891]


def test_the_page_formats_like_the_commands() -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = (
        (STATIC / "format.js").read_text()
        + f"""
console.log(JSON.stringify({{
  metrics: {json.dumps(NUMBERS)}.map((each) => describeMetric(each)),
  durations: {json.dumps(SECONDS)}.map(formatDuration),
  sizes: {json.dumps(BYTES)}.map(formatBytes),
  money: {json.dumps(USD)}.map(formatUsd),
  missing: [describeMetric(null), formatUsd(null), formatDuration(null)],
}}));"""
    )
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "metrics": [describe_metric(each) for each in NUMBERS],
        "durations": [format_duration(each) for each in SECONDS],
        "sizes": [format_size(each) for each in BYTES],
        "money": [format_usd(each) for each in USD],
        "missing": ["not finite", "price unknown", ""],
    }
