"""The result of a rehearsal: a verdict, its checks and the receipt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.client.receipts import Receipt
from cloudtrain.support.checks import PROOF_WORDS, Check, Result
from cloudtrain.support.notebook.summary import Summary

REQUIRED = ("starts", "trains", "saves", "stops", "resumes")
"""The checks that must be proven for a proven verdict."""


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        checks: The checks, in the order in which they were made.
        receipt: Its receipt; None where none was made.
        folder: Folder of the rehearsed runs if it was kept, else None.
        warnings: One sentence each, such as why the receipt was not written.
    """

    checks: tuple[Check, ...]
    receipt: Receipt | None = None
    folder: Path | None = None
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self._summary().to_text()

    def _repr_html_(self) -> str:
        return self._summary().to_html()

    def _summary(self) -> Summary:
        rows = [(each.name, f"{PROOF_WORDS[each.result]}: {each.detail}") for each in self.checks]
        # What is not proven comes first: the text has ten lines.
        rows.sort(key=lambda row: row[1].startswith(PROOF_WORDS[Result.PASS]))
        return Summary(f"Rehearsal {PROOF_WORDS[self.verdict]}", rows)

    @property
    def verdict(self) -> Result:
        """`failed` if a check failed; `proven` if all checks that count are proven; else `unknown`."""
        return judge(self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `rehearse --json` prints."""
        return {
            "verdict": PROOF_WORDS[self.verdict],
            "checks": [
                {"name": each.name, "result": PROOF_WORDS[each.result], "detail": each.detail}
                for each in self.checks
            ],
            "receipt": None if self.receipt is None else self.receipt.to_json(),
            "folder": None if self.folder is None else str(self.folder),
            "warnings": list(self.warnings),
        }


def judge(checks: Iterable[Check]) -> Result:
    """Return the verdict of checks; several of one name count as the worst of them."""
    results: dict[str, set[Result]] = {}
    for check in checks:
        results.setdefault(check.name, set()).add(check.result)
    if any(Result.FAIL in found for found in results.values()):
        return Result.FAIL
    is_proven = all(results.get(name) == {Result.PASS} for name in REQUIRED)
    return Result.PASS if is_proven else Result.UNKNOWN
