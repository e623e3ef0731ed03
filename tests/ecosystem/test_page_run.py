"""The page of one run in a real browser: tabs, head, log, words."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dashboard_tabs import (
    WAIT_MILLISECONDS,
    Served,
    Tab,
    end_dashboard,
    open_tab,
    start_dashboard,
)
from support.jobs import Cli
from support.recorded_runs import BEGIN, step_events, write_run

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="Chromium is not installed (make test-all)"
)

TABS = ("overview", "charts", "system", "timeline", "checkpoints", "plan", "log")
GOOD = "digits-261120-101500-000001"
FAILED = "other-261120-121500-000003"
SCRIPT = "script-261120-131500-000004"
MESSAGE = "ValueError: shapes [32, 10] and [32, 11] do not fit"
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/ml/code/train.py", line 11, in <module>',
    '    raise ValueError("shapes")',
    MESSAGE,
)
VISIBLE_WORDS = """() => {
  const main = document.querySelector("main").cloneNode(true), words = [];
  for (const node of main.querySelectorAll("code, pre, .line-text, [hidden]")) node.remove();
  const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) words.push(walker.currentNode.data);
  return words.join("\\n");
}"""


def moment(seconds: float) -> float:
    return BEGIN.timestamp() + seconds


def environment(host: str) -> dict[str, Any]:
    return {
        "event": "environment",
        "host": host,
        "python": "3.11.7",
        "gpus": ["NVIDIA H200"],
        "driver": "570.133.20",
        "cuda": "12.8",
        "shm_bytes": 25_276_502_016,
        "disk_free_bytes": 81_867_329_536,
        "memory_bytes": 25_276_502_016,
        "packages": {"torch": "2.13.0"},
        "warnings": [],
        "time": moment(0.5),
    }


def speed_events(count: int) -> list[dict[str, Any]]:
    """Return steps with their speed, memory and parts."""
    events = step_events(count)
    for event in events[1:]:
        event |= {
            "samples_per_second": 2696.12,
            "data_wait": 0.031,
            "memory_bytes": 411_700_000,
            "learning_rate": 0.00123456789,
            "grad_norm": 1.25,
            "split": {"data": 0.001, "forward": 0.004, "backward": 0.009, "optimizer": 0.002},
        }
    return events


def checkpoint(step: int, seconds: float) -> dict[str, Any]:
    return {
        "event": "checkpoint",
        "uri": f"file:///c/step-{step}",
        "step": step,
        "time": moment(seconds),
        "bytes": 25_276_502_016,
        "seconds": 0.246,
        "stall_seconds": 0.05,
    }


def good_events() -> list[dict[str, Any]]:
    evaluations = [
        {
            "event": "evaluation",
            "split": "validation",
            "step": step,
            "samples": 10,
            "loss": 2 / step,
            "accuracy": 0.9,
            "time": moment(1 + step / 100),
        }
        for step in (40, 80, 100)
    ]
    classes = [
        {"name": name, "support": 5, "precision": 0.8, "recall": 0.8, "f1": 0.8}
        for name in ("cat", "dog")
    ]
    return [
        environment("algo-1"),
        *speed_events(100),
        *evaluations,
        checkpoint(50, 0.6),
        checkpoint(100, 1.2),
        {
            "event": "checkpoint_damaged",
            "step": 50,
            "uri": "file:///c/step-50",
            "detail": "model.pt ends early",
            "time": moment(1.3),
        },
        {
            "event": "analysis",
            "split": "test",
            "samples": 10,
            "classes": classes,
            "confusion": [[4, 1], [1, 4]],
        },
        {"event": "finished", "step": 100, "seconds": 1.0, "time": moment(2)},
    ]


def failed_events() -> list[dict[str, Any]]:
    slow = {"event": "straggler", "rank": 1, "host": "algo-2", "ratio": 2.5, "part": "backward"}
    failed = {
        "event": "failed",
        "rank": 1,
        "host": "algo-1",
        "local_rank": 1,
        "message": f"rank 1 on algo-1 (local rank 1) failed: {MESSAGE}",
        "exit_code": 1,
        "failed_at": moment(3),
        "secondary": False,
        "time": moment(3),
    }
    return [environment("algo-1"), *speed_events(10), {**slow, "time": moment(2)}, failed]


def failed_lines() -> list[str]:
    ranks = [f"[rank{rank}]: {text}" for text in TRACEBACK for rank in (0, 1)]
    repeated = ["[rank0]: WARNING: the loader waited"] * 12
    return ["hello from a script", *repeated, *ranks]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run that has succeeded, one that has failed, and one of a script without metrics."""
    place = tmp_path_factory.mktemp("pages") / "home"
    job = {
        "train": {"epochs": 2, "learning_rate": 0.00123456789, "batch_size": 16},
        "limits": {"runtime": "3600s"},
        "tags": {"team": "vision"},
    }
    write_run(place, GOOD, good_events(), job=job, lines=["hello from a script"], diff="+one\n-two")
    reason = f"rank 1 on algo-1 (local rank 1) failed: {MESSAGE}"
    write_run(
        place, FAILED, failed_events(), state="FAILED", reason=reason, job=job, lines=failed_lines()
    )
    printed = [f"step {step} loss={1 / step:.4f}" for step in range(1, 6)]
    write_run(place, SCRIPT, [], lines=printed)
    return place


@pytest.fixture(scope="module")
def served(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = start_dashboard(home, tmp_path_factory.mktemp("user"))
    yield found
    end_dashboard(found.process)


Opener = Callable[..., Tab]


@pytest.fixture
def open_run(browser: Any, served: Served) -> Iterator[Opener]:
    """Return a function that opens a tab of a run's page. At the end no page may have reported an error."""
    opened: list[tuple[Any, Tab]] = []

    def open_it(run: str, tab: str = "overview", width: int = 1280, scheme: str = "light") -> Tab:
        context, found = open_tab(browser, width, 900, scheme)
        opened.append((context, found))
        found.open(served.url)
        show(found, served, run, tab)
        return found

    yield open_it
    for context, each in opened:
        context.close()
        assert each.errors == []


def show(found: Tab, served: Served, run: str, tab: str) -> None:
    """Open a tab, and wait until its content has arrived."""
    found.page.goto(served.address(f"/run/local:{run}" + ("" if tab == "overview" else f"/{tab}")))
    content = {
        "overview": "#ledger-section .parts-bar",
        "charts": "#panel-charts :is(figure.chart, .state):visible",
        "system": "#panel-system :is(figure.chart, .state):visible",
        "timeline": ".track .part",
        "checkpoints": "#panel-checkpoints :is(table, .state):visible",
        "plan": "#settings-section table",
        "log": ".log .line",
    }[tab]
    found.page.wait_for_selector(content, timeout=WAIT_MILLISECONDS)


def shown_panels(found: Tab) -> list[str]:
    return list(
        found.page.locator("[role=tabpanel]:visible").evaluate_all(
            "all => all.map((each) => each.id)"
        )
    )


def test_tabs_have_addresses_and_back_returns(open_run: Opener) -> None:
    found = open_run(GOOD)
    page = found.page
    assert shown_panels(found) == ["panel-overview"]
    assert page.locator("#tab-overview").get_attribute("aria-selected") == "true"
    for name in TABS[1:]:
        page.click(f"#tab-{name}")
        assert page.url.endswith(f"/{name}")
        assert shown_panels(found) == [f"panel-{name}"]
    page.go_back()
    page.wait_for_selector("#panel-plan:visible", timeout=WAIT_MILLISECONDS)
    assert shown_panels(found) == ["panel-plan"]
    page.reload()
    page.wait_for_selector("#panel-plan:visible", timeout=WAIT_MILLISECONDS)
    assert page.locator("[role=tab][tabindex='0']").all_inner_texts() == ["Plan"]


def test_keys_move_between_tabs(open_run: Opener) -> None:
    found = open_run(GOOD)
    found.page.focus("#tab-overview")
    for key, name in [
        ("ArrowRight", "charts"),
        ("End", "log"),
        ("ArrowRight", "overview"),
        ("ArrowLeft", "log"),
        ("Home", "overview"),
    ]:
        found.page.keyboard.press(key)
        found.page.wait_for_selector(f"#panel-{name}:visible", timeout=WAIT_MILLISECONDS)
        assert found.page.evaluate("document.activeElement.id") == f"tab-{name}"


def test_only_the_shown_tab_is_drawn(open_run: Opener) -> None:
    found = open_run(GOOD, "plan")
    is_empty = "name => !document.querySelector(`#panel-${name} :is(table, figure, .track, .line)`)"
    hidden = [name for name in TABS if name != "plan"]
    found.page.evaluate("cloudtrain.view.receive({lines: [], events: []})")
    assert [name for name in hidden if not found.page.evaluate(is_empty, name)] == []
    found.page.click("#tab-timeline")
    assert not found.page.evaluate(is_empty, "timeline")


def test_the_head_has_the_facts_of_a_run(open_run: Opener) -> None:
    found = open_run(GOOD)
    head = found.page.locator(".run-head")
    assert head.locator("h1").inner_text().split() == ["digits", "000001", "SUCCEEDED"]
    assert head.locator("h1 .id").get_attribute("title") == f"local:{GOOD}"
    text = head.inner_text()
    assert "Duration\n30m" in text
    assert re.search(r"Effective training\n(<1|\d+)%", text)
    assert "Validation loss\n0.02" in text
    assert (
        head.locator(".run-key-value").evaluate("node => getComputedStyle(node).fontSize") == "28px"
    )
    assert head.locator("svg.head-curve").get_attribute("aria-label") == "Course of validation loss"
    age = head.locator("dd span").first
    assert age.get_attribute("title") == "2026-11-20 10:15:00 UTC"


def test_a_failure_leads_to_its_line_in_the_log(open_run: Opener) -> None:
    found = open_run(FAILED)
    notice = found.page.locator(".notice")
    assert notice.locator("h2").inner_text() == "Why it failed: an error in the job's code"
    assert MESSAGE in notice.locator(".message").inner_text()
    assert "What to do: Fix train.py:11." in notice.inner_text()
    notice.get_by_role("button", name="Jump to it in the log").click()
    assert found.page.url.endswith("/log")
    target = found.page.locator(".line.target")
    assert MESSAGE in target.inner_text()
    is_seen = """node => {
      const [own, box] = [node, node.parentNode].map((each) => each.getBoundingClientRect());
      return own.top >= box.top && own.bottom <= box.bottom;
    }"""
    assert target.evaluate(is_seen)


def test_a_log_folds_and_names_levels_and_ranks(open_run: Opener) -> None:
    found = open_run(FAILED, "log")
    lines = found.page.locator(".log .line")
    waited = lines.filter(has_text="the loader waited")
    assert waited.count() == 1
    assert waited.locator(".times").inner_text().strip() == "x 12"
    assert waited.get_attribute("class").split() == ["line", "warning"]
    raised = lines.filter(has_text=MESSAGE).first
    assert raised.locator(".line-source").inner_text() == "ranks 0, 1"
    # The whole traceback of two ranks is shown once, and its first line says what it is.
    assert lines.filter(has_text=TRACEBACK[1]).count() == 1
    assert lines.filter(has_text=TRACEBACK[0]).locator(".level").inner_text().strip() == "error"
    assert "rank 1 on algo-2 is slow: 2.50 x the median" in found.page.inner_text(".log")
    assert "{" not in found.page.inner_text(".log")


def test_a_log_is_searched_and_filtered(open_run: Opener) -> None:
    found = open_run(FAILED, "log")
    page = found.page
    page.get_by_label("search").fill("loader")
    assert page.locator(".log mark").all_inner_texts() == ["loader"]
    assert "12 of 12 lines" in page.inner_text("#log-section")
    page.get_by_label("search").fill("nothing like this")
    assert "no line matches" in page.inner_text("#log-section")
    page.get_by_label("search").fill("")
    page.get_by_label("level").select_option("error")
    assert page.locator(".log .line:not(.error)").count() == 0
    assert page.locator(".log .line.error").count() >= 4
    page.get_by_label("level").select_option("")
    page.get_by_label("rank").select_option("1")
    assert "hello" not in page.inner_text(".log")


def test_new_lines_are_added_to_a_log(open_run: Opener) -> None:
    found = open_run(FAILED, "log")
    add = """texts => cloudtrain.view.receive({events: [], lines: texts.map((text, index) => (
      {number: 900 + index, host: "algo-1", rank: 0, time: null, text}))})"""
    before = found.page.locator(".log .line").count()
    found.page.evaluate(add, ["new", "new", "newer"])
    assert found.page.locator(".log .line").count() == before + 2
    assert "new x 2" in found.page.locator(".log .line").nth(before).inner_text()


@pytest.mark.parametrize("run", [GOOD, FAILED, SCRIPT])
def test_no_tab_shows_the_names_of_fields(open_run: Opener, served: Served, run: str) -> None:
    found = open_run(run)
    for tab in TABS:
        show(found, served, run, tab)
        text = found.page.evaluate(VISIBLE_WORDS)
        # Paths of settings and commands are in `code`, and what the job prints is in the log.
        assert re.findall(r"[a-z]+_[a-z]+\S*", text) == [], tab
        assert re.findall(r"\d\.0*[1-9]\d{4,}|e\+9|\b3600s", text) == [], tab


def test_values_have_the_terminals_format(open_run: Opener, served: Served) -> None:
    found = open_run(GOOD, "plan")
    plan = found.page.inner_text("#panel-plan")
    assert re.search(r"limits\.runtime\s+1h", plan)
    assert re.search(r"train\.learning_rate\s+0\.001235", plan)
    assert [each.inner_text() for each in found.page.locator("#settings-section h3").all()] == [
        *("Job", "Code", "Training", "Limits", "Tags")
    ]
    show(found, served, GOOD, "system")
    system = found.page.inner_text("#panel-system")
    for label, value in [
        ("Shared memory", "25.3 GB"),
        ("Free disk", "81.9 GB"),
        ("Python", "3.11.7"),
    ]:
        assert re.search(rf"{label}\s+{re.escape(value)}", system)
    assert "1 x NVIDIA H200" in system


def test_the_parts_of_a_step_are_one_chart(open_run: Opener) -> None:
    found = open_run(GOOD, "system")
    titles = [each.split("\n")[0] for each in found.page.locator("figcaption").all_inner_texts()]
    assert titles.count("Parts of a step") == 1
    assert not {"Data", "Forward", "Backward", "Optimizer"} & set(titles)
    assert "Peak memory" in titles


def test_checkpoints_have_size_share_and_damage(open_run: Opener) -> None:
    found = open_run(GOOD, "checkpoints")
    rows = found.page.locator("#panel-checkpoints tbody tr")
    newest, damaged = rows.nth(0).inner_text(), rows.nth(1).inner_text()
    for text in ("100", "complete", "25.3 GB", "246 ms", "50 ms", "8%", "file:///c/step-100"):
        assert text in newest
    assert "✕ damaged model.pt ends early" in damaged


def test_a_timeline_names_the_bad_host(open_run: Opener) -> None:
    found = open_run(FAILED, "timeline")
    lane = found.page.locator(".lane", has_text="Slow ranks")
    assert lane.locator(".mark-name").inner_text() == "rank 1, algo-2"
    assert found.page.locator(".tick").first.inner_text() == "0"
    assert found.page.locator(".tick").count() >= 2
    assert "rank 1, algo-1" in found.page.locator(".lane", has_text="Failures").inner_text()


def test_the_confusion_matrix_is_a_picture(open_run: Opener) -> None:
    found = open_run(GOOD)
    cells = found.page.locator(".matrix .cell")
    assert cells.all_inner_texts() == ["4", "1", "1", "4"]
    assert cells.first.get_attribute("title") == "cat predicted as cat: 4"
    colour = "node => getComputedStyle(node).backgroundColor"
    assert cells.nth(0).evaluate(colour) != cells.nth(1).evaluate(colour)
    assert "8 of 10 right" in found.page.inner_text("#classes-section")


def test_a_run_without_metrics_gets_patterns(open_run: Opener) -> None:
    found = open_run(SCRIPT, "charts")
    assert "No metrics so far." in found.page.inner_text("#panel-charts")
    assert r"metrics: {step: '\bstep\W+?(\d+)', loss: " in found.page.inner_text(
        "#panel-charts pre"
    )


def test_printing_shows_all_tabs_in_one_column(open_run: Opener) -> None:
    found = open_run(GOOD, "log")
    found.page.emulate_media(media="print")
    found.page.wait_for_selector("#panel-overview:visible", timeout=WAIT_MILLISECONDS)
    assert shown_panels(found) == [f"panel-{name}" for name in TABS]
    edges = found.page.locator("[role=tabpanel]").evaluate_all(
        "all => all.map((each) => each.getBoundingClientRect()).map(({left, top, bottom}) => [left, top, bottom])"
    )
    assert len({left for left, _, _ in edges}) == 1
    assert all(above[2] <= below[1] for above, below in itertools.pairwise(edges))
    assert found.page.locator("#panel-timeline .track").count() > 0
    found.page.emulate_media(media="screen")
    found.page.wait_for_selector("#panel-overview", state="hidden", timeout=WAIT_MILLISECONDS)
    assert shown_panels(found) == ["panel-log"]


@pytest.mark.parametrize("run", [GOOD, FAILED])
@pytest.mark.parametrize(
    ("width", "scheme"), [(375, "dark"), (375, "light"), (1280, "dark"), (2560, "light")]
)
def test_tabs_fit_and_are_accessible(
    open_run: Opener, served: Served, run: str, width: int, scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="install it: make test-all"
    ).Axe()
    found = open_run(run, width=width, scheme=scheme)
    for tab in TABS:
        show(found, served, run, tab)
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width, tab
        violations = axe.run(found.page).response["violations"]
        assert [
            (each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in violations
        ] == [], tab


def test_a_report_has_the_same_tabs(browser: Any, home: Path, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    cli("report", FAILED, "-o", str(path), environ={"CLOUDTRAIN_HOME": str(home)})
    context, found = open_tab(browser, 1280, 900, "light")
    found.open(path.as_uri())
    assert found.page.locator(".actions").count() == 0
    found.page.click("#tab-log")
    assert "hello from a script" in found.page.inner_text(".log")
    found.page.get_by_role("button", name="Jump to it in the log").click()
    assert MESSAGE in found.page.inner_text(".line.target")
    context.close()
    assert found.errors == []
