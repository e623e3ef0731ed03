"""docs/security.md names a test for each claim, and each of these tests exists."""

from __future__ import annotations

import ast
import re

import pytest
from support.jobs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "security.md").read_text()
INPUTS = (REPOSITORY / "docs" / "reference" / "outside-inputs.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE + INPUTS)))
WITHOUT = {"What is trusted", "Reporting"}
"""Sections without claims that a test can prove."""


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_each_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_section_names_a_test() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) > 10
    without_test = {section.partition("\n")[0] for section in sections if "`tests/" not in section}
    assert without_test - WITHOUT == set()


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (REPOSITORY / "docs" / link).exists(), link


def test_a_reviewer_reads_it_in_five_minutes() -> None:
    text = "\n".join(
        line for line in PAGE.splitlines() if not line.startswith("|")
    )  # tables are for looking up
    words = re.sub(r"\(?`tests/[^`]+`[,)]*", "", text).split()
    assert len(words) < 1300
