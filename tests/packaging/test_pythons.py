"""The SDK on the other Pythons of this machine: it imports, and plans what it plans on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES
from support.pythons import ENVIRONMENTS, other_pythons

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


def test_other_pythons_import_and_plan_the_same() -> None:
    versions = other_pythons()
    if not versions:
        pytest.skip(f"this machine has no other Python than {sys.version.split()[0]}")
    pythons = {version: ENVIRONMENTS / version / "bin" / "python" for version in versions}
    if missing := [str(path) for path in pythons.values() if not path.exists()]:
        pytest.skip(f"missing: {missing}; make .venv-pythons/.installed runs pip install for them")
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
            assert there["plans"][name] == plan, (version, name)
        assert there["mistakes"] == here["mistakes"], version
        assert there["schema"] == here["schema"], version
