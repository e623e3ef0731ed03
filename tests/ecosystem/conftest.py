"""Fixtures of the tests with other projects' programs."""

from __future__ import annotations

import pytest
from support.jobs import Cli


@pytest.fixture
def cli(cli_process: Cli) -> Cli:
    """Run the command as a user of the other program does: in an interpreter of its own."""
    return cli_process
