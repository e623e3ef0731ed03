"""The dashboard and a browser's tabs, for tests of its pages."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.jobs import command

WAIT_MILLISECONDS = 60_000
"""Longest wait for anything that a page does: so much that only a fault takes longer, however slow the machine."""

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@dataclass
class Tab:
    """A page of the browser, and what it has reported."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("h1")

    def chart(self, title: str) -> Any:
        """Return the first visible chart whose title has these words."""
        return self.page.locator(
            "figure.chart:visible", has=self.page.locator("figcaption", has_text=title)
        ).first

    def wait_points(self, title: str, count: int) -> None:
        """Wait until that chart has at least this many points."""
        check = """([title, count]) => {
          const isMeant = (each) => each.checkVisibility() &&
            each.querySelector("figcaption").textContent.toLowerCase().includes(title.toLowerCase());
          const found = [...document.querySelectorAll("figure.chart")].find(isMeant);
          return Number(found?.dataset.points) >= count;
        }"""
        self.page.wait_for_function(check, arg=[title, count])

    def wait_listed(self) -> None:
        """Wait until the list says which runs there are. A report has them from the start."""
        self.page.wait_for_function("() => window.cloudtrain?.source.isLoading === false")

    def wait_read(self, run: str, end: str) -> None:
        """Wait until the page of a run has its whole log, which ends with this event or line.

        Nothing arrives afterwards: what the page does not show then, it never shows.
        """
        check = """([reference, end]) => {
          const { entry, log } = window.cloudtrain?.view ?? {};
          if (entry?.reference !== reference) return false;
          return entry.events.at(-1)?.event === end || log.lines.at(-1)?.text === end;
        }"""
        self.page.wait_for_function(check, arg=[f"local:{run}", end])


@dataclass(frozen=True)
class Served:
    """A dashboard that runs."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0

    @property
    def token(self) -> str:
        return self.url.partition("#token=")[2]

    def address(self, route: str) -> str:
        """Return the address of a page, for a browser that has the token already."""
        return f"{self.url.partition('#')[0]}#{route}"

    def ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        status = connection.getresponse().status
        connection.close()
        return status


def expect(found: Any) -> Any:
    """Return Playwright's assertions of a page or a part of it, each of which waits until it holds."""
    from playwright.sync_api import expect as assertions

    return assertions(found)


@contextmanager
def browser_of(sync_playwright: Callable[[], Any]) -> Iterator[Any]:
    """Start Chromium, and end it after the block."""
    from playwright.sync_api import expect as assertions

    assertions.set_options(timeout=WAIT_MILLISECONDS)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield started
        started.close()


def open_tab(browser: Any, width: int, height: int, scheme: str) -> tuple[Any, Tab]:
    """Return a context of the browser and its tab, which keeps errors and requests."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(WAIT_MILLISECONDS)
    found = Tab(context.new_page())
    found.page.on(
        "console", lambda each: found.errors.append(each.text) if each.type == "error" else None
    )
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("request", lambda each: found.requests.append(each.url))
    return context, found


def start_dashboard(home: Path, folder: Path, *options: str) -> Served:
    """Start a dashboard of the runs in a home.

    Args:
        home: The home.
        folder: The present folder of the process, and its user's home.
        options: More options of the command.
    """
    environ = {**os.environ, "CLOUDTRAIN_HOME": str(home), "HOME": str(folder)}
    argv = [str(command()), "dashboard", "--port", "0", "--json", *options]
    process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True, cwd=folder)
    text = ""
    while not text.rstrip().endswith("}"):
        line = process.stdout.readline() if process.stdout else ""
        assert line, "the dashboard has ended"
        text += line
    return Served(json.loads(text)["url"], process)


def end_dashboard(process: subprocess.Popen[str]) -> None:
    """End a dashboard as Ctrl-C does."""
    if process.stdout:
        process.stdout.close()
    process.send_signal(signal.SIGINT)
    process.wait(300)
    assert process.returncode in (0, 130, -signal.SIGINT)
