"""Fixtures for tests of the runtime."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.checkpoint_folders import process_group

from cloudtrain_runtime.process.run_context import Context, read_context


@pytest.fixture
def context() -> Iterator[Context]:
    """The context of a single rank that has joined its process group."""
    found = replace(read_context({}), run="demo")
    with process_group(found):
        yield found
