"""Sandboxes for the tests of this folder."""

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
    """Return the sandbox that the tests share, without injected faults before and after."""
    _shared.set_faults()
    yield _shared
    _shared.set_faults()


@pytest.fixture
def own_sandbox(tmp_path: Path) -> Callable[..., Any]:
    """Serve sandboxes of one test's own; each ends with the test."""
    return lambda *arguments: serve(tmp_path / "own-sandbox", *arguments)
