"""Fixtures with running sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sandboxes import Served, serve


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("sandbox")) as served:
        yield served


@pytest.fixture
def sandbox(_shared: Served) -> Iterator[Served]:
    """Return the sandbox that the tests share. No faults are injected before and after the test."""
    _shared.set_faults()
    yield _shared
    _shared.set_faults()


@pytest.fixture
def own_sandbox(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that serves a sandbox for one test."""
    return lambda *arguments: serve(tmp_path / "own-sandbox", *arguments)
