"""Paths in `file://` URIs: names of files are bytes, which need not be UTF-8."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloudtrain_runtime.contract.file_uri import path_of

NAMES = st.binary(min_size=1, max_size=30).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@given(NAMES)
def test_a_path_is_that_of_its_uri(name: bytes) -> None:
    path = Path("/runs") / os.fsdecode(name)
    assert path_of(path.as_uri()) == path


@pytest.mark.parametrize("path", ["/a/b", "a/b", "/a%20b"])
def test_a_plain_path_is_itself(path: str) -> None:
    assert path_of(path) == Path(path)
