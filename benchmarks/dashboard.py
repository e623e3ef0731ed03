"""Measure the dashboard in headless Chromium: lists, curves, a moved range, and its server's processor time.

    .venv/bin/python benchmarks/dashboard.py [--rounds 5] [--write FILE]

It needs Chromium and playwright, as `make test-all` installs them. Runs and browser share the machine, and no GPU
draws. The seconds of a page count from its address to the frame that shows everything.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from measure import BIN, Benchmark, Peer, Session, alternate, table

RUNS, STEPS, METRICS, FRAMES = 1_000, 100_000, 10, 60
SHOWN_ROWS = 50
"""Rows that no screen shows are made when it is scrolled to them."""
ROWS = (
    f"/^{RUNS // 1000},?000 runs/m.test(document.querySelector('main').innerText)"
    f" && document.querySelectorAll('table.runs tbody tr').length >= {SHOWN_ROWS}"
)
"""Whether the list is complete, in the page."""
LONG = "long-261120-101500-0000aa"
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="nothing; the goals are times that feel immediate",
    goal=f"{METRICS} curves of {STEPS:,} points drawn in 0.2 s, moved at 30 frames/s, {RUNS:,} runs in 1 s, "
    "an idle server below 2 % of a core, four followed runs below 10 %",
    mechanism="all rows, all curves, and the points of the live runs were on the page",
    rounds=5,
    options={"seconds": (20, "seconds over which processor time is measured")},
    packages=("starlette", "uvicorn", "playwright"),
)
LIVE = """\
import time
import cloudtrain_runtime
for step in range(1, 100_000):
    cloudtrain_runtime.report(step, total=100_000, loss=1.0 / step, accuracy=0.5)
    time.sleep(0.1)
"""
DRAW = """async ([steps, metrics, frames]) => {
  const xs = Array.from({ length: steps }, (_, index) => index);
  const charts = Array.from({ length: metrics }, (_, at) => ({ title: `metric ${at}`, series: [{ label: `metric ${at}`,
    colour: "#2563eb", dash: [], origin: 0,
    curve: { steps: xs, times: xs, values: xs.map((x) => Math.sin(x / 900 + at) + Math.random()) } }] }));
  const frame = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
  const grid = new ChartGrid("benchmark");
  document.body.replaceChildren(grid.node);
  const began = performance.now();
  grid.show(charts);
  await frame();
  const drawn = performance.now() - began;
  const first = performance.now();
  for (let index = 0; index < frames; index += 1) {
    grid.setZoom([index * 100, steps / 2 + index * 100]);
    await new Promise(requestAnimationFrame);
  }
  return { drawn: drawn / 1000, rate: (frames * 1000) / (performance.now() - first) };
}"""


@contextmanager
def serve(home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a dashboard over a folder of runs; yield its address and its process."""
    argv = [str(BIN / "cloudtrain"), "dashboard", "--port", "0", "--json"]
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(home)}
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            text = ""
            while process.stdout and not text.rstrip().endswith("}"):
                text += process.stdout.readline()
            yield json.loads(text)["url"], psutil.Process(process.pid)
        finally:
            process.terminate()


def share_of_core(process: psutil.Process, seconds: float) -> float:
    """Return the processor time of a process over a period, in percent of a core."""
    begin, began = sum(process.cpu_times()[:2]), time.perf_counter()
    time.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - begin) / (time.perf_counter() - began)


def start_live(home: Path, folder: Path, count: int) -> list[str]:
    """Start local runs that report ten times a second; return their ids."""
    folder.mkdir()
    (folder / "train.py").write_text(LIVE)
    job = "name: live\ncode: {script: train.py}\ncluster: {instance_type: ml.m5.large, processes_per_instance: 1}\n"
    (folder / "job.yaml").write_text(job)
    argv = [str(BIN / "cloudtrain"), "submit", str(folder / "job.yaml"), "--local", "--json"]
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(home)}
    done = [
        subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
        for _ in range(count)
    ]
    return [json.loads(each.stdout)["run"] for each in done]


def measure(session: Session) -> list[str]:
    """Return the tables of times and of processor time."""
    from playwright.sync_api import sync_playwright
    from support.recorded_runs import step_events, write_run

    folder = Path(tempfile.mkdtemp())
    many, long, live = folder / "many", folder / "long", folder / "live"
    for number in range(RUNS):
        write_run(many, f"run-261120-101500-{number:06x}", step_events(20))
    write_run(
        long, LONG, step_events(STEPS, names=[f"metric_{index}" for index in range(METRICS - 1)])
    )
    with sync_playwright() as driver, serve(many) as (many_url, idle), serve(long) as (long_url, _):
        chromium = shutil.which("chromium") or sys.exit("Chromium is not installed: make test-all")
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )

        def show(url: str, condition: str) -> float:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(url)
            page.wait_for_function(f"() => {condition}", polling="raf", timeout=120_000)
            seconds = page.evaluate("performance.now() / 1000")
            session.require(bool(page.evaluate(f"() => {condition}")), "the page is incomplete")
            page.close()
            return float(seconds)

        def draw() -> dict[str, float]:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(long_url)
            page.wait_for_selector("h1")
            found: dict[str, float] = page.evaluate(DRAW, [STEPS, METRICS, FRAMES])
            session.require(page.locator("figure.chart").count() == METRICS, "charts are missing")
            page.close()
            return found

        full = "[...document.querySelectorAll('figure.chart')].filter((each) => each.dataset.points > 500)"
        charts = f"{full}.length >= {METRICS}"
        pages = alternate(
            [Peer(f"list of {RUNS:,} runs", lambda: show(many_url, ROWS), "1 s")], session.rounds
        )
        drawn = alternate([Peer(f"{METRICS} curves of {STEPS:,} points", draw)], session.rounds)
        opened = browser.new_page()
        opened.goto(long_url)
        opened.wait_for_selector("table.runs a")
        began = time.perf_counter()
        opened.click("table.runs a")
        opened.wait_for_selector("[role=tab]")
        opened.get_by_role("tab", name="Charts").click()
        opened.wait_for_function(f"() => {charts}", timeout=300_000)
        first_seconds = time.perf_counter() - began
        opened.close()
        lines = [
            *table("page", pages),
            "",
            *table("all values at once, no thinning", drawn, figure="drawn", unit="s to the frame"),
            "",
            *table("moving the zoomed range", drawn, figure="rate", unit="frames/s", digits=0),
            "",
            f"- First visit of a run of {STEPS:,} steps and {METRICS} metrics, its log read: {first_seconds:.1f} s.",
        ]
        watched = browser.new_page()
        watched.goto(many_url)
        watched.wait_for_function(f"() => {ROWS}")
        time.sleep(5)
        share = share_of_core(idle, session.options.seconds)
        lines.append(f"- Idle server, list of {RUNS:,} ended runs open: {share:.1f} % of a core.")
        watched.close()
        lines.append(f"- {follow_live(session, browser, live, folder)}")
        browser.close()
    shutil.rmtree(folder, ignore_errors=True)
    return lines


def follow_live(session: Session, browser: Any, home: Path, folder: Path) -> str:
    """Return a sentence about the server's processor time while a page compares four live runs."""
    runs = start_live(home, folder / "job", 4)
    try:
        with serve(home) as (url, process):
            page = browser.new_page()
            page.goto(url)
            page.wait_for_selector("table.runs a")
            names = ",".join(f"local:{run}" for run in runs)
            page.evaluate(f"location.hash = '#/compare/{names}'")
            page.wait_for_selector("figure.chart", timeout=120_000)
            before = int(page.get_attribute("figure.chart", "data-points") or 0)
            share = share_of_core(process, session.options.seconds)
            after = int(page.get_attribute("figure.chart", "data-points") or 0)
            session.require(after > before, "the live runs were not followed")
            page.close()
    finally:
        for run in runs:
            argv = [str(BIN / "cloudtrain"), "stop", f"local:{run}", "--yes"]
            subprocess.run(
                argv,
                env={**os.environ, "CLOUDTRAIN_HOME": str(home)},
                capture_output=True,
                check=False,
            )
    return f"Server that follows four live runs with ten reports a second each: {share:.1f} % of a core."


if __name__ == "__main__":
    BENCHMARK.main(measure)
