"""The decision records: their form, numbers, index and links."""

import re
from pathlib import Path

import pytest
from support.jobs import REPOSITORY

FOLDER = REPOSITORY / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_index_lists_each_record_once_in_order() -> None:
    assert re.findall(r"^\| \[\d{3}\]\(([^)]+)\)", INDEX, flags=re.MULTILINE) == [
        path.name for path in RECORDS
    ]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_record_has_title_and_three_parts(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert text.startswith(f"# {record.name[:3]}: ")
    parts = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert parts == ["Context", "Decision", "Consequences"]


@pytest.mark.parametrize("path", [*RECORDS, FOLDER / "README.md"], ids=lambda path: path.stem)
def test_links_of_decisions_exist(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (FOLDER / link).exists(), link
