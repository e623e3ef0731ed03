"""Fixtures with Terraform: the module and its examples are applied to a moto server over HTTP, and destroyed."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.terraform import Terraform, apply_all, find_terraform


@pytest.fixture(scope="session")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    """Return the installed Terraform and AWS provider, or skip."""
    return find_terraform(tmp_path_factory.mktemp("terraform"))


@pytest.fixture(scope="session")
def applied(terraform: Terraform, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Apply and destroy the module and each example, once for all workers of pytest-xdist; return the results."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    path = shared / "applied.json"
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(apply_all(terraform, tmp_path_factory.mktemp("roots"))))
    results: dict[str, Any] = json.loads(path.read_text())
    return results
