"""The libraries that a fork server imports for the ranks of a Task."""

import sys
from pathlib import Path

import pytest

from cloudtrain_runtime.launcher.leading_imports import find_leading, import_leading

SOURCE = '''"""A Task."""
from __future__ import annotations
import torch, numpy as np
from sklearn.datasets import load_digits
from .numpy import own
from torchmetrics import Accuracy
import scipy.stats
{statement}
import PIL.Image
'''


@pytest.mark.parametrize(
    ("statement", "more"),
    [("", ["PIL.Image"]), ("import os\nos.environ['A'] = '1'", []), ("if True: pass", [])],
)
def test_imports_before_the_first_other_statement(statement: str, more: list[str]) -> None:
    found = list(find_leading(SOURCE.format(statement=statement).encode()))
    assert found == ["numpy", "sklearn.datasets", "scipy.stats", *more]


@pytest.mark.parametrize(
    "source", [b"import numpy.does_not_exist", b"import numpy(", b"\xff", None]
)
def test_what_is_wrong_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: bytes | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if source is not None:
        (tmp_path / "wrong_task.py").write_bytes(source)
    import_leading("wrong_task")
    assert "wrong_task" not in sys.modules
