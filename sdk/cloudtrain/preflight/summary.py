"""Summary of a check of the account, for `repr` and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.notebook.summary import Summary

if TYPE_CHECKING:
    from cloudtrain.preflight.base import Check

_WORDS = {"pass": "passed", "fail": "failed", "unknown": "could not be made"}


def summarize_check(check: Check) -> Summary:
    """Return a summary of a check."""
    rows = [(name, text) for name, text in (("warning", check.warning), ("fix", check.fix)) if text]
    return Summary(f"Check {check.name} {_WORDS[check.result]}: {check.detail}", rows)
