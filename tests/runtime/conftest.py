"""What tests of the runtime share."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.checkpoint_folders import process_group

from cloudtrain_runtime.process.run_context import Context, read_context


@pytest.fixture
def place() -> Iterator[Context]:
    """The place of a rank alone, which has joined its process group."""
    found = replace(read_context({}), run="demo")
    with process_group(found):
        yield found
