"""The module fits version 6 of Terraform's AWS provider, by its schema; version 5 is what the other tests apply."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.jobs import REPOSITORY
from support.provider_schema import SCHEMA, blocks, files, mistakes, reads

pytest.importorskip("hcl2")  # of the extra `all`

DOCUMENT: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
TYPES: dict[str, Any] = DOCUMENT["types"]
DEPRECATED = {("data.aws_region", "name")}
"""Attributes that provider 6 still has, and warns about (its upgrade guide). The schema does not mark them."""


def test_every_block_fits_the_schema() -> None:
    found = [
        mistake
        for path in files()
        for kind, body in blocks(path)
        for mistake in mistakes(body, TYPES[kind], f"{path.name}: {kind}")
    ]
    assert found == []
    assert {kind for path in files() for kind, _ in blocks(path)} == set(TYPES)


def test_every_attribute_that_is_read_exists() -> None:
    found = {(path.name, *read) for path in files() for read in reads(path)}
    assert len(found) > 30
    missing = [each for each in found if each[2] not in TYPES[each[1]]["attributes"]]
    assert missing == []
    assert [each for each in found if each[1:] in DEPRECATED] == []


@pytest.mark.parametrize(
    ("body", "mistake"),
    [
        ({"acl_list": "x"}, "there is no acl_list"),
        ({}, "endpoint is required"),
        ({"topic_arn": "x", "protocol": "email", "endpoint": "x"}, ""),
    ],
)
def test_mistakes_are_found(body: dict[str, Any], mistake: str) -> None:
    found = list(mistakes(body, TYPES["aws_sns_topic_subscription"], "x"))
    assert any(mistake in each for each in found) if mistake else found == []


def test_constraints_allow_both_versions() -> None:
    versions = [path for path in files() if path.name == "versions.tf"]
    assert len(versions) == 3
    for path in versions:
        assert 'version = ">= 5.80, < 7.0"' in path.read_text(encoding="utf-8")
    text = (REPOSITORY / "docs" / "limits.md").read_text(encoding="utf-8")
    assert re.search(rf"provider {re.escape(DOCUMENT['provider'])}\b", text)
