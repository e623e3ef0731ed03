"""Rules that recognise failures, one module per topic.

The first matching rule decides, so specific rules precede general ones. Each rule names where its text was seen. In an
action, `[train.batch_size]` is replaced by the field with the job's value and `{name}` by a group of the pattern.

An action names only fields, options and commands that the job and the place have: where they differ, it has a part
for each kind (base.py). tests/explain/test_advice_fits.py proves it.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloudtrain.failure_rules.rules import (
    data,
    gpu,
    memory,
    packages,
    ranks,
    sagemaker,
    storage,
    user_code,
)
from cloudtrain.failure_rules.rules.base import (
    Advice,
    Causality,
    Jobs,
    Places,
    Rule,
    Source,
    advice_for,
)

__all__ = [
    "RULES",
    "Advice",
    "Causality",
    "Jobs",
    "Places",
    "Rule",
    "Source",
    "advice_for",
    "first_line_match",
    "first_match",
]

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


def first_match(
    text: str, source: Source, file: str = "", imported: str = ""
) -> tuple[Rule, dict[str, str]] | None:
    """Return the first rule that matches a text from this source, with its named groups.

    `file` is the one whose code has raised an exception, and `imported` the package whose import it has ended.
    """
    return _first_of(_BY_SOURCE[source], text, file, imported)


def first_line_match(line: str) -> tuple[Rule, dict[str, str]] | None:
    """Return the first rule for log lines that matches a line, with its groups. Needles are tried in their order."""
    for needle, rules in _BY_NEEDLE.items():
        if needle in line and (found := _first_of(rules, line)) is not None:
            return found
    return None


def _first_of(
    rules: Iterable[Rule], text: str, file: str = "", imported: str = ""
) -> tuple[Rule, dict[str, str]] | None:
    matches = ((rule, rule.match(text, file, imported)) for rule in rules)
    return next(((rule, found) for rule, found in matches if found is not None), None)
