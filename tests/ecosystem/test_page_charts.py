"""Charts, comparison and sweep in a real browser, on pages that need no server."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dashboard_tabs import Tab, expect, open_tab
from support.jobs import Cli
from support.recorded_runs import step_events, write_run
from support.recorded_sweeps import write_sweep

from cloudtrain.features.sweeps.page_record import sweep_document

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="Chromium is not installed (make test-all)"
)

ONE, TWO, THREE = (f"digits-261120-101500-00000{number}" for number in (1, 2, 3))
MOMENT = 1795169700.0

RECORD_TEXTS = """
window.drawn = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const { a, e } = this.getTransform(), width = this.measureText(text).width * a;
  const shift = { right: 1, center: 0.5 }[this.textAlign] ?? 0;
  const left = x * a + e - shift * width, isCut = left < 0 || left + width > this.canvas.width;
  window.drawn.push({ text, isCut, isY: this.textAlign === "right", figure: this.canvas.closest("figure")?.ariaLabel ?? "" });
  return fill.call(this, text, x, y);
};
"""
DRAW = """async ([charts, options]) => {
  const grid = new ChartGrid("tested");
  Object.assign(grid.options, options);
  document.querySelector("main").replaceChildren(grid.node);
  window.grid = grid;
  grid.show(charts);
  await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
}"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of three runs of one job, the third with other data."""
    place = tmp_path / "home"
    for run, epochs, data in ((ONE, 2, "s3://a/x"), (TWO, 3, "s3://a/x"), (THREE, 4, "s3://b/y")):
        evaluations = [
            {"event": "evaluation", "split": "validation", "step": step, "samples": 10}
            | {"loss": epochs / step, "accuracy": 1 - epochs / step, "time": MOMENT}
            for step in (40, 80, 100)
        ]
        job = {"train": {"epochs": epochs, "seed": 7}, "data": {"training": data}}
        write_run(place, run, [*step_events(100), *evaluations], job=job)
    return place


@pytest.fixture
def show(browser: Any, home: Path, cli: Cli, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a report of runs. At the end no page may have reported an error."""
    opened: list[tuple[Any, Tab]] = []

    def open_report(*runs: str, width: int = 1280, scheme: str = "light") -> Any:
        path = tmp_path / f"{len(opened)}.html"
        cli("report", *runs, "-o", str(path), environ={"CLOUDTRAIN_HOME": str(home)})
        opened.append(open_tab(browser, width, 900, scheme))
        found = opened[-1][1]
        found.page.add_init_script(RECORD_TEXTS)
        found.open(path.as_uri())
        return found.page

    yield open_report
    for context, each in opened:
        context.close()
        assert each.errors == []


def draw(page: Any, charts: list[dict[str, Any]], **options: Any) -> None:
    """Show charts in the page's place, and wait until they are drawn."""
    page.evaluate(DRAW, [charts, options])


def curve(values: list[float | None]) -> dict[str, Any]:
    steps = list(range(1, len(values) + 1))
    return {"steps": steps, "times": [MOMENT + step for step in steps], "values": values}


def line(label: str, values: list[float | None], **fields: Any) -> dict[str, Any]:
    fields = {"colour": "var(--series-0)", "dash": [], "origin": MOMENT, **fields}
    return {"label": label, "curve": curve(values), **fields}


def value_in(page: Any, title: str) -> Any:
    """Return the value of a chart's first line."""
    chart = page.locator("figure.chart", has=page.locator(".chart-title", has_text=title)).first
    return chart.locator(".chart-value").first


def test_a_head_has_last_values_then_the_cursors(show: Callable[..., Any]) -> None:
    page = show(ONE)
    draw(
        page,
        [
            {"title": "loss", "series": [line("training", [3.0, 1.0, 2.0], direction="min")]},
            {"title": "memory", "unit": "bytes", "series": [line("memory", [1e6, 2e6, 3.5e6])]},
        ],
    )
    loss, memory = value_in(page, "loss"), value_in(page, "memory")
    expect(loss).to_have_text("2")
    expect(memory).to_have_text("3.5 MB")
    expect(page.locator(".chart-best").first).to_have_text("best 1")
    expect(page.locator(".u-legend")).to_have_count(0)
    over = page.locator("figure.chart .u-over").first
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    # All charts of a grid show the same step.
    steps = page.locator(".chart-at")
    expect(steps).to_have_text(["step 2", "step 2"])
    expect(loss).to_have_text("1")
    expect(memory).to_have_text("2 MB")
    page.mouse.move(1, 1)
    expect(loss).to_have_text("2")
    expect(memory).to_have_text("3.5 MB")
    page.locator("figure.chart").first.press("ArrowRight")
    expect(steps.first).to_have_text("step 2")


def test_a_line_without_values_has_no_legend(show: Callable[..., Any]) -> None:
    page = show(ONE)
    empty = line("validation", [])
    draw(page, [{"title": "loss", "series": [line("training", [1.0]), empty]}])
    expect(page.locator(".chart-values li")).to_have_count(1)
    draw(page, [{"title": "loss", "series": [empty]}])
    expect(page.locator("main")).to_have_text("No metrics so far.", use_inner_text=True)
    expect(page.locator("figure.chart")).to_have_count(0)


@pytest.mark.parametrize("is_log", [False, True])
def test_ticks_are_neither_cut_nor_repeated(show: Callable[..., Any], is_log: bool) -> None:
    page = show(ONE)
    ranges: dict[str, tuple[str, list[float]]] = {
        "equal bytes": ("bytes", [287.11e6, 287.13e6, 287.19e6]),
        "small rates": ("", [1e-5, 2.345e-4, 4e-4]),
        "near rates": ("", [1.2341e-4, 1.2345e-4, 1.2349e-4]),
        "one": ("", [0.003, 0.003, 0.003]),
        "seconds": ("s", [0.0012, 0.0019, 0.0024]),
        "shares": ("%", [0.411, 0.412, 0.413]),
        "throughput": ("samples/s", [11_900.0, 12_100.0, 12_400.0]),
        "large": ("", [1.5e9, 1.6e9, 1.7e9]),
        "without limit": ("", [2.3, 4.1e20, 2.2e36]),
    }
    charts = [
        {"title": title, "unit": unit, "series": [line("value", [*values])]}
        for title, (unit, values) in ranges.items()
    ]
    page.evaluate("window.drawn.length = 0")
    draw(page, charts, log=is_log)
    drawn = page.evaluate("window.drawn")
    assert {each["figure"].split(".")[0] for each in drawn} == {
        f"Curve of {title}" for title in ranges
    }
    assert [each for each in drawn if each["isCut"]] == []
    for figure, found in itertools.groupby(
        sorted((each for each in drawn if each["isY"]), key=lambda each: each["figure"]),
        key=lambda each: each["figure"],
    ):
        ticks = list(found)
        texts = [each["text"] for each in ticks if each["text"]]
        assert texts, figure
        assert len(texts) == len({*texts}), (figure, texts)


def test_the_x_axis_is_short(show: Callable[..., Any]) -> None:
    page = show(ONE)
    page.evaluate("window.drawn.length = 0")
    values = [float(number % 7) for number in range(100_000)]
    draw(page, [{"title": "loss", "series": [line("training", values)]}])
    texts = [each["text"] for each in page.evaluate("window.drawn") if not each["isY"]]
    assert texts == ["20k", "40k", "60k", "80k", "100k"]
    assert not any(each["isCut"] for each in page.evaluate("window.drawn"))
    assert {"1k", "1.5k", "12,340", "2M"} == {
        page.evaluate("([value, distance]) => shortNumber(value, distance)", pair)
        for pair in ([1000, 500], [1500, 500], [12_340, 10], [2_000_000, 500_000])
    }


def test_parts_of_a_step_are_one_stack(show: Callable[..., Any]) -> None:
    page = show(ONE)
    parts = {"waiting for data": 0.025, "forward": 0.05, "backward": 0.025}
    series = [line(name, [seconds] * 3) for name, seconds in parts.items()]
    chart = {"title": "Step time", "unit": "s", "kind": "stacked", "series": series}
    draw(page, [chart])
    expect(page.locator("figure.chart")).to_have_count(1)
    note = page.locator(".chart-note")
    expect(note).to_have_text("25% waiting for data", use_inner_text=True)
    expect(page.locator(".chart-label")).to_have_text([*parts], use_inner_text=True)
    values = page.locator(".chart-value")
    expect(values).to_have_text(["25 ms", "50 ms", "25 ms"], use_inner_text=True)
    sums = page.evaluate("grid.plots.get('Step time').plot.data.slice(1).map((each) => each[0])")
    assert sums == pytest.approx([0.025, 0.075, 0.1])


def test_long_curves_keep_their_extremes(show: Callable[..., Any]) -> None:
    page = show(ONE)
    found = page.evaluate(
        """() => {
          const xs = Array.from({ length: 100000 }, (_, index) => index);
          const ys = xs.map((x) => Math.sin(x / 50));
          ys[54321] = 99; ys[60000] = null;
          const thinned = new ThinnedCurve(xs, ys);
          const [allXs, allYs] = thinned.between(0, 99999, 400);
          const [, near] = thinned.between(54000, 54800, 400);
          const one = thinned.between(20000, 70000, 400), two = thinned.between(20100, 70100, 400);
          const isInBoth = (x) => x > 20200 && x < 69900;
          return { count: allXs.length, first: allXs[0], last: allXs.at(-1), high: Math.max(...allYs), hasGap: allYs.includes(null),
            isSorted: allXs.every((x, index) => !index || x > allXs[index - 1]), near: near.length,
            isStill: JSON.stringify(one[0].filter(isInBoth)) === JSON.stringify(two[0].filter(isInBoth)) };
        }"""
    )
    assert found["count"] <= 2 * 400
    assert (found["first"], found["last"], found["high"]) == (0, 99_999, 99)
    assert found["hasGap"]
    assert found["isSorted"]
    # A short range has all of its points, and a moved range the same ones.
    assert found["near"] in range(800, 805)
    assert found["isStill"]


def test_compared_runs_are_told_apart(show: Callable[..., Any]) -> None:
    page = show(ONE)
    lines = page.evaluate(
        """() => linesAmong(Array.from({ length: 24 }, (_, index) => `local:digits-${index}`))
          .map(({ colour, dash }) => [colour, String(dash)])"""
    )
    assert len({(colour, dash) for colour, dash in lines}) == len(lines)
    assert len({colour for colour, _ in lines[:8]}) == 8
    own = page.evaluate(
        "() => [runColour('local:digits-0'), linesAmong(['local:digits-0'])[0].colour]"
    )
    assert own[0] == own[1]


def test_runs_of_other_data_have_no_winner(show: Callable[..., Any]) -> None:
    page = show(ONE, TWO)
    expect(page.locator("#compare-table .best")).not_to_have_count(0)
    expect(page.locator("main > div > .warning")).to_be_hidden()
    page = show(ONE, TWO, THREE)
    expect(page.locator("main > div > .warning")).to_have_text(
        "No run is the best of all: the runs differ in their data training (s3://a/x, s3://b/y).",
        use_inner_text=True,
    )
    expect(page.locator("#compare-table .best")).to_have_count(0)


def test_a_comparison_leaves_out_what_is_the_same(show: Callable[..., Any]) -> None:
    page = show(ONE, TWO)
    table = page.locator("#compare-table")
    expect(table).to_contain_text("train.epochs", use_inner_text=True)
    expect(table).not_to_contain_text("train.seed", use_inner_text=True)
    page.get_by_role("button", name="Show all").click()
    expect(table).to_contain_text("train.seed", use_inner_text=True)
    # A digest is cut, and is there as a whole on hover.
    digest = table.locator("tr", has_text="code.digest").locator("td code").first
    expect(digest).to_have_text("a" * 12, use_inner_text=True)
    expect(digest).to_have_attribute("title", "a" * 64)
    measure = "all => all.map((each) => each.getBoundingClientRect().width)"
    widths = table.locator("thead th").evaluate_all(measure)
    assert widths[0] == pytest.approx(widths[1], abs=1)


def test_an_axis_of_one_value_is_left_out(show: Callable[..., Any]) -> None:
    page = show(ONE, TWO, THREE, width=375)
    names = page.locator(".axis-texts.names span")
    expect(names.filter(has_text=re.compile(r"^train\.epochs$"))).not_to_have_count(0)
    # The loss of the training is that of the same steps in all runs.
    assert "training loss" not in names.all_inner_texts()
    are_inside = """names => {
      const place = document.querySelector(".parallel").getBoundingClientRect();
      const boxes = names.map((each) => each.getBoundingClientRect());
      return boxes.every(({ left, right }) => left >= place.left && right <= place.right + 1);
    }"""
    assert names.evaluate_all(are_inside)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page of a sweep shows, with a trial that has failed."""
    place = tmp_path / "swept"
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(place))
    content = sweep_document(write_sweep(place, tmp_path / "searched"))
    failed = {"state": "FAILED", "objective": None, "reason": "rank 0 failed: out of memory"}
    content["trials"].append({**content["trials"][0], **failed, "number": 6})
    for axis in content["axes"]:
        axis["values"].append(axis["values"][0])
    return content


SHOW_SWEEP = """(content) => {
  const view = new SweepView({}, content);
  document.querySelector("main").replaceChildren(view.node);
}"""


def test_a_sweep_shows_its_best_trial(show: Callable[..., Any], sweep: dict[str, Any]) -> None:
    page = show(ONE)
    page.evaluate(SHOW_SWEEP, sweep)
    expect(page.locator("h1")).to_have_text(re.compile("^searched "), use_inner_text=True)
    best = min(each["objective"] for each in sweep["trials"] if each["objective"] is not None)
    assert float(page.inner_text("#sweep-best .key-number")) == pytest.approx(best, rel=1e-3)
    command = f"cloudtrain sweep best {sweep['sweep']} --write best.yaml"
    expect(page.locator("#sweep-best .command code")).to_have_text(command, use_inner_text=True)
    rows = page.locator("#sweep-trials tbody tr")
    expect(rows).to_have_count(7)
    cells = [rows.nth(place).locator("td").first.inner_text() for place in range(6)]
    values = [float(cell) for cell in cells]
    assert values == sorted(values)
    expect(rows.last).to_contain_text("out of memory", use_inner_text=True)
    expect(page.locator("#sweep-history text").nth(4)).to_be_attached()
    lines = page.locator("#sweep-parallel .run-line")
    expect(lines).to_have_count(7)
    colours = lines.evaluate_all("all => all.map((each) => getComputedStyle(each).stroke)")
    # The one without an objective has none of the scale's colours; the worst and the best have its ends.
    assert len({*colours}) == 7
    legend = page.locator(".scale-legend")
    expect(legend).to_have_text(re.compile("^worst "), use_inner_text=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_reports_and_sweeps_are_accessible(
    show: Callable[..., Any], sweep: dict[str, Any], width: int, scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="install it: make test-all"
    ).Axe()

    def check(page: Any) -> None:
        violations = axe.run(page).response["violations"]
        found = [
            (each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations
        ]
        assert found == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    check(show(ONE, width=width, scheme=scheme))
    page = show(ONE, TWO, THREE, width=width, scheme=scheme)
    page.get_by_role("button", name="Show all").click()
    check(page)
    page.evaluate(SHOW_SWEEP, sweep)
    page.wait_for_selector("#sweep-importance")
    check(page)


def test_a_dark_page_is_printed_on_white(show: Callable[..., Any]) -> None:
    page = show(ONE, TWO, scheme="dark")
    ink = "grid => [...grid.plots.values()][0].ink('var(--series-0)')"
    grid = "cloudtrain.view.grid"
    before = page.evaluate(f"({ink})({grid})")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    body = page.locator("body")
    expect(body).to_have_css("background-color", "rgb(255, 255, 255)")
    expect(body).to_have_css("color", "rgb(0, 0, 0)")
    expect(page.locator(".controls").first).to_be_hidden()
    page.wait_for_function(f"before => ({ink})({grid}) !== before", arg=before)
    page.emulate_media(media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"before => ({ink})({grid}) === before", arg=before)
