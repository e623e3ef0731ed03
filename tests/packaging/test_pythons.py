"""The SDK on the other Pythons of this machine: it imports, passes its tests, and plans what it plans on this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, REPOSITORY
from support.pythons import ENVIRONMENTS, other_pythons, tools_of
from support.sizes import IS_NIGHTLY

SHARES = [("3.12", "1/1"), ("3.13", "1/1")] if IS_NIGHTLY else [("3.12", "1/2"), ("3.13", "2/2")]
PROGRAM = Path(__file__).parents[1] / "support" / "plans_of_a_python.py"


def start(python: Path) -> subprocess.Popen[str]:
    """Start the program with a Python."""
    command = [python, PROGRAM, EXAMPLES]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the program prints."""
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(scope="module")
def pythons() -> dict[str, Path]:
    """The interpreters of the environments, by version."""
    versions = other_pythons()
    if not versions:
        pytest.skip(f"this machine has no other Python than {sys.version.split()[0]}")
    found = {version: ENVIRONMENTS / version / "bin" / "python" for version in versions}
    if missing := [str(path) for path in found.values() if not path.exists()]:
        pytest.skip(f"missing: {missing}; make .venv-pythons/.installed runs pip install for them")
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("version", "share"), SHARES)
def test_unit_tests_pass_on_another_python(
    pythons: dict[str, Path], version: str, share: str
) -> None:
    """Without torch and the extras, and without the tests that run commands. Each test runs on one newer Python."""
    if version not in pythons:
        pytest.skip(f"this machine has no Python {version}, or it runs this test")
    python = pythons[version]
    options = ("-q", "-p", "no:cacheprovider", "--without-commands", "--share", share)
    environ = {
        **os.environ,
        "PYTHONPATH": str(tools_of(python.parents[1])),
        "CLOUDTRAIN_TEST_SIZE": "quick",
        "CLOUDTRAIN_TEST_STRICT": "0",
    }
    done = subprocess.run(
        [python, "-m", "pytest", *options, "tests/unit", "tests/commands"],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (version, done.stdout[-4000:], done.stderr[-1000:])
    summary = done.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed is not None, summary
    assert int(passed[1]) > 1000, (version, summary)


def comparable(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan without the decision that names this Python's own PyTorch, which only some have."""
    own = [each for each in plan["decisions"] if " of this machine" not in each]
    return {**plan, "decisions": own}


def test_other_pythons_import_and_plan_the_same(pythons: dict[str, Path]) -> None:
    own = start(Path(sys.executable))
    others = {version: start(path) for version, path in pythons.items()}
    here = answer(own)
    assert len(here["plans"]) == 2 * len(list(EXAMPLES.glob("*/job.yaml")))
    for version, process in others.items():
        there = answer(process)
        assert there["python"] == version
        assert there["code"] == here["code"], "run make .venv-pythons/.installed after an edit"
        assert there["errors"] == [], version
        assert there["imported"] > 200, version
        for name, plan in here["plans"].items():
            assert comparable(there["plans"][name]) == comparable(plan), (version, name)
        assert there["mistakes"] == here["mistakes"], version
        assert there["schema"] == here["schema"], version
