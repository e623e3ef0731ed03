"""Files that a program surely reads, by its source."""

from __future__ import annotations

import ast

import pytest

from cloudtrain.job.static_analysis.opened_files import opened_files
from cloudtrain.job.static_analysis.syntax import Module

READ = (
    'open("a.csv")',
    'open("a.csv", "rb")',
    'open("./a.csv", mode="r")',
    'json.load(open("a.csv"))',
    'Path("a.csv").read_text()',
    'Path("a.csv").open()',
    'open(Path("a.csv"))',
    'gzip.open("a.csv", "rt")',
    'pd.read_csv("a.csv", sep=";")',
    'torch.load("a.csv")',
)
NOT_SURELY = (
    'open("a.csv", "w")',
    'open("a.csv", mode)',
    "open(name)",
    'Path("a.csv").open("a")',
    'gzip.open("a.csv", "wt")',
    'torch.load("a.csv") if os.path.exists("a.csv") else None',
    'torch.load("a.csv") if Path("a.csv").is_file() else None',
    'torch.save({}, "a.csv"); torch.load("a.csv")',
    'open(f"{folder}/a.csv")',
    'print("a.csv")',
)


@pytest.mark.parametrize("code", READ)
def test_a_file_that_is_read_is_found(code: str) -> None:
    assert opened_files([Module(ast.parse(f"\n{code}"), "train.py")]) == {"a.csv": "train.py:2"}


@pytest.mark.parametrize("code", NOT_SURELY)
def test_a_file_that_may_be_missing_is_not(code: str) -> None:
    assert opened_files([Module(ast.parse(code), "train.py")]) == {}
