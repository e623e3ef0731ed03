"""The SDK's requests for objects of S3 come from one module."""

from __future__ import annotations

import ast

from support.jobs import REPOSITORY

SDK = REPOSITORY / "sdk" / "cloudtrain"
REQUESTS = {
    "create_transfer_manager",
    "delete_object",
    "delete_objects",
    "get_object",
    "head_object",
    "list_objects_v2",
    "put_object",
}


def test_objects_are_requested_in_one_module() -> None:
    """A method of a client, or the name of a paginator. The sandbox's server is the other end of such requests."""
    found = {
        str(path.relative_to(SDK))
        for path in SDK.rglob("*.py")
        if "sandbox" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr in REQUESTS)
        or (isinstance(node, ast.Constant) and node.value in REQUESTS)
        or (isinstance(node, ast.alias) and node.name == "create_transfer_manager")
    }
    assert found == {"aws/s3_objects.py"}
