"""docs/migrating.md names fields that exist."""

from __future__ import annotations

import re

import pytest
from support.jobs import REPOSITORY

from cloudtrain.job.schema import job_schema

PAGE = (REPOSITORY / "docs" / "migrating.md").read_text(encoding="utf-8")
TABLES = [line for line in PAGE.splitlines() if line.startswith("| `")]
FIELDS = sorted(
    {
        field
        for row in TABLES
        for field in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)\b", row.split(" | ", 1)[1])
        if field.split(".")[0] in job_schema()["properties"]
    }
)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_in_the_tables_exists(field: str) -> None:
    """The last part of its path is a property of a section of the schema."""
    definitions = [job_schema(), *job_schema()["$defs"].values()]
    names = {name for each in definitions for name in each.get("properties", {})}
    assert field.rpartition(".")[2] in names


@pytest.mark.parametrize("field", ["module", "command", "include", "metrics", "private_registry"])
def test_what_exists_is_not_called_missing(field: str) -> None:
    rows = [row for row in TABLES if field in row]
    assert rows
    assert not [row for row in rows if "no equivalent" in row or "not supported" in row]
