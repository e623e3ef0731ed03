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
    Served,
    Tab,
    end_dashboard,
    expect,
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
ENDS = {GOOD: "finished", FAILED: "failed", SCRIPT: "step 5 loss=0.2000"}
"""What the log of each run ends with."""
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
    """Open a tab, and wait until all of its content has arrived."""
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
    found.wait_read(run, ENDS[run])
    found.page.wait_for_selector(content)


def expect_panels(found: Tab, *names: str) -> None:
    """Expect that exactly these tabs have their content shown."""
    panels = found.page.locator("[role=tabpanel]:visible")
    expect(panels).to_have_count(len(names))
    for place, name in enumerate(names):
        expect(panels.nth(place)).to_have_id(f"panel-{name}")


def test_tabs_have_addresses_and_back_returns(open_run: Opener) -> None:
    found = open_run(GOOD)
    page = found.page
    expect_panels(found, "overview")
    expect(page.locator("#tab-overview")).to_have_attribute("aria-selected", "true")
    for name in TABS[1:]:
        page.click(f"#tab-{name}")
        expect(page).to_have_url(re.compile(f"/{name}$"))
        expect_panels(found, name)
    page.go_back()
    expect_panels(found, "plan")
    page.reload()
    expect_panels(found, "plan")
    expect(page.locator("[role=tab][tabindex='0']")).to_have_text(["Plan"])


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
        expect_panels(found, name)
        expect(found.page.locator(f"#tab-{name}")).to_be_focused()


def test_only_the_shown_tab_is_drawn(open_run: Opener) -> None:
    found = open_run(GOOD, "plan")
    content = ":is(table, figure, .track, .line)"
    found.page.evaluate("cloudtrain.view.receive({lines: [], events: []})")
    for name in TABS:
        if name != "plan":
            expect(found.page.locator(f"#panel-{name} {content}")).to_have_count(0)
    found.page.click("#tab-timeline")
    expect(found.page.locator(f"#panel-timeline {content}")).not_to_have_count(0)


def test_the_head_has_the_facts_of_a_run(open_run: Opener) -> None:
    found = open_run(GOOD)
    head = found.page.locator(".run-head")
    expect(head.locator("h1")).to_have_text("digits 000001 SUCCEEDED", use_inner_text=True)
    expect(head.locator("h1 .id")).to_have_attribute("title", f"local:{GOOD}")
    effective = re.compile(r"Effective training\s(<1|\d+)%")
    for text in ("Duration 30m", effective, "Validation loss 0.02"):
        expect(head).to_contain_text(text, use_inner_text=True)
    expect(head.locator(".run-key-value")).to_have_css("font-size", "28px")
    curve = head.locator("svg.head-curve")
    expect(curve).to_have_attribute("aria-label", "Course of validation loss")
    age = head.locator("dd span").first
    expect(age).to_have_attribute("title", "2026-11-20 10:15:00 UTC")


def test_a_failure_leads_to_its_line_in_the_log(open_run: Opener) -> None:
    found = open_run(FAILED)
    notice = found.page.locator(".notice")
    cause = "Why it failed: an error in the job's code"
    expect(notice.locator("h2")).to_have_text(cause, use_inner_text=True)
    expect(notice.locator(".message")).to_contain_text(MESSAGE, use_inner_text=True)
    expect(notice).to_contain_text("What to do: Fix train.py:11.", use_inner_text=True)
    notice.get_by_role("button", name="Jump to it in the log").click()
    expect(found.page).to_have_url(re.compile("/log$"))
    target = found.page.locator(".line.target")
    expect(target).to_contain_text(MESSAGE, use_inner_text=True)
    is_seen = """() => {
      const node = document.querySelector(".line.target");
      const [own, box] = [node, node.parentNode].map((each) => each.getBoundingClientRect());
      return own.top >= box.top && own.bottom <= box.bottom;
    }"""
    found.page.wait_for_function(is_seen)


HOLD_NEWS = """
const { fetch } = window;
const released = new Promise((resolve) => { window.release = resolve; });
window.fetch = async (path, options) => {
  if (path.startsWith("api/events")) await released;
  return fetch(path, options);
};
"""


def test_a_jump_waits_for_the_log(browser: Any, served: Served) -> None:
    context, found = open_tab(browser, 1280, 900, "light")
    found.page.add_init_script(HOLD_NEWS)
    found.open(served.url)
    found.page.goto(served.address(f"/run/local:{FAILED}"))
    found.page.get_by_role("button", name="Jump to it in the log").click()
    log = found.page.locator("#log-section")
    expect(log).to_be_visible()
    expect(log.locator(".line")).to_have_count(0)
    found.page.evaluate("window.release()")
    expect(log.locator(".line.target")).to_contain_text(MESSAGE, use_inner_text=True)
    context.close()
    assert found.errors == []


def test_a_log_folds_and_names_levels_and_ranks(open_run: Opener) -> None:
    found = open_run(FAILED, "log")
    lines = found.page.locator(".log .line")
    waited = lines.filter(has_text="the loader waited")
    expect(waited).to_have_count(1)
    expect(waited.locator(".times")).to_have_text("x 12", use_inner_text=True)
    expect(waited).to_have_class(re.compile(r"^line warning\s*$"))
    raised = lines.filter(has_text=MESSAGE).first
    expect(raised.locator(".line-source")).to_have_text("ranks 0, 1", use_inner_text=True)
    # The whole traceback of two ranks is shown once, and its first line says what it is.
    expect(lines.filter(has_text=TRACEBACK[1])).to_have_count(1)
    level = lines.filter(has_text=TRACEBACK[0]).locator(".level")
    expect(level).to_have_text("error", use_inner_text=True)
    log = found.page.locator(".log")
    slow = "rank 1 on algo-2 is slow: 2.50 x the median"
    expect(log).to_contain_text(slow, use_inner_text=True)
    expect(log).not_to_contain_text("{", use_inner_text=True)


def test_a_log_is_searched_and_filtered(open_run: Opener) -> None:
    found = open_run(FAILED, "log")
    page = found.page
    part, log = page.locator("#log-section"), page.locator(".log")
    page.get_by_label("search").fill("loader")
    expect(log.locator("mark")).to_have_text(["loader"])
    expect(part).to_contain_text("12 of 12 lines", use_inner_text=True)
    page.get_by_label("search").fill("nothing like this")
    expect(part).to_contain_text("no line matches", use_inner_text=True)
    page.get_by_label("search").fill("")
    page.get_by_label("level").select_option("error")
    expect(log.locator(".line.error").nth(3)).to_be_attached()
    expect(log.locator(".line:not(.error)")).to_have_count(0)
    page.get_by_label("level").select_option("")
    expect(log).to_contain_text("hello", use_inner_text=True)
    page.get_by_label("rank").select_option("1")
    expect(log).to_contain_text(MESSAGE, use_inner_text=True)
    expect(log).not_to_contain_text("hello", use_inner_text=True)


def test_new_lines_are_added_to_a_log(open_run: Opener) -> None:
    found = open_run(FAILED, "log")
    add = """texts => cloudtrain.view.receive({events: [], lines: texts.map((text, index) => (
      {number: 900 + index, host: "algo-1", rank: 0, time: null, text}))})"""
    lines = found.page.locator(".log .line")
    before = lines.count()
    found.page.evaluate(add, ["new", "new", "newer"])
    expect(lines).to_have_count(before + 2)
    expect(lines.nth(before)).to_contain_text("new x 2", use_inner_text=True)


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
    plan = found.page.locator("#panel-plan")
    for pattern in (r"limits\.runtime\s+1h", r"train\.learning_rate\s+0\.001235"):
        expect(plan).to_contain_text(re.compile(pattern), use_inner_text=True)
    titles = found.page.locator("#settings-section h3")
    expect(titles).to_have_text(["Job", "Code", "Training", "Limits", "Tags"], use_inner_text=True)
    show(found, served, GOOD, "system")
    system = found.page.locator("#panel-system")
    for label, value in [
        ("Shared memory", "25.3 GB"),
        ("Free disk", "81.9 GB"),
        ("Python", "3.11.7"),
    ]:
        row = re.compile(rf"{label}\s+{re.escape(value)}")
        expect(system).to_contain_text(row, use_inner_text=True)
    expect(system).to_contain_text("1 x NVIDIA H200", use_inner_text=True)


def test_the_parts_of_a_step_are_one_chart(open_run: Opener) -> None:
    found = open_run(GOOD, "system")

    def titled(title: str) -> Any:
        whole = re.compile(f"^{title}$", re.IGNORECASE)
        return found.page.locator("figcaption .chart-title", has_text=whole)

    expect(titled("Peak memory")).not_to_have_count(0)
    expect(titled("Parts of a step")).to_have_count(1)
    for part in ("Data", "Forward", "Backward", "Optimizer"):
        expect(titled(part)).to_have_count(0)


def test_checkpoints_have_size_share_and_damage(open_run: Opener) -> None:
    found = open_run(GOOD, "checkpoints")
    rows = found.page.locator("#panel-checkpoints tbody tr")
    newest, damaged = rows.nth(0), rows.nth(1)
    for text in ("100", "complete", "25.3 GB", "246 ms", "50 ms", "8%", "file:///c/step-100"):
        expect(newest).to_contain_text(text, use_inner_text=True)
    expect(damaged).to_contain_text("✕ damaged model.pt ends early", use_inner_text=True)


def test_a_timeline_names_the_bad_host(open_run: Opener) -> None:
    found = open_run(FAILED, "timeline")
    slow = found.page.locator(".lane", has_text="Slow ranks")
    expect(slow.locator(".mark-name")).to_have_text("rank 1, algo-2", use_inner_text=True)
    ticks = found.page.locator(".tick")
    expect(ticks.first).to_have_text("0", use_inner_text=True)
    expect(ticks.nth(1)).to_be_attached()
    failures = found.page.locator(".lane", has_text="Failures")
    expect(failures).to_contain_text("rank 1, algo-1", use_inner_text=True)


def test_the_confusion_matrix_is_a_picture(open_run: Opener) -> None:
    found = open_run(GOOD)
    cells = found.page.locator(".matrix .cell")
    expect(cells).to_have_text(["4", "1", "1", "4"], use_inner_text=True)
    expect(cells.first).to_have_attribute("title", "cat predicted as cat: 4")
    colour = "node => getComputedStyle(node).backgroundColor"
    assert cells.nth(0).evaluate(colour) != cells.nth(1).evaluate(colour)
    classes = found.page.locator("#classes-section")
    expect(classes).to_contain_text("8 of 10 right", use_inner_text=True)


def test_a_run_without_metrics_gets_patterns(open_run: Opener) -> None:
    found = open_run(SCRIPT, "charts")
    charts = found.page.locator("#panel-charts")
    expect(charts).to_contain_text("No metrics so far.", use_inner_text=True)
    pattern = r"metrics: {step: '\bstep\W+?(\d+)', loss: "
    expect(charts.locator("pre")).to_contain_text(pattern, use_inner_text=True)


def test_printing_shows_all_tabs_in_one_column(open_run: Opener) -> None:
    found = open_run(GOOD, "log")
    found.page.emulate_media(media="print")
    expect_panels(found, *TABS)
    edges = found.page.locator("[role=tabpanel]").evaluate_all(
        "all => all.map((each) => each.getBoundingClientRect()).map(({left, top, bottom}) => [left, top, bottom])"
    )
    assert len({left for left, _, _ in edges}) == 1
    assert all(above[2] <= below[1] for above, below in itertools.pairwise(edges))
    expect(found.page.locator("#panel-timeline .track")).not_to_have_count(0)
    found.page.emulate_media(media="screen")
    expect_panels(found, "log")


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
    found.wait_read(FAILED, ENDS[FAILED])
    expect(found.page.locator(".run-head")).to_be_visible()
    expect(found.page.locator(".actions")).to_have_count(0)
    found.page.click("#tab-log")
    log = found.page.locator(".log")
    expect(log).to_contain_text("hello from a script", use_inner_text=True)
    found.page.get_by_role("button", name="Jump to it in the log").click()
    expect(log.locator(".line.target")).to_contain_text(MESSAGE, use_inner_text=True)
    context.close()
    assert found.errors == []
