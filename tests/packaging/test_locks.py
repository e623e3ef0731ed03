"""The files of locks/ have the versions of constraints.txt, with hashes, and all that their extras need."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from support.jobs import REPOSITORY

LOCKS = REPOSITORY / "locks"
SETS = ("core", "dev", "docs", "all", "trl")
ENTRY = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+) \\\n(?P<hashes>(?:    --hash=.*\n)+)", re.MULTILINE
)
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")
WITH_TORCH = {"mpmath", "networkx", "setuptools", "sympy"}
"""What torch brings as well, so that constraints.txt does not pin it."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, str]:
    """Return the versions of a lock; each has a hash, and the file has nothing else."""
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    entries = list(ENTRY.finditer(text))
    assert "".join(each[0] for each in entries) == text
    for each in entries:
        assert all(HASH.fullmatch(line) for line in each["hashes"].splitlines()), each["name"]
    return {plain(each["name"]): each["version"] for each in entries}


def pinned() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {plain(name): version for name, version in pairs}


def extras_of(name: str) -> frozenset[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^EXTRAS_{name} := *(.*)$", makefile, flags=re.MULTILINE)
    assert found is not None
    return frozenset(found[1].split(",")) - {""}


def required(extras: frozenset[str]) -> set[str]:
    """Return the packages that the project names for some extras, also through extras of its own."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names: set[str] = set()
    pending = [*project["dependencies"]]
    pending += [text for extra in extras for text in project["optional-dependencies"][extra]]
    while pending:
        requirement = Requirement(pending.pop())
        if requirement.name == "cloudtrain":
            for extra in requirement.extras:
                pending += project["optional-dependencies"][extra]
        else:
            names.add(plain(requirement.name))
    return names - {"torch"}


@pytest.mark.parametrize("name", SETS)
def test_a_lock_agrees_with_the_constraints(name: str) -> None:
    """After a change of constraints.txt or of an extra: make lock."""
    found, pins = locked(name), pinned()
    assert sorted(required(extras_of(name)) - found.keys()) == []
    assert sorted(found.keys() - pins.keys() - WITH_TORCH) == []
    assert {
        each: found[each] for each in found.keys() & pins.keys() if found[each] != pins[each]
    } == {}


def test_torch_is_in_no_lock() -> None:
    """Its build depends on the machine: the Makefile's TORCH names it."""
    assert [name for name in SETS if "torch" in locked(name)] == []


def test_the_tools_of_a_release_have_hashes() -> None:
    found = locked("release")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    for text in project["dependency-groups"]["release"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(found[plain(requirement.name)])
    assert found["hatchling"] == pinned()["hatchling"]


def test_there_is_a_lock_for_each_set_and_no_other() -> None:
    assert {path.stem for path in LOCKS.iterdir()} == {*SETS, "release", "torch-apart"}


def test_ci_installs_only_files_with_a_hash() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["env"]["HASHES"] == "1"
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert makefile.count("--no-deps --require-hashes --only-binary :all: --") == 3
