"""Pytest hooks that fail tests skipped for a missing Python package, if CLOUDTRAIN_TEST_STRICT is 1, as in CI.

The reason of such a skip contains `pip install ...`, or comes from `pytest.importorskip`. Other skips are allowed, for
example without Terraform, mpirun or root permissions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

VARIABLE = "CLOUDTRAIN_TEST_STRICT"
_MISSING = re.compile(r"could not import|pip install")
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped for a missing package."""
    return _fail_if_package_is_missing((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a test file that is skipped for a missing package.

    `make test` collects all files for the proofs of promises, and lacks the packages of files without one.
    """
    report = yield
    is_short = collector.config.getoption("markexpr") == "promise"
    if is_short and not _has_proof(collector.path):
        return report
    return _fail_if_package_is_missing(report)


def _has_proof(path: Path) -> bool:
    return path.is_file() and "mark.promise" in path.read_text(encoding="utf-8")


def _fail_if_package_is_missing(report: _Report) -> _Report:
    if os.environ.get(VARIABLE) == "1" and report.skipped and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        if _MISSING.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: {reason}\n{VARIABLE}=1: install the package; a skip is a failure here"
    return report
