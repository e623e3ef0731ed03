"""The installed packages are the pinned ones, and the audit of the pinned packages reports what it skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.jobs import REPOSITORY

PROGRAM = Path(__file__).with_name("audit.py")
BROUGHT_BY_TORCH = {"torch", "sympy", "mpmath", "networkx", "setuptools", "triton"}
"""Packages that are not pinned, because users install their own build of torch with its dependencies."""


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return {
        plain(name): version
        for name, _, version in (line.partition("==") for line in lines)
        if version
    }


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(
    name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> Iterator[str]:
    """Yield a distribution and all its dependencies that are installed."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield name
    for text in requires:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield from needed(plain(requirement.name), frozenset(requirement.extras), seen)


def test_installed_packages_are_the_pinned_ones() -> None:
    """An audit of the pins covers only packages that are pinned."""
    found = {
        name for name in needed("cloudtrain", frozenset({"dev"}), set()) if name != "cloudtrain"
    }
    found = {name for name in found - BROUGHT_BY_TORCH if not name.startswith(("nvidia-", "cuda-"))}
    assert {"boto3", "botocore", "pydantic", "moto", "sagemaker"} <= found
    known = pins()
    assert sorted(found - known.keys()) == []
    differing = {name: importlib.metadata.version(name) for name in found}
    assert {name: version for name, version in differing.items() if version != known[name]} == {}


def test_the_pins_are_one_set_for_all_extras() -> None:
    """`make test-extras` resolves them together."""
    known = pins()
    requirements = [Requirement(text) for text in importlib.metadata.requires("cloudtrain") or []]
    named = {plain(each.name): each for each in requirements if each.name != "torch"}
    assert {"pillow", "mlflow-skinny", "trl", "optuna"} <= named.keys()
    assert sorted(named.keys() - known.keys()) == []
    outside = [
        str(each)
        for each in requirements
        if each.name != "torch" and not each.specifier.contains(known[plain(each.name)])
    ]
    assert outside == []


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit"] = module
    spec.loader.exec_module(module)
    return module


def package(name: str, *advisories: str) -> dict[str, Any]:
    return {
        "name": name,
        "version": "1.0",
        "vulns": [{"id": each, "fix_versions": ["1.1"]} for each in advisories],
    }


SKIPPED: Mapping[str, Any] = {"name": "three", "skip_reason": "Dependency not found on PyPI"}


def test_advisories_and_skipped_packages_are_separate(audit: ModuleType) -> None:
    verdict = audit.read_report(
        {"dependencies": [package("one"), package("two", "PYSEC-1"), SKIPPED]}
    )
    assert verdict == audit.Verdict(2, ("three",), ("two 1.0: PYSEC-1 (fixed in 1.1)",))


@pytest.mark.parametrize(
    ("verdict", "environ", "code", "expected"),
    [
        ("no network", "", 0, "SKIPPED: no audit of 2 pinned packages: no network"),
        ("no network", "1", 1, "SKIPPED: no audit of 2 pinned packages: no network"),
        (
            (0, ("one", "two"), ()),
            "",
            0,
            "SKIPPED: no audit of 2 pinned packages: the database contains none",
        ),
        ((1, ("two",), ()), "1", 0, "SKIPPED: the database does not contain two"),
        ((2, (), ("one 1.0: PYSEC-1",)), "", 1, "one 1.0: PYSEC-1"),
        ((2, (), ()), "1", 0, "2 packages audited, 0 advisories"),
    ],
)
def test_an_audit_without_result_is_reported(
    audit: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verdict: Any,
    environ: str,
    code: int,
    expected: str,
) -> None:
    (tmp_path / "pins").write_text("# made up\none==1.0\ntwo==1.0\n")
    monkeypatch.setenv("CLOUDTRAIN_AUDIT", environ)
    monkeypatch.setattr(
        audit,
        "run_audit",
        lambda _: verdict if isinstance(verdict, str) else audit.Verdict(*verdict),
    )
    assert audit.main([str(tmp_path / "pins")]) == code
    assert expected in capsys.readouterr().out


@pytest.mark.skipif(
    os.environ.get("CLOUDTRAIN_AUDIT") != "1", reason="SKIPPED: needs a network; run `make audit`"
)
def test_no_pinned_package_has_a_known_advisory() -> None:
    """Runs without the tests' network guard, which allows loopback only."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "CLOUDTRAIN_TEST_GUARD")
    }
    done = subprocess.run(
        ["make", "audit"], cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
