"""The changelog follows Keep a Changelog."""

import re

import pytest
from support.jobs import REPOSITORY

pytestmark = pytest.mark.promise

TEXT = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_unreleased_precedes_the_released_versions() -> None:
    versions = re.findall(r"^## (.+)$", TEXT, flags=re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(
        re.fullmatch(r"\[\d+\.\d+\.\d+\](?: - \d{4}-\d{2}-\d{2})?", version)
        for version in versions[1:]
    )
    assert len(versions) == len(set(versions))


def test_each_version_has_each_kind_of_change_once() -> None:
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.+)$", section, flags=re.MULTILINE)
        assert set(kinds) <= set(KINDS)
        assert len(kinds) == len(set(kinds)) > 0


def test_no_change_precedes_the_first_version() -> None:
    assert "\n- " not in TEXT.partition("\n## ")[0]


def test_lines_have_at_most_130_characters() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 130] == []
