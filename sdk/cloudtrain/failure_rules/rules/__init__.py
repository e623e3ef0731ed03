"""Rules that recognise failures, one module per topic.

The first matching rule decides, so specific rules precede general ones. Each rule names where its text was seen. In an
action, `[train.batch_size]` is replaced by the field with the job's value and `{name}` by a group of the pattern.
"""

from __future__ import annotations

import re

from cloudtrain.failure_rules.rules import data, gpu, memory, packages, ranks, sagemaker, storage, user_code
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source

__all__ = ["RULES", "Causality", "Rule", "Source", "first_line_match", "first_match"]

RULES: tuple[Rule, ...] = (
    *sagemaker.RULES,
    *memory.RULES,
    *storage.RULES,
    *packages.RULES,
    *data.RULES,
    *gpu.RULES,
    *ranks.RULES,
    *user_code.RULES,
)
"""All rules in order of precedence."""

_BY_SOURCE = {source: tuple(rule for rule in RULES if source in rule.sources) for source in Source}
_BY_NEEDLE = {
    needle: tuple(rule for rule in RULES if needle in rule.needles)
    for needle in dict.fromkeys(needle for rule in RULES for needle in rule.needles)
}


def first_match(text: str, source: Source) -> tuple[Rule, re.Match[str]] | None:
    """Return the first rule that matches a text from this source, with the match."""
    for rule in _BY_SOURCE[source]:
        if (match := rule.pattern.search(text)) is not None:
            return rule, match
    return None


def first_line_match(line: str) -> tuple[Rule, re.Match[str]] | None:
    """Return the first rule for log lines that matches a line, with the match. Needles are tried in their order."""
    for needle, rules in _BY_NEEDLE.items():
        if needle in line:
            for rule in rules:
                if (match := rule.pattern.search(line)) is not None:
                    return rule, match
    return None
