"""The dashboard and the report in a real browser."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
from support.recorded_runs import step_events, write_run
from support.recorded_sweeps import write_sweep

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="Chromium is not installed (make test-all)"
)

PICTURES = Path(__file__).parents[2] / "build" / "pictures"
ONE, TWO, THREE = (
    "digits-261120-101500-000001",
    "digits-261120-111500-000002",
    "other-261120-121500-000003",
)
ATTACK = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script>\x1b]0;x\x07'


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a tab of a size. At the end no tab may have reported an error."""
    opened: list[tuple[Any, Tab]] = []

    def open_one(width: int = 1280, height: int = 900, scheme: str = "light") -> Tab:
        opened.append(open_tab(browser, width, height, scheme))
        return opened[-1][1]

    yield open_one
    for context, each in opened:
        context.close()
        assert each.errors == []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of three finished runs."""
    place = tmp_path / "home"
    moment = 1795000000.0
    checkpoints = [
        {
            "event": "checkpoint",
            "uri": "file:///c/step-50",
            "step": 50,
            "time": moment,
            "bytes": 1000,
        }
    ]
    evaluations = [
        {
            "event": "evaluation",
            "split": "validation",
            "step": step,
            "samples": 10,
            "loss": 1 / step,
            "time": moment,
        }
        for step in (40, 80, 100)
    ]
    classes = [
        {"name": name, "support": 5, "precision": 0.8, "recall": 0.8, "f1": 0.8}
        for name in ("cat", "dog")
    ]
    analysis = {
        "event": "analysis",
        "split": "test",
        "samples": 10,
        "classes": classes,
        "confusion": [[4, 1], [1, 4]],
    }
    events = [*step_events(100), *evaluations, *checkpoints, analysis]
    write_run(
        place,
        ONE,
        events,
        job={"train": {"epochs": 2}, "tags": {"team": "vision"}},
        lines=["hello from a script"],
    )
    write_run(
        place,
        TWO,
        step_events(100, loss=3.0),
        job={"train": {"epochs": 3}, "tags": {"team": "text"}},
    )
    failed = {"event": "failed", "rank": 1, "message": "ValueError: broken", "exit_code": 1}
    reason = "rank 1 on algo-1 (local rank 1) failed: ValueError: broken"
    write_run(place, THREE, [*step_events(10), failed], state="FAILED", reason=reason)
    write_sweep(place, tmp_path / "searched")
    return place


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    running: list[Served] = []

    def start(home: Path, *options: str) -> Served:
        running.append(start_dashboard(home, tmp_path, *options))
        return running[-1]

    yield start
    for each in running:
        end_dashboard(each.process)


def list_rows(found: Tab, count: int) -> Any:
    """Return the rows of the list, once it has all of them and they are so many."""
    rows = found.page.locator("table.runs tbody tr:not(.group)")
    found.wait_listed()
    expect(rows).to_have_count(count)
    return rows


def wait_tags(found: Tab) -> None:
    """Wait until the list has the tags of the runs, which come with their names after the rows."""
    for tag in ("team=vision", "team=text"):
        expect(found.page.locator("table.runs").get_by_text(tag).first).to_be_visible()


def test_the_list_filters_sorts_and_groups(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    rows = list_rows(found, 3)
    wait_tags(found)
    # The token is no longer in the address.
    expect(found.page).to_have_url(served.address("/"))
    found.page.get_by_label("filter").fill("vision")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(ONE[-6:], use_inner_text=True)
    expect(rows.locator(".id")).to_have_attribute("title", f"local:{ONE}")
    found.page.get_by_label("filter").fill("")
    found.page.get_by_label("group by").select_option("tag team")
    groups = found.page.locator("tr.group")
    expect(groups).to_have_text(["(without) (1)", "text (1)", "vision (1)"], use_inner_text=True)
    found.page.get_by_label("group by").select_option("")
    found.page.get_by_role("button", name="1 failed").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(THREE[-6:], use_inner_text=True)
    found.page.get_by_role("button", name="1 failed").click()
    names = found.page.locator("table.runs tbody th a")
    found.page.get_by_role("button", name="run", exact=True).click()
    expect(names).to_have_text(["digits", "digits", "other"], use_inner_text=True)
    found.page.get_by_role("button", name="run", exact=True).click()
    expect(names).to_have_text(["other", "digits", "digits"], use_inner_text=True)


def test_filters_and_order_survive_a_reload(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    page = found.page
    rows = list_rows(found, 3)
    wait_tags(found)
    page.get_by_label("filter").fill("digits")
    page.get_by_role("button", name="2 succeeded").click()
    page.get_by_role("button", name="key metric").click()
    page.get_by_role("button", name="key metric").click()
    page.get_by_label("group by").select_option("state")
    address = served.address("/?q=digits&state=SUCCEEDED&group=state&sort=-metric")
    expect(page).to_have_url(address)
    page.reload()
    rows = list_rows(found, 2)
    expect(page).to_have_url(address)
    # The newest first would be the other way round.
    expect(rows.locator(".id")).to_have_text([ONE[-6:], TWO[-6:]], use_inner_text=True)
    expect(page.get_by_label("filter")).to_have_value("digits")
    expect(page.get_by_label("group by")).to_have_value("state")
    chosen = page.get_by_role("button", name="2 succeeded")
    expect(chosen).to_have_attribute("aria-pressed", "true")
    header = page.locator("th", has=page.get_by_role("button", name="key metric"))
    expect(header).to_have_attribute("aria-sort", "descending")
    # The page of a run, and back.
    rows.first.locator("a").click()
    page.wait_for_selector("figure.chart")
    page.go_back()
    list_rows(found, 2)
    expect(page.get_by_label("filter")).to_have_value("digits")


def write_trials(home: Path, sweep: str, count: int) -> None:
    """Write the runs of a sweep; the last trial has failed."""
    for number in range(count):
        write_run(
            home,
            f"searched-261120-14150{number}-00001{number}",
            step_events(20, loss=1.0 + number),
            job={"tags": {"sweep": sweep, "trial": str(number), "team": "vision"}},
            state="FAILED" if number == count - 1 else "SUCCEEDED",
            reason="a trial broke" if number == count - 1 else "",
        )


def test_the_trials_of_a_sweep_are_one_row_that_opens(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    (sweep,) = [each.name for each in (home / "sweeps").iterdir()]
    write_trials(home, sweep, 4)
    found = tab()
    found.open(serve(home).url)
    rows = list_rows(found, 4)
    row = found.page.locator("tr.sweep")
    expect(rows.first).to_have_class("sweep")
    for text in ("best validation loss", "4 of 6 trials, 1 failed", "SUCCEEDED"):
        expect(row).to_contain_text(text, use_inner_text=True)
    expect(row.locator(".name a")).to_have_attribute("href", f"#/sweep/{sweep}")
    expect(found.page.locator(".sweeps")).to_be_hidden()
    toggle = row.get_by_role("button")
    expect(toggle).to_have_attribute("aria-expanded", "false")
    toggle.click()
    list_rows(found, 8)
    expect(toggle).to_have_attribute("aria-expanded", "true")
    trials = found.page.locator("tr.trial")
    names = [f"trial {each}" for each in (3, 2, 1, 0)]
    expect(trials.locator(".name .short")).to_have_text(names, use_inner_text=True)
    # The row of the sweep says which one it is; other tags stay.
    expect(trials.first.locator(".tags")).to_have_text("team=vision", use_inner_text=True)
    found.page.reload()
    list_rows(found, 8)
    found.page.get_by_label(f"select the trials of {sweep}").check()
    expect(found.page.get_by_role("button", name="Compare 4 runs")).to_be_visible()
    toggle.click()
    list_rows(found, 4)
    # A failed trial is found without opening its sweep.
    found.page.get_by_role("button", name="2 failed").click()
    list_rows(found, 3)
    expect(trials.locator(".why")).to_have_text("a trial broke", use_inner_text=True)


CURRENT = "document.activeElement.closest('tr')?.querySelector('.id').title"


def wait_current(found: Tab, run: str) -> None:
    """Wait until the focus is in the row of this run or sweep."""
    found.page.wait_for_function(f"run => {CURRENT} === run", arg=run)


@pytest.fixture
def swept(home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]) -> tuple[Tab, Served]:
    """The complete list of the home with two trials of its sweep, and its dashboard."""
    (sweep,) = [each.name for each in (home / "sweeps").iterdir()]
    write_trials(home, sweep, 2)
    found = tab()
    served = serve(home)
    found.open(served.url)
    list_rows(found, 4)
    wait_tags(found)
    row = found.page.locator("tr.sweep")
    expect(row).to_contain_text("best validation loss", use_inner_text=True)
    return found, served


def test_keys_move_and_select(home: Path, swept: tuple[Tab, Served]) -> None:
    (sweep,) = [each.name for each in (home / "sweeps").iterdir()]
    found, _ = swept
    page = found.page
    page.keyboard.press("j")
    wait_current(found, sweep)
    page.keyboard.press("ArrowRight")
    list_rows(found, 6)
    page.keyboard.press("ArrowLeft")
    list_rows(found, 4)
    page.keyboard.press("j")
    wait_current(found, f"local:{THREE}")
    page.keyboard.press("x")
    page.keyboard.press("j")
    page.keyboard.press("x")
    expect(page.get_by_role("button", name="Compare 2 runs")).to_be_visible()
    page.keyboard.press("k")
    wait_current(found, f"local:{THREE}")
    page.keyboard.press("x")
    expect(page.get_by_text("Select another run to compare.")).to_be_visible()
    expect(page.get_by_label(f"select {TWO}")).to_be_checked()


def test_keys_search_and_open_and_can_be_off(swept: tuple[Tab, Served]) -> None:
    found, served = swept
    page = found.page
    page.get_by_label(f"select {TWO}").check()
    page.keyboard.press("/")
    page.keyboard.type("j?x")
    words = page.get_by_label("filter")
    expect(words).to_have_value("j?x")
    expect(page.get_by_role("button", name="Show all runs")).to_be_visible()
    page.keyboard.press("Escape")
    expect(words).not_to_be_focused()
    expect(words).to_have_value("j?x")
    page.get_by_role("button", name="Show all runs").click()
    list_rows(found, 4)
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("search", use_inner_text=True)
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("figure.chart")
    expect(page).to_have_url(served.address(f"/run/local%3A{THREE}"))
    page.go_back()
    list_rows(found, 4)
    expect(page.get_by_label(f"select {TWO}")).to_be_checked()
    # Who uses speech input can turn them off.
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("Use these keys").uncheck()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("j")
    assert page.evaluate(CURRENT) is None


LONG_REASON = (
    "rank 1 on algo-1 (local rank 1) failed: ValueError: shapes [32, 10] and [32, 11] do not fit: "
    "expected 10 classes, found 11 in shard-0007.parquet, of which 3 rows have no label at all, so "
    "the data of this shard were written by an older version of the exporter"
)


@pytest.mark.parametrize("width", [375, 1280])
def test_a_long_reason_is_cut_at_a_word_and_whole_on_hover(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab], width: int
) -> None:
    write_run(home, "late-261120-141500-00000c", step_events(5), state="FAILED", reason=LONG_REASON)
    found = tab(width)
    found.open(serve(home).url)
    list_rows(found, 4)
    why = found.page.locator(".why", has_text="shapes")
    expect(why).to_have_attribute("title", LONG_REASON)
    shown = why.inner_text()
    assert shown.endswith("…")
    assert shown[:-1] in LONG_REASON
    end = LONG_REASON.index(shown[:-1]) + len(shown) - 1
    assert LONG_REASON[end] in " ,;:.("
    # What is left of it fits, so the style cuts nothing off.
    assert why.evaluate("(node) => node.scrollWidth <= node.clientWidth")
    other = found.page.locator(".why", has_text="broken")
    expect(other).to_have_text(re.compile("ValueError: broken$"), use_inner_text=True)
    # It has a line of its own, below that of the run.
    below = """node => {
      const name = node.closest("tr").querySelector(".name a");
      return node.getBoundingClientRect().top - name.getBoundingClientRect().top;
    }"""
    assert why.evaluate(below) >= 15


def test_columns_are_there_where_a_run_has_content(
    tmp_path: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    place = tmp_path / "home"
    write_run(place, ONE, step_events(30))
    found = tab()
    served = serve(place)
    found.open(served.url)
    list_rows(found, 1)
    titles = found.page.locator("table.runs thead th")
    row = found.page.locator("table.runs tbody tr")
    expect(row.locator("svg.spark path")).to_be_visible()
    heads = ["run", "state", "age ↑", "duration", "key metric"]
    expect(titles).to_have_text(heads, use_inner_text=True)
    expect(row.locator(".duration")).to_have_text("30m", use_inner_text=True)
    expect(row.locator(".age")).to_have_attribute("title", "2026-11-20 10:15:00 UTC")
    expect(row.locator(".progress")).to_be_hidden()
    write_run(place, TWO, step_events(30), job={"tags": {"team": "text"}})
    list_rows(found, 2)
    expect(found.page.get_by_text("team=text")).to_be_visible()
    expect(titles.last).to_have_text("tags", use_inner_text=True)
    found.page.get_by_label("filter").fill(ONE[-6:])
    expect(titles.last).to_have_text("key metric", use_inner_text=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_is_cards_on_a_telephone(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab], scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="install it: make test-all"
    ).Axe()
    (sweep,) = [each.name for each in (home / "sweeps").iterdir()]
    write_trials(home, sweep, 3)
    found = tab(375, 812, scheme)
    found.open(f"{serve(home).url}")
    list_rows(found, 4)
    found.page.locator("tr.sweep button").click()
    list_rows(found, 7)
    expect(found.page.locator("svg.spark")).to_have_count(6)
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 375
    row = found.page.locator("tr", has=found.page.locator(f"[title='local:{TWO}']"))
    boxes = row.evaluate(
        """(row, parts) => parts.map((part) => row.querySelector(part).getBoundingClientRect())
          .map(({ left, right, top }) => [left, right, top])""",
        [".name a", ".badge", ".age", ".value", "svg.spark"],
    )
    assert all(left >= 0 and right <= 375 for left, right, _ in boxes)
    # The value is in a line of its own, below the name.
    assert boxes[3][2] > boxes[0][2]
    found.page.get_by_label("order by").select_option("metric")
    expect(found.page).to_have_url(re.compile("sort=metric"))
    found.page.get_by_label(f"select {ONE}").check()
    found.page.get_by_label(f"select {TWO}").check()
    expect(found.page.get_by_role("button", name="Compare 2 runs")).to_be_visible()
    violations = axe.run(found.page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in violations] == []


WATCH_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => window.shifts.push(...list.getEntries().map((each) => each.value)))
  .observe({ type: "layout-shift", buffered: true });
"""


def test_a_long_list_moves_nothing_and_then_rests(
    tmp_path: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    place, count = tmp_path / "home", 300
    for number in range(count):
        # Names, tags and curves are read after the list.
        job = {"name": f"named-{number}", "tags": {"team": str(number % 3)}}
        write_run(place, f"run-261120-101500-{number:06x}", step_events(5), job=job)
    found = tab()
    found.page.add_init_script(WATCH_SHIFTS)
    found.open(serve(place).url)
    list_rows(found, count)
    for part in ("svg.spark", ".tags:has-text('team=')", ".name a:has-text('named-')"):
        expect(found.page.locator(f"table.runs {part}")).to_have_count(count)
    # Two frames later the browser has reported what has moved.
    for _ in range(2):
        found.page.evaluate("new Promise(requestAnimationFrame)")
    assert found.page.evaluate("window.shifts") == []
    # News of one run leaves the elements of the others, and nothing happens without news.
    found.page.evaluate(
        """() => {
          window.changes = 0;
          document.querySelectorAll("table.runs tbody tr").forEach((row) => { row.isOld = true; });
          const count = (found) => { window.changes += found.length; };
          new MutationObserver(count).observe(document.querySelector("table.runs tbody"), { childList: true, subtree: true });
          window.cloudtrain.view.draw();
        }"""
    )
    assert found.page.evaluate("new Promise(requestAnimationFrame).then(() => window.changes)") == 0
    write_run(place, "new-261121-101500-0000ff", step_events(5))
    rows = list_rows(found, count + 1)
    expect(rows.first.locator(".name a")).to_have_text("new", use_inner_text=True)
    assert rows.evaluate_all("(rows) => rows.filter((row) => row.isOld).length") == count


def test_a_runs_page_shows_every_point_and_the_hovered_value(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(home).url)
    list_rows(found, 3)
    found.page.locator("table.runs a", has_text="digits").last.click()
    chart = found.chart("loss")
    # 100 steps and 3 evaluations.
    expect(chart).to_have_attribute("data-points", "103")
    chart.scroll_into_view_if_needed()
    chart.focus()
    for _ in range(60):
        chart.press("ArrowRight")
    expect(chart.locator(".chart-at")).to_have_text(re.compile(r"^step \d+$"))
    step, shown = chart.evaluate(
        """node => [".chart-at", ".chart-values li .chart-value"]
          .map((each) => node.querySelector(each).innerText)"""
    )
    loss = 2.0 / (1 + int(step.removeprefix("step ")) / 10)
    assert float(shown) == pytest.approx(loss, rel=1e-3)
    main = found.page.locator("main")
    for name, text in (
        ("Overview", "Confusion matrix"),
        ("Overview", "team=vision"),
        ("Checkpoints", "file:///c/step-50"),
        ("Plan", "train.epochs"),
        ("Log", "hello from a script"),
    ):
        found.page.get_by_role("tab", name=name).click()
        expect(main).to_contain_text(text, use_inner_text=True)
    found.page.get_by_label("search").fill("nothing like this")
    log = found.page.locator("#log-section")
    expect(log).to_contain_text("no line matches", use_inner_text=True)


def test_a_failed_run_shows_its_explanation(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    found.page.goto(served.address(f"/run/local:{THREE}"))
    main = found.page.locator("main")
    expect(main).to_contain_text("Why it failed", use_inner_text=True)
    expect(main.locator(".message")).to_contain_text("ValueError: broken", use_inner_text=True)
    action = main.locator(".actions button").first
    expect(action).to_have_text("Copy command after the fix…", use_inner_text=True)
    found.wait_read(THREE, "failed")
    found.page.click("text=Jump to it in the log")
    # Its log has no line with the message, but the event of the failure.
    target = main.locator(".line.target")
    expect(target).to_contain_text("ends with exit code 1", use_inner_text=True)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_a_runs_page_shows_where_its_time_went(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab], width: int, scheme: str
) -> None:
    found = tab(width=width, scheme=scheme)
    served = serve(home)
    found.open(served.url)
    found.page.goto(served.address(f"/run/local:{THREE}"))
    found.wait_read(THREE, "failed")
    part = found.page.locator("#ledger-section")
    for text in (
        "0% of 30m was training that was kept",
        "saves and lost work took 30m of 30m (100%)",
    ):
        expect(part).to_contain_text(text, use_inner_text=True)
    # Each kind has its name, not its colour alone.
    expect(part.locator(".part.kind-repeated")).to_have_text("repeated", use_inner_text=True)
    expect(part.locator("table").first).to_contain_text("repeated", use_inner_text=True)
    bar = part.locator(".parts-bar")
    expect(bar).to_have_attribute("aria-label", re.compile("^attempt 1: start "))
    parts, whole = bar.evaluate(
        "node => [[...node.children].map((each) => each.offsetWidth), node.clientWidth]"
    )
    assert sum(parts) == pytest.approx(whole, abs=2)
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sweep_is_drawn_and_leads_to_its_trials(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(home).url)
    found.page.click(".sweeps a")
    for part, count in (
        ("#sweep-history circle", 6),
        ("#sweep-history circle.faint", 1),
        ("#sweep-parallel .run-line", 6),
        ("#sweep-importance .lane", 3),
    ):
        expect(found.page.locator(part)).to_have_count(count)
    best = found.page.locator("#sweep-trials tbody tr").first
    expect(best).to_contain_text("(best)", use_inner_text=True)


def test_zooming_fetches_the_range(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    write_run(home, "long-261120-131500-000004", step_events(20_000))
    found = tab()
    served = serve(home)
    found.open(served.url)
    found.page.goto(served.address("/run/local:long-261120-131500-000004/charts"))
    chart = found.chart("loss")
    expect(chart).to_have_attribute("aria-label", re.compile("at step 20000"))
    thinned = int(chart.get_attribute("data-points"))
    assert 500 <= thinned <= 2_100
    chart.focus()
    for _ in range(4):
        chart.press("+")
    # A sixteenth of 20,000 steps, none of them left out.
    is_whole = "(node) => Number(node.dataset.points) <= 1300 && Number(node.dataset.points) > 1200"
    found.page.wait_for_function(is_whole, arg=chart.element_handle())
    found.page.get_by_role("button", name="Reset zoom").first.click()
    expect(chart).to_have_attribute("data-points", str(thinned))


SLOW = """\
import time
import cloudtrain_runtime
for step in range(1, 2000):
    cloudtrain_runtime.report(step, total=2000, loss=1.0 / step)
    time.sleep(0.2)
"""


@pytest.mark.processes
def test_a_live_run_is_followed_and_stopped(
    tmp_path: Path, cli: Cli, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    place = tmp_path / "home"
    folder = tmp_path / "live"
    folder.mkdir()
    (folder / "train.py").write_text(SLOW)
    job = "name: live\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"
    (folder / "job.yaml").write_text(job)
    environ = {"CLOUDTRAIN_HOME": str(place)}
    run = cli("submit", str(folder / "job.yaml"), "--local", "--json", environ=environ).json["run"]
    found = tab()
    found.open(serve(place).url)
    found.page.locator("table.runs a", has_text="live").click()
    found.wait_points("loss", 1)
    before = int(found.chart("loss").get_attribute("data-points"))
    found.wait_points("loss", before + 5)  # without a reload
    found.page.get_by_role("button", name="Stop…").click()
    dialog = found.page.locator("dialog")
    expect(dialog).to_contain_text("cloudtrain stop", use_inner_text=True)
    dialog.get_by_role("button", name="Stop").click()
    found.page.wait_for_selector(".run-head .badge.stopped")
    assert cli("status", run, "--json", environ=environ).json["state"] == "STOPPED"


def test_a_comparison_shows_differences_and_winners(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    for run in (ONE, TWO, THREE):
        found.page.get_by_label(f"select {run}").check()
    found.page.get_by_role("button", name="Compare 3 runs").click()
    main = found.page.locator("main")
    for text in ("Parallel coordinates", "train.epochs"):
        expect(main).to_contain_text(text, use_inner_text=True)
    expect(found.page.locator(".best")).not_to_have_count(0)
    expect(found.page.locator(".run-line")).to_have_count(3)
    found.wait_points("Training loss", 200)


def write_report(cli: Cli, home: Path, path: Path, *runs: str) -> Path:
    cli("report", *runs, "-o", str(path), environ={"CLOUDTRAIN_HOME": str(home)})
    return path


def test_a_report_opens_from_disk_without_a_server(
    home: Path, cli: Cli, tmp_path: Path, tab: Callable[..., Tab]
) -> None:
    path = write_report(cli, home, tmp_path / "report.html", ONE)
    found = tab()
    found.open(path.as_uri())
    expect(found.chart("loss")).to_have_attribute("data-points", "103")
    assert {urlsplit(url).scheme for url in found.requests} <= {"file", "data"}
    several = write_report(cli, home, tmp_path / "several.html", ONE, TWO)
    found.open(several.as_uri())
    main = found.page.locator("main")
    expect(main).to_contain_text("Settings that differ", use_inner_text=True)
    found.page.get_by_role("link", name="digits 000001").first.click()
    found.wait_points("loss", 103)


def test_a_report_of_100_000_steps_is_small(
    cli: Cli, tmp_path: Path, tab: Callable[..., Tab]
) -> None:
    place, run = tmp_path / "home", "long-261120-101500-00000a"
    events = step_events(100_000, names=[f"metric_{index}" for index in range(9)])
    events[54_321]["loss"] = 1e6
    write_run(place, run, events)
    path = write_report(cli, place, tmp_path / "report.html", run)
    assert path.stat().st_size <= 2_000_000
    found = tab()
    found.open(path.as_uri())
    found.wait_points("loss", 500)
    spike = "cloudtrain.documents.values().next().value.curves['train/loss'].values.includes(1e6)"
    assert found.page.evaluate(spike)


def test_html_in_names_logs_and_diffs_is_text(
    home: Path, cli: Cli, tmp_path: Path, tab: Callable[..., Tab]
) -> None:
    run = "attack-261120-101500-00000b"
    event = {
        "event": "step",
        "step": 1,
        "loss": 1.0,
        "metrics": {ATTACK: 2.0},
        "time": 1795000000.0,
    }
    failed = {"event": "failed", "rank": 0, "message": f"ValueError: {ATTACK}", "exit_code": 1}
    job = {"name": ATTACK, "tags": {ATTACK: ATTACK}, "train": {ATTACK: ATTACK}}
    diff = f"+{ATTACK}\n-</script><script>window.attacked=1</script>"
    write_run(
        home,
        run,
        [event, failed],
        state="FAILED",
        reason=ATTACK,
        job=job,
        lines=[ATTACK],
        diff=diff,
    )
    found = tab()
    for name, runs in (("one.html", (run,)), ("two.html", (run, ONE))):
        found.open(write_report(cli, home, tmp_path / name, *runs).as_uri())
        found.page.wait_for_selector("figure.chart")
        main = found.page.locator("main")
        expect(main).to_contain_text("<img src=x", use_inner_text=True)
        expect(main.locator("img, script")).to_have_count(0)
        assert found.page.evaluate("window.attacked") is None


def test_the_dashboard_shows_attacks_as_text(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    run = "attack-261120-101500-00000b"
    write_run(
        home,
        run,
        step_events(3),
        job={"name": ATTACK, "tags": {"a": ATTACK}},
        lines=[ATTACK],
        reason=ATTACK,
    )
    found = tab()
    served = serve(home)
    found.open(served.url)
    found.page.goto(served.address(f"/run/local:{run}"))
    found.wait_points("loss", 3)
    main = found.page.locator("main")
    expect(main).to_contain_text("<img src=x", use_inner_text=True)
    expect(main.locator("img, script")).to_have_count(0)
    assert found.page.evaluate("window.attacked") is None


def test_foreign_requests_are_refused(home: Path, serve: Callable[..., Served]) -> None:
    served = serve(home, "--allowed-host", "hub.example", "--root-path", "/proxy/1")
    token = {"Authorization": f"Bearer {served.token}"}
    own = f"127.0.0.1:{served.port}"
    assert served.ask("/api/runs", token) == 200
    assert served.ask("/proxy/1/api/runs", token) == 200
    assert served.ask("/api/runs", {}) == 403
    assert served.ask("/api/runs", {**token, "Host": "evil.example"}) == 403
    assert served.ask("/api/runs", {**token, "Host": "hub.example"}) == 200
    assert served.ask("/api/runs", {**token, "Host": own, "Origin": "http://evil.example"}) == 403
    assert (
        served.ask(f"/api/run/local:{ONE}/stop", {"Host": own, "Origin": f"http://{own}"}, "POST")
        == 403
    )
    assert served.ask(f"/api/run/local:{ONE}/delete", token, "POST") == 404
    assert served.ask("/api/run/local:nothing-261120-101500-0000ff", token) == 404
    assert served.ask("/vendor/../../server.py", token) == 404


def test_a_lost_server_is_reported(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    list_rows(found, 3)
    served.process.send_signal(signal.SIGINT)
    served.process.wait(300)
    lost = "connection to cloudtrain dashboard is lost"
    expect(found.page.locator(".banner")).to_contain_text(lost, use_inner_text=True)
    # The browser reports each refused connection, until the page is closed.
    found.page.close()
    found.errors.clear()


def test_an_empty_home_says_how_to_start(
    tmp_path: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(tmp_path / "empty").url)
    found.page.wait_for_selector("text=Start one: cloudtrain submit")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280, 2560])
def test_pages_have_no_accessibility_violation(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab], scheme: str, width: int
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="install it: make test-all"
    ).Axe()
    found = tab(width, 900, scheme)
    served = serve(home)
    found.open(served.url)
    several = f"/compare/local:{ONE},local:{TWO},local:{THREE}"
    # What each page has when it is complete.
    pages = {
        "list": ("/", "table.runs svg.spark", 3),
        "run": (f"/run/local:{ONE}", f"h1:has-text('{ONE[-6:]}')", 1),
        "failed": (f"/run/local:{THREE}", f"h1:has-text('{THREE[-6:]}')", 1),
        "compare": (several, "#compare-parallel .run-line", 3),
        "sweep": ("/sweep/searched", "#sweep-history circle", 6),
    }
    points = {"run": ("loss", 103), "failed": ("loss", 10), "compare": ("Training loss", 210)}
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, (route, content, count) in pages.items():
        found.page.goto(served.address(route))
        expect(found.page.locator(content)).to_have_count(count)
        if name in points:
            found.wait_points(*points[name])
        found.page.screenshot(path=str(PICTURES / f"{name}-{width}-{scheme}.png"), full_page=True)
        violations = axe.run(found.page).response["violations"]
        assert [
            (each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in violations
        ] == []
        assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_watch_rewrites_the_report_until_the_end(home: Path, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    began = time.time()
    cli("report", ONE, "--watch", "-o", str(path), environ={"CLOUDTRAIN_HOME": str(home)})
    assert path.stat().st_mtime >= began - 2
