"""A check and its result: of the account, of this machine, and of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from cloudtrain.support.notebook.summary import Summary


class Result(StrEnum):
    """Result of a check."""

    PASS = "pass"  # noqa: S105 (no password)
    NOTE = "note"
    """Nothing is wrong, and something can be better; only checks of this machine have it."""
    UNKNOWN = "unknown"
    """There is no answer. It does not block a submit."""
    FAIL = "fail"

    PROVEN = PASS
    """The word of rehearsals for `PASS`."""
    FAILED = FAIL
    """The word of rehearsals for `FAIL`."""


_WORDS = {
    Result.PASS: "passed",
    Result.NOTE: "has a note",
    Result.UNKNOWN: "could not be made",
    Result.FAIL: "failed",
}


PROOF_WORDS: Final[Mapping[Result, str]] = {
    Result.PASS: "proven",
    Result.UNKNOWN: "unknown",
    Result.FAIL: "failed",
}
"""The words for results in a rehearsal's output, JSON and receipt, from the best to the worst."""


@dataclass(frozen=True)
class Check:
    """One check and its result.

    Attributes:
        name: What was checked, such as `role`, `data.train` or `saves`. A rehearsal may have several checks of one
            name: the worst of them counts.
        result: Its result.
        detail: What was found, or why there is no answer, in one line.
        fix: What to type or where to click, or an empty string.
        warning: Warning of a passed check, which a submit prints, or an empty string.
        is_shown: Whether a submit prints the detail of a passed check.
    """

    name: str
    result: Result
    detail: str
    fix: str = ""
    warning: str = ""
    is_shown: bool = False

    def __repr__(self) -> str:
        return self._summary().to_text()

    def _repr_html_(self) -> str:
        return self._summary().to_html()

    def _summary(self) -> Summary:
        rows = [
            (name, text) for name, text in (("warning", self.warning), ("fix", self.fix)) if text
        ]
        return Summary(f"Check {self.name} {_WORDS[self.result]}: {self.detail}", rows)

    def describe(self) -> str:
        """Return the check in one line."""
        result = "" if self.result is Result.PASS else f" {_WORDS[self.result]}"
        notes = [
            f"; {name}: {text}"
            for name, text in (("warning", self.warning), ("fix", self.fix))
            if text
        ]
        return f"{self.name}{result}: {self.detail}{''.join(notes)}"

    def to_json(self) -> dict[str, str]:
        """Return the object that `check --json` prints."""
        found = asdict(self)
        del found["is_shown"]
        return {**found, "result": str(self.result)}


def passed(name: str, detail: str, *, warning: str = "", is_shown: bool = False) -> Check:
    """Return a check that passed."""
    return Check(name, Result.PASS, detail, warning=warning, is_shown=is_shown)


def note(name: str, detail: str, fix: str = "") -> Check:
    """Return a check with a note."""
    return Check(name, Result.NOTE, detail, fix)


def unknown(name: str, detail: str, fix: str = "") -> Check:
    """Return a check without an answer."""
    return Check(name, Result.UNKNOWN, detail, fix)


def failed(name: str, detail: str, fix: str = "") -> Check:
    """Return a check that failed: what was checked is certain to fail."""
    return Check(name, Result.FAIL, detail, fix)


_FROM_BEST = (Result.PASS, Result.NOTE, Result.UNKNOWN, Result.FAIL)


def worst(checks: Iterable[Check]) -> Check:
    """Return the first failed check, else the first without an answer, else the first."""
    return max(checks, key=lambda check: _FROM_BEST.index(check.result))
