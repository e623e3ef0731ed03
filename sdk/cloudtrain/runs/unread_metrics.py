"""Metrics that a program prints and that no pattern of its job reads: the patterns for them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from cloudtrain.runs.log_lines import split_rank
from cloudtrain_runtime.contract import EVENT_PREFIX

_NAME = re.compile(
    r"\b(?:(?:train|training|val|valid|validation|test|eval)[ _/-]?)?(?:loss|acc|accuracy|perplexity|ppl|f1)\b",
    re.IGNORECASE,
)
_COUNTERS = {
    "step": re.compile(r"\b(?:global[ _]step|step|iter|iteration)\b", re.IGNORECASE),
    "epoch": re.compile(r"\bepoch\b", re.IGNORECASE),
}
_VALUE = r"\W+?([\d.e+-]+)"
_COUNT = r"\W+?(\d+)"
_LEAST_LINES = 2
"""Lines with a value that make a metric. One is a summary, or prose."""

_MOST_METRICS = 4
_LINE_CHARACTERS = 500


def suggest_patterns(lines: Iterable[str]) -> dict[str, str]:
    """Return patterns for `metrics` that find what a program has printed; empty if there is nothing to find.

    Args:
        lines: Lines of a log, in order. Only lines of rank 0 count where lines name a rank.
    """
    values: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in lines:
        rank, text = split_rank(line.rstrip()[:_LINE_CHARACTERS])
        if rank in (None, 0) and EVENT_PREFIX not in text:
            for name in dict.fromkeys(match.group() for match in _NAME.finditer(text)):
                value = _find(_pattern(name, _VALUE), text)
                if value is not None:
                    values[name].append((text, value))
    found = {
        re.sub(r"\W", "_", name.lower()): _pattern(name, _VALUE)
        for name, lines_of in values.items()
        if len(lines_of) >= _LEAST_LINES
    }
    found = dict([*found.items()][:_MOST_METRICS])
    if not found:
        return {}
    texts = [text for lines_of in values.values() for text, _ in lines_of]
    return {**_counters(texts), **found}


def format_patterns(patterns: Mapping[str, str]) -> str:
    """Return the line of a job file for patterns: `metrics: {loss: '...', step: '...'}`."""
    inner = ", ".join(f"{name}: '{pattern}'" for name, pattern in patterns.items())
    return f"metrics: {{{inner}}}"


def _counters(texts: list[str]) -> dict[str, str]:
    """Return patterns for the counters that every one of these lines has."""
    found = {}
    for counter, words in _COUNTERS.items():
        named = words.search(texts[0])
        if named is not None:
            pattern = _pattern(named.group(), _COUNT)
            if all(re.search(pattern, text) for text in texts):
                found[counter] = pattern
    return found


def _pattern(name: str, value: str) -> str:
    return rf"\b{re.escape(name)}{value}".replace(r"\ ", " ")


def _find(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text)
    # `accuracy 9832/10000` is a count.
    if match is None or text[match.end() :].startswith("/"):
        return None
    try:
        return float(match.group(1))
    except ValueError:
        return None
