"""docs/migrating.md names fields that exist."""

from __future__ import annotations

import re
from typing import Any

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


def resolve(field: str) -> bool:
    """Return whether the path of a field exists in the schema."""
    schema = job_schema()
    nodes: list[dict[str, Any]] = [schema]
    for name in field.split("."):
        found = [node["properties"][name] for node in nodes if name in node.get("properties", {})]
        nodes = [variant for node in found for variant in variants(node, schema)]
    return bool(nodes)


def variants(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a node of the schema can be, with references followed."""
    if "$ref" in node:
        return variants(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    several = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]
    return [node, *(each for one in several for each in variants(one, schema))]


def test_the_tables_name_fields() -> None:
    assert len(FIELDS) > 30
    assert not resolve("cluster.nonsense")
    assert not resolve("limits.volume"), "a field of another section"


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_in_the_tables_exists(field: str) -> None:
    assert resolve(field)


@pytest.mark.parametrize("field", ["module", "command", "include", "metrics", "private_registry"])
def test_what_exists_is_not_called_missing(field: str) -> None:
    rows = [row for row in TABLES if field in row]
    assert rows
    assert not [row for row in rows if "no equivalent" in row or "not supported" in row]
