"""docs/reference/errors.md has every failure class and every message that the failure rules recognise."""

from __future__ import annotations

import re

import pytest
from support.errors_page import MEANINGS, examples, messages_of
from support.jobs import REPOSITORY
from support.pattern_texts import ANY, texts

from cloudtrain.failure_rules import FailureClass
from cloudtrain.failure_rules.rules import RULES

PAGE = (REPOSITORY / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## [^\n]+\n\n`(\w+)`\. (.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
)


def test_each_class_has_a_section_with_its_meaning() -> None:
    assert list(SECTIONS) == [str(failure) for failure in FailureClass]
    assert set(MEANINGS) == set(FailureClass)
    assert [failure for failure, text in SECTIONS.items() if "\n- `" not in text] == []


def test_each_rule_is_in_the_section_of_its_class() -> None:
    found = examples()
    assert len(found) > 120
    for number, rule in enumerate(RULES):
        messages = messages_of(rule, found.get(number))
        assert messages, rule.pattern.pattern
        assert [each for each in messages if each not in SECTIONS[rule.failure_class]] == []


def test_a_text_without_gaps_is_matched_by_its_rule() -> None:
    patterns = [rule.pattern for rule in RULES]
    unmatched = [
        (pattern.pattern, text)
        for pattern in patterns
        for text in texts(pattern.pattern)
        # Spaces and colons at the ends of a text are not shown.
        if ANY not in text
        and not any(
            pattern.search(f"{start}{text}{end}")
            for start in ("", ": ")
            for end in ("", "::", ": ", " ")
        )
    ]
    assert unmatched == []


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"CUDA error: out of memory|Errno 28", ["CUDA error: out of memory", "Errno 28"]),
        (r"(?:CUBLAS|CUDNN)_STATUS", ["CUBLAS_STATUS", "CUDNN_STATUS"]),
        (r"^[Nn]o space left(?: on device)?$", ["No space left"]),
        (r"No module named '(?P<module>[^'.]+)", ["No module named '…"]),
        (r"failed \(exitcode: -9\)", ["failed (exitcode: -9)"]),
        (r"waiting (?P<ms>\d+) ?ms.*done(?!.*ever)", ["waiting …ms…done"]),
        (r"", []),
    ],
)
def test_the_texts_of_a_pattern(pattern: str, expected: list[str]) -> None:
    assert list(texts(pattern)) == expected


@pytest.mark.parametrize(
    "pasted",
    [
        "CUDA out of memory. Tried to allocate",
        "No space left on device",
        "Connection reset by peer",
        "Watchdog caught collective operation timeout",
        "Unable to locate credentials",
        "MaxRuntimeExceeded",
    ],
)
def test_a_pasted_message_is_found(pasted: str) -> None:
    assert pasted in PAGE
