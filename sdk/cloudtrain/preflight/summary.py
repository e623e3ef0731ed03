"""Summaries of a check of the account: for `repr` and notebooks, and in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.support.notebook.summary import Summary

if TYPE_CHECKING:
    from cloudtrain.preflight.base import Check

_WORDS = {"pass": "passed", "fail": "failed", "unknown": "could not be made"}


def summarize_check(check: Check) -> Summary:
    """Return a summary of a check."""
    rows = [(name, text) for name, text in (("warning", check.warning), ("fix", check.fix)) if text]
    return Summary(f"Check {check.name} {_WORDS[check.result]}: {check.detail}", rows)


def describe_check(check: Check) -> str:
    """Return a check in one line."""
    result = "" if check.result == "pass" else f" {_WORDS[check.result]}"
    notes = [
        f"; {name}: {text}"
        for name, text in (("warning", check.warning), ("fix", check.fix))
        if text
    ]
    return f"{check.name}{result}: {check.detail}{''.join(notes)}"
