"""Rules that recognise failures, one module per topic.

The first matching rule decides, so specific rules precede general ones. Each rule names where its text was seen. In an
action, `[train.batch_size]` is replaced by the field with the job's value and `{name}` by a group of the pattern.
"""

from __future__ import annotations

import re

from cloudtrain.failure_rules.rules import data, gpu, memory, packages, ranks, sagemaker, storage, user_code
from cloudtrain.failure_rules.rules.base import Causality, Rule, Source

__all__ = ["RULES", "Causality", "Rule", "Source", "first_match", "line_rules"]

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


def first_match(text: str, source: Source) -> tuple[Rule, re.Match[str]] | None:
    """Return the first rule that matches a text from this source, with the match."""
    for rule in _BY_SOURCE[source]:
        if (match := rule.pattern.search(text)) is not None:
            return rule, match
    return None


def line_rules() -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """Return the rules for log lines, grouped by their needles."""
    found: dict[str, list[Rule]] = {}
    for rule in _BY_SOURCE[Source.LINE]:
        for needle in rule.needles:
            found.setdefault(needle, []).append(rule)
    return tuple((needle, tuple(rules)) for needle, rules in found.items())
