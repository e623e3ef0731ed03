"""Output of checks of an account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cloudtrain.console import print_checks
from cloudtrain.support.checks import Check

_WORDS = {"pass": "pass", "fail": "fail", "unknown": "could not check"}
_COLOURS = {"pass": "32", "fail": "1;31", "could not check": "33"}


def print_account_checks(checks: Sequence[Check]) -> None:
    """Print the checks of an account, each followed by its warning and fix, and how many have passed."""
    if not checks:
        print("no checks are needed")
        return
    rows = []
    for check in checks:
        notes = [
            f"{label}: {text}"
            for label, text in (("warning", check.warning), ("fix", check.fix))
            if text
        ]
        rows.append((_WORDS[check.result], check.name, check.detail, notes))
    print_checks(rows, _COLOURS, wraps=True)
    results = Counter(str(check.result) for check in checks)
    verbs = {"pass": "passed", "fail": "failed", "unknown": "could not be made"}
    counts = ", ".join(
        f"{results[result]} {verb}" for result, verb in verbs.items() if results[result]
    )
    print(f"{len(checks)} checks: {counts}")
