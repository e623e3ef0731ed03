"""Misspelt environment variables of cloudtrain are named, and no variable of its own is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.jobs import Cli

from cloudtrain.cli.variables import NAMES, PREFIX, misspelt_variables
from cloudtrain.settings.settings import SETTINGS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("CLOUDTRAIN_REGIN", "CLOUDTRAIN_REGION"),
        ("CLOUDTRAIN_BUKET", "CLOUDTRAIN_BUCKET"),
        ("CLOUDTRAIN_SUBNET", "CLOUDTRAIN_SUBNETS"),
        ("CLOUDTRAIN_home", "CLOUDTRAIN_HOME"),
    ],
)
def test_a_misspelt_variable_has_a_warning(cli: Cli, name: str, near: str) -> None:
    done = cli("list", "--json", environ={name: "x"})
    assert done.err.count(f'warning: {name} is not read; did you mean "{near}"?') == 1
    assert done.json == {"runs": []}


def test_the_variables_of_cloudtrain_have_no_warning() -> None:
    found = set()
    # The changelog quotes misspelt ones.
    others = (Path(__file__), ROOT / "docs" / "changelog.md")
    for folder in ("sdk", "entrypoints", "tests", "docs", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".json") and path not in others:
                found |= set(re.findall(PREFIX + r"[A-Z0-9_]+", path.read_text("utf-8")))
    found |= set(re.findall(PREFIX + r"[A-Z0-9_]+", (ROOT / "Makefile").read_text("utf-8")))
    assert {PREFIX + name for name in NAMES} <= found
    assert {name.upper() for name in SETTINGS} <= set(NAMES)
    assert not list(misspelt_variables(found))
