"""The page of the documentation with all assumptions, and what each result that somebody has sent says about them.

    PYTHONPATH=tests python -m aws_day.page       # writes docs/reference/aws-day.md, as `make docs` does

Uses the standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aws_day.assumptions import ASSUMPTIONS, BASES, Assumption
from aws_day.times import Times

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "aws-day"
PAGE = REPOSITORY / "docs" / "reference" / "aws-day.md"
AWS, SANDBOX = "AWS", "sandbox"
HOLDS, DIFFERS, NO_ANSWER, NOT_RUN = "holds", "differs", "no answer", "not run"
VERDICTS = (HOLDS, DIFFERS, NO_ANSWER, NOT_RUN)
SCHEMA = 1

_HEAD = """\
# Assumptions about SageMaker

The sandbox, the ledger of costs and the documentation assume what SageMaker does. `make aws-day` [compares each
assumption](../how-to/aws-day.md) with an account, for a few dollars. `make docs` generates this page from
`tests/aws_day/assumptions.py`, and from the results in `docs/aws-day/`.
"""
_NOTHING = """
**Nobody has sent a result yet: no assumption on this page has been compared with AWS.**
"""


def check_result(content: Any) -> dict[str, Any]:
    """Return a result, or raise ValueError that says what is wrong with it."""
    is_result = isinstance(content, dict) and content.get("schema") == SCHEMA
    _require(is_result, f"expected a result of `make aws-day` with schema {SCHEMA}")
    for name in ("service", "date", "region", "cloudtrain"):
        is_text = isinstance(content.get(name), str)
        _require(is_text, f"{name}: expected text, got {content.get(name)!r:.40}")
    answers = content.get("answers")
    _require(isinstance(answers, list), "answers: expected a list")
    for each in answers:
        is_answer = isinstance(each, dict) and isinstance(each.get("key"), str)
        _require(is_answer, f"answers: expected a key, got {each!r:.80}")
        is_known = each.get("verdict") in VERDICTS
        _require(
            is_known, f"answers: expected a verdict of {', '.join(VERDICTS)}, got {each!r:.80}"
        )
    result: dict[str, Any] = content
    return result


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def load_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the results of accounts, oldest first; those of the sandbox show nothing about AWS."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = check_result(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
        if result["service"] == AWS:
            found.append(result)
    return sorted(found, key=lambda each: str(each["date"]))


def page(folder: Path = RESULTS) -> str:
    """Return the page."""
    results = load_results(folder)
    parts = [_HEAD]
    parts.append(_summary(results) if results else _NOTHING)
    parts.append(_table(results))
    return "\n".join(parts)


def _summary(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        "| date | region | cloudtrain | hold | differ | no answer | not run |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        verdicts = [each["verdict"] for each in result["answers"]]
        counts = " | ".join(str(verdicts.count(each)) for each in VERDICTS)
        rows.append(
            f"| {_cell(result['date'])} | {_cell(result['region'])} | {_cell(result['cloudtrain'])} | {counts} |"
        )
    return "\n".join(["", f"{len(results)} results:", "", *rows, ""])


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        "| assumption | statement | expected | basis | source | used in | seen on AWS |",
        "|---|---|---|---|---|---|---|",
    ]
    times = Times()
    for each in ASSUMPTIONS:
        cells = [
            f"`{each.key}`",
            each.statement.format(**_plain(times)),
            each.expected.format(**_plain(times)),
            each.basis,
            f"[{_name_of(each.document)}]({each.document})",
            f"`{each.used_in}`",
            _seen(each, results),
        ]
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(["## The assumptions", "", *_bases(), "", *rows, ""])


def _bases() -> list[str]:
    """Return what the words of the column `basis` mean, and how many assumptions have each."""
    counts = Counter(each.basis for each in ASSUMPTIONS)
    return [f"- **{name}** ({counts[name]}): {meaning}." for name, meaning in BASES.items()]


def _plain(times: Times) -> dict[str, str]:
    """Return the times as text, without a fraction that is zero."""
    return {name: f"{value:g}" for name, value in times.to_json().items()}


def _name_of(document: str) -> str:
    """Return the name of a document: the last part of its address."""
    if "github.com" in document:
        owner, repository, _, number = document.split("/")[-4:]
        return f"{owner}/{repository}#{number}"
    return document.rsplit("/", 1)[-1].removesuffix(".html")


def _seen(assumption: Assumption, results: Sequence[Mapping[str, Any]]) -> str:
    found = [
        each
        for result in results
        for each in result["answers"]
        if each["key"] == assumption.key and each["verdict"] in (HOLDS, DIFFERS)
    ]
    if not found:
        return "never"
    last = found[-1]
    if last["verdict"] == HOLDS:
        return f"{HOLDS}: {json.dumps(last.get('observed'))}"
    return f"**{DIFFERS}**: {json.dumps(last.get('observed'))}"


def _cell(text: str) -> str:
    """Return a text for a cell. A result comes from outside, so nothing in it may begin markup."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main() -> None:
    """Write the page, if it has changed."""
    text = page()
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
