"""Skips for a missing Python package count as failures where CLOUDTRAIN_TEST_STRICT is 1, as in CI.

Such a skip says `pip install ...`, or comes from `pytest.importorskip`. What pip cannot install (Terraform, mpirun, the
rights of root) may still be missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import TypeVar

import pytest

VARIABLE = "CLOUDTRAIN_TEST_STRICT"
_MISSING = re.compile(r"could not import|pip install")
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge a test's skip."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge the skip of a whole file."""
    return _judged((yield))


def _judged(report: _Report) -> _Report:
    if os.environ.get(VARIABLE) == "1" and report.skipped and isinstance(report.longrepr, tuple):
        path, line, reason = report.longrepr
        if _MISSING.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: {reason}\n{VARIABLE}=1: install the package; a skip is a failure here"
    return report
