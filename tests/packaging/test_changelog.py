"""The changelog has a section for each version, whose changes are grouped by what a user does."""

import re

import pytest
from support.jobs import REPOSITORY

pytestmark = pytest.mark.promise

TEXT = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
GROUPS = [
    "Train here",
    "Plan and submit",
    "Rehearse",
    "Watch",
    "Resume and checkpoints",
    "Sweeps",
    "Evaluate",
    "Serving",
    "Python API",
    "Security",
    "Docs and development",
]
VERSIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]


def test_unreleased_precedes_the_released_versions() -> None:
    versions = re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(
        re.fullmatch(r"\[\d+\.\d+\.\d+\](?: - \d{4}-\d{2}-\d{2})?", version)
        for version in versions[1:]
    )
    assert len(versions) == len(set(versions)) > 1


@pytest.mark.parametrize("section", VERSIONS, ids=lambda section: section.partition("\n")[0])
def test_each_version_has_known_groups_in_order(section: str) -> None:
    groups = re.findall(r"^### (.+)$", section, flags=re.MULTILINE)
    assert groups == [group for group in GROUPS if group in groups]
    assert groups or section.startswith("[Unreleased]")
    assert all("\n- " in part for part in section.split("\n### ")[1:])
    assert "\n- " not in section.partition("\n### ")[0]


def test_no_change_precedes_the_first_version() -> None:
    assert "\n- " not in TEXT.partition("\n## ")[0]


def test_each_change_is_one_line() -> None:
    assert [line for line in TEXT.splitlines() if line.startswith(" ")] == []


def test_lines_have_at_most_130_characters() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 130] == []
