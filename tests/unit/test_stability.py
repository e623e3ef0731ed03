"""The public surface of each recorded version is still there (docs/reference/stability.md)."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.jobs import REPOSITORY
from written_by.comparison import REMOVALS, find_removals
from written_by.versions import SURFACE, read_recorded, recorded_versions

pytest.importorskip("torch")  # the names of the runtime are public, too

from written_by.formats import FORMATS
from written_by.surface import read_surface

PAGE = REPOSITORY / "docs" / "reference" / "stability.md"
WHAT_TO_DO = """
Users of {version} rely on this. Either bring it back, or, if it was deprecated with a warning in the minor version
before this one, add it to REMOVALS in tests/written_by/comparison.py with both versions. See
docs/reference/stability.md.
"""


@pytest.fixture(scope="module")
def surface() -> Any:
    return json.loads(json.dumps(read_surface()))


@pytest.mark.parametrize("version", recorded_versions())
def test_nothing_public_is_taken_away(surface: Any, version: str) -> None:
    before = {**read_recorded(version, SURFACE), "formats": {}}
    found = [each for each in find_removals(before, surface) if not _is_announced(each)]
    assert found == [], "\n".join(found) + WHAT_TO_DO.format(version=version)


def _is_announced(removal: str) -> bool:
    return any(removal.startswith(f"{known}: ") for known in REMOVALS)


def test_a_new_format_is_recorded() -> None:
    newest = recorded_versions()[-1]
    assert read_recorded(newest, SURFACE)["formats"] == FORMATS, (
        f"a format has another version than {newest} has written. Read the old one as well, and record what this "
        "version writes: PYTHONPATH=tests python -m written_by.record"
    )


@pytest.mark.parametrize(
    ("part", "path", "value", "expected"),
    [
        ("commands", ("cloudtrain submit", "--local"), None, "cloudtrain submit: --local: removed"),
        ("commands", ("cloudtrain submit", "--detach"), None, "--detach: removed"),
        ("commands", ("cloudtrain submit", "--set", "is_flag"), True, "had a value, has none"),
        ("commands", ("cloudtrain list", "-n", "default"), 10, "was 20, is 10"),
        (
            "commands",
            ("cloudtrain plan", "argument 1", "required"),
            True,
            "was optional, is required",
        ),
        ("exit codes", ("EXIT_RUN_FAILED",), 6, "was 4, is 6"),
        ("json", ("status", "state"), None, "status: state: removed"),
        ("events", ("step", "loss", "type"), "text", "loss: type: was 'number or null', is 'text'"),
        ("job.yaml", ("Train.batch_size", "default"), "64", "was '32', is '64'"),
        ("job.yaml", ("Cluster.zone",), {"required": True}, "zone: is new and required"),
        ("python", ("cloudtrain.submit", "parameters", "local"), None, "local: removed"),
        ("run.json", ("train",), None, "run.json: train: removed"),
    ],
)
def test_a_removal_is_found(
    surface: Any, part: str, path: tuple[str, ...], value: Any, expected: str
) -> None:
    changed = copy.deepcopy(surface)
    below = changed[part]
    for name in path[:-1]:
        below = below[name]
    if value is None:
        del below[path[-1]]
    else:
        below[path[-1]] = value
    found = list(find_removals(surface, changed))
    assert len(found) == 1
    assert expected in found[0]


def test_additions_are_fine(surface: Any) -> None:
    changed = copy.deepcopy(surface)
    changed["commands"]["cloudtrain new"] = {"argument 1": {"required": True}}
    changed["json"]["status"]["new"] = {}
    changed["job.yaml"]["Train.new"] = {"types": {"string": {}}}
    assert list(find_removals(surface, changed)) == []


def test_the_page_names_existing_tests() -> None:
    named = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 8
    for file, test in named:
        assert f"def {test}" in Path(REPOSITORY, file).read_text(encoding="utf-8"), (file, test)
