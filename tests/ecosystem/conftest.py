"""Fixtures of the tests with other projects' programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.dashboard_tabs import browser_of
from support.jobs import Cli


@pytest.fixture
def cli(cli_process: Cli) -> Cli:
    """Run the command as a user of the other program does: in an interpreter of its own."""
    return cli_process


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests of a module."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (make test-all)"
    )
    with browser_of(playwright.sync_playwright) as started:
        yield started
