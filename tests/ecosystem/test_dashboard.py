"""The dashboard and the report in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.jobs import Cli, command
from support.recorded_runs import step_events, write_run
from support.recorded_sweeps import write_sweep

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="Chromium is not installed (make test-all)"
)

PICTURES = Path(__file__).parents[2] / "build" / "pictures"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
ONE, TWO, THREE = (
    "digits-261120-101500-000001",
    "digits-261120-111500-000002",
    "other-261120-121500-000003",
)
ATTACK = '<img src=x onerror="window.attacked=1"><script>window.attacked=1</script>\x1b]0;x\x07'
WAIT_MILLISECONDS = 60_000


@dataclass
class Tab:
    """A page of the browser, and what it has reported."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("h1", timeout=WAIT_MILLISECONDS)

    def chart(self, title: str) -> Any:
        return self.page.locator(
            "figure.chart", has=self.page.locator("figcaption", has_text=title)
        ).first

    def wait_points(self, title: str, count: int) -> None:
        """Wait until a chart has at least this many points."""
        check = "([node, count]) => Number(node.dataset.points) >= count"
        handle = self.chart(title).element_handle(timeout=WAIT_MILLISECONDS)
        self.page.wait_for_function(check, arg=[handle, count], timeout=WAIT_MILLISECONDS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (make test-all)"
    )
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a tab of a size. At the end no tab may have reported an error."""
    opened: list[tuple[Any, Tab]] = []

    def open_tab(width: int = 1280, height: int = 900, scheme: str = "light") -> Tab:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        found = Tab(context.new_page())
        found.page.on(
            "console", lambda each: found.errors.append(each.text) if each.type == "error" else None
        )
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("request", lambda each: found.requests.append(each.url))
        opened.append((context, found))
        return found

    yield open_tab
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


@dataclass(frozen=True)
class Served:
    """A dashboard that runs."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        status = connection.getresponse().status
        connection.close()
        return status

    @property
    def token(self) -> str:
        return self.url.partition("#token=")[2]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    running: list[subprocess.Popen[str]] = []

    def start(home: Path, *options: str) -> Served:
        environ = {**os.environ, "CLOUDTRAIN_HOME": str(home), "HOME": str(tmp_path)}
        argv = [str(command()), "dashboard", "--port", "0", "--json", *options]
        process = subprocess.Popen(
            argv, env=environ, stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        running.append(process)
        text = ""
        while not text.rstrip().endswith("}"):
            line = process.stdout.readline() if process.stdout else ""
            assert line, "the dashboard has ended"
            text += line
        return Served(json.loads(text)["url"], process)

    yield start
    for process in running:
        if process.stdout:
            process.stdout.close()
        process.send_signal(signal.SIGINT)
        process.wait(300)
        assert process.returncode in (0, 130, -signal.SIGINT)


def test_the_list_filters_sorts_and_groups(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(home).url)
    rows = found.page.locator("table.runs tbody tr")
    rows.nth(2).wait_for(timeout=WAIT_MILLISECONDS)
    found.page.wait_for_selector("text=team=vision", timeout=WAIT_MILLISECONDS)
    assert "token" not in found.page.url
    found.page.get_by_label("filter").fill("vision")
    assert rows.count() == 1
    assert ONE in rows.inner_text()
    found.page.get_by_label("filter").fill("")
    found.page.get_by_label("group by").select_option("tag team")
    assert found.page.locator("tr.group").all_inner_texts() == [
        "(without) (1)",
        "text (1)",
        "vision (1)",
    ]
    found.page.get_by_label("group by").select_option("")
    found.page.get_by_label("state").select_option("FAILED")
    assert THREE in rows.inner_text()
    found.page.get_by_label("state").select_option("")
    found.page.get_by_role("button", name="run").click()
    names = found.page.locator("table.runs tbody th a").all_inner_texts()
    assert names == sorted(names)


def test_a_runs_page_shows_every_point_and_the_hovered_value(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(home).url)
    found.page.locator("table.runs a", has_text="digits").last.click()
    found.wait_points("loss", 103)
    chart = found.chart("loss")
    assert chart.get_attribute("data-points") == "103"  # 100 steps and 3 evaluations
    chart.scroll_into_view_if_needed()
    chart.focus()
    for _ in range(60):
        chart.press("ArrowRight")
    step = int(chart.locator(".u-legend tr").first.locator(".u-value").inner_text())
    shown = chart.locator(".u-legend tr", has_text="train/loss").locator(".u-value").inner_text()
    assert float(shown) == pytest.approx(2.0 / (1 + step / 10), rel=1e-3)
    shown = found.page.inner_text("main")
    for text in (
        "Confusion matrix",
        "hello from a script",
        "file:///c/step-50",
        "train.epochs",
        "team=vision",
    ):
        assert text in shown
    found.page.get_by_label("search").fill("nothing like this")
    assert "no line matches" in found.page.inner_text("#log-section")


def test_a_failed_run_shows_its_explanation(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    found.page.goto(f"{served.url.partition('#')[0]}#/run/local:{THREE}")
    found.page.wait_for_selector("text=Why it failed", timeout=WAIT_MILLISECONDS)
    assert "ValueError: broken" in found.page.inner_text(".message")
    assert found.page.locator(".actions button").first.inner_text() == "Copy command after the fix…"
    found.page.click("text=The log around it")
    assert "ValueError: broken" in found.page.inner_text("pre[aria-label='Log around the failure']")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_a_runs_page_shows_where_its_time_went(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab], width: int, scheme: str
) -> None:
    found = tab(width=width, scheme=scheme)
    served = serve(home)
    found.open(served.url)
    found.page.goto(f"{served.url.partition('#')[0]}#/run/local:{THREE}")
    part = found.page.locator("#ledger-section")
    part.locator(".kind-repeated").first.wait_for(timeout=WAIT_MILLISECONDS)
    assert "0% of 30m was training that was kept" in part.inner_text()
    # Each kind has its name, not its colour alone.
    assert part.locator(".part.kind-repeated").inner_text() == "repeated"
    assert "repeated" in part.locator("table").inner_text()
    assert "saves and lost work took 30m of 30m (100%)" in part.inner_text()
    bar = part.locator(".parts-bar")
    assert bar.get_attribute("aria-label").startswith("attempt 1: start ")
    widths = bar.evaluate("node => [...node.children].map((each) => each.offsetWidth)")
    assert sum(widths) == pytest.approx(bar.evaluate("node => node.clientWidth"), abs=2)
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sweep_is_drawn_and_leads_to_its_trials(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(home).url)
    found.page.click(".sweeps a", timeout=WAIT_MILLISECONDS)
    found.page.wait_for_selector("#sweep-importance", timeout=WAIT_MILLISECONDS)
    assert found.page.locator("#sweep-history circle").count() == 6
    assert found.page.locator("#sweep-history circle.faint").count() == 1
    assert found.page.locator("#sweep-parallel polyline").count() == 6
    assert found.page.locator("#sweep-importance .lane").count() == 3
    assert "(best)" in found.page.locator("#sweep-trials tbody tr").first.inner_text()


def test_zooming_fetches_the_range(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    write_run(home, "long-261120-131500-000004", step_events(20_000))
    found = tab()
    served = serve(home)
    found.open(served.url)
    found.page.goto(f"{served.url.partition('#')[0]}#/run/local:long-261120-131500-000004")
    found.wait_points("loss", 500)
    chart = found.chart("loss")
    is_read = "(node) => node.getAttribute('aria-label').includes('at step 20000')"
    found.page.wait_for_function(is_read, arg=chart.element_handle(), timeout=WAIT_MILLISECONDS)
    thinned = int(chart.get_attribute("data-points"))
    assert thinned <= 2_100
    chart.focus()
    for _ in range(4):
        chart.press("+")
    found.page.wait_for_function(
        "(node) => Number(node.dataset.points) <= 1300 && Number(node.dataset.points) > 1200",
        arg=chart.element_handle(),
        timeout=WAIT_MILLISECONDS,
    )  # a sixteenth of 20,000 steps, none of them left out
    found.page.get_by_role("button", name="Reset zoom").first.click()
    found.page.wait_for_function(
        "([node, count]) => Number(node.dataset.points) === count",
        arg=[chart.element_handle(), thinned],
        timeout=WAIT_MILLISECONDS,
    )


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
    assert "cloudtrain stop" in found.page.inner_text("dialog")
    found.page.locator("dialog").get_by_role("button", name="Stop").click()
    found.page.wait_for_selector(".run-head .badge.stopped", timeout=WAIT_MILLISECONDS)
    assert cli("status", run, "--json", environ=environ).json["state"] == "STOPPED"


def test_a_comparison_shows_differences_and_winners(
    home: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    served = serve(home)
    found.open(served.url)
    for run in (ONE, TWO, THREE):
        found.page.get_by_label(f"select {run}").check(timeout=WAIT_MILLISECONDS)
    found.page.get_by_role("button", name="Compare selected").click()
    found.page.wait_for_selector("text=Parallel coordinates", timeout=WAIT_MILLISECONDS)
    text = found.page.inner_text("main")
    assert "train.epochs" in text
    assert found.page.locator(".best").count() >= 1
    assert found.page.locator("polyline").count() == 3
    found.wait_points("loss", 200)


def write_report(cli: Cli, home: Path, path: Path, *runs: str) -> Path:
    cli("report", *runs, "-o", str(path), environ={"CLOUDTRAIN_HOME": str(home)})
    return path


def test_a_report_opens_from_disk_without_a_server(
    home: Path, cli: Cli, tmp_path: Path, tab: Callable[..., Tab]
) -> None:
    path = write_report(cli, home, tmp_path / "report.html", ONE)
    found = tab()
    found.open(path.as_uri())
    assert found.chart("loss").get_attribute("data-points") == "103"
    assert {urlsplit(url).scheme for url in found.requests} <= {"file", "data"}
    several = write_report(cli, home, tmp_path / "several.html", ONE, TWO)
    found.open(several.as_uri())
    assert "Settings that differ" in found.page.inner_text("main")
    found.page.get_by_role("link", name=f"local:{ONE}").click()
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
        assert found.page.evaluate("window.attacked") is None
        assert found.page.locator("main img, main script").count() == 0
        assert "<img src=x" in found.page.inner_text("main")


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
    found.page.goto(f"{served.url.partition('#')[0]}#/run/local:{run}")
    found.page.wait_for_selector("figure.chart", timeout=WAIT_MILLISECONDS)
    assert found.page.evaluate("window.attacked") is None
    assert found.page.locator("main img, main script").count() == 0


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
    found.page.wait_for_selector("table.runs tbody tr", timeout=WAIT_MILLISECONDS)
    served.process.send_signal(signal.SIGINT)
    served.process.wait(300)
    found.page.wait_for_selector(".banner:not([hidden])", timeout=WAIT_MILLISECONDS)
    assert "connection to cloudtrain dashboard is lost" in found.page.inner_text(".banner")
    found.errors.clear()  # the browser reports each refused connection


def test_an_empty_home_says_how_to_start(
    tmp_path: Path, serve: Callable[..., Served], tab: Callable[..., Tab]
) -> None:
    found = tab()
    found.open(serve(tmp_path / "empty").url)
    found.page.wait_for_selector("text=Start one: cloudtrain submit", timeout=WAIT_MILLISECONDS)


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
    pages = {
        "list": "/",
        "run": f"/run/local:{ONE}",
        "failed": f"/run/local:{THREE}",
        "compare": several,
    }
    pages["sweep"] = "/sweep/searched"
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, route in pages.items():
        found.page.goto(f"{served.url.partition('#')[0]}#{route}")
        content = {"list": "main table.runs tbody tr", "sweep": "#sweep-importance"}.get(
            name, "figure.chart"
        )
        found.page.wait_for_selector(content, timeout=WAIT_MILLISECONDS)
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
