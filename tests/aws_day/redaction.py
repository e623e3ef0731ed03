"""Removal of names that belong to the account or to the machine from a result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GENERIC = frozenset({"root", "user", "ubuntu", "ec2-user", "sagemaker-user", "localhost", "runner"})
"""Names of users and hosts that identify nobody."""

_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"arn:aws[\w-]*:[\w-]*:[\w-]*:\d*:[^\s\"',)\]}]*"), "<arn>"),
    (re.compile(r"\b[A-Z0-9]{4}(?:[A-Z0-9]{16}|[A-F0-9]{28,})\b"), "<key>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b"), "<email>"),
    (re.compile(r"\bip-\d+-\d+-\d+-\d+[\w.-]*"), "<host>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "<address>"),
    (re.compile(r"\b(?:subnet|sg|vpc|vpce|eni|i|fs)-[0-9a-f]{8,17}\b"), "<network id>"),
    (re.compile(r"(?<!\d)\d{12}(?!\d)"), "<account>"),
)
"""What is recognised by its form, whatever its value: ARNs, access keys, addresses, ids, accounts."""

OWN_FIELDS = frozenset(
    {"key", "trial", "statement", "expected", "verdict", "name", "outcome", "service", "status"}
)
"""Fields of a result whose values are words of this repository or of AWS. A user may be called like one of them."""


class Redactor:
    """Replaces known values and known forms.

    Args:
        known: What replaces each value, such as `<bucket>`, by the value. Empty values are ignored, and so are names
            that identify nobody.
    """

    def __init__(self, known: Mapping[str, str]) -> None:
        kept = {value: name for value, name in known.items() if value and value not in GENERIC}
        # The longest first: a role's ARN contains its name and the account.
        self._values = sorted(kept.items(), key=lambda pair: -len(pair[0]))

    def text(self, text: str) -> str:
        """Return a text without them."""
        for value, name in self._values:
            text = _occurrence_of(value).sub(name, text)
        for shape, name in _SHAPES:
            text = shape.sub(name, text)
        return text

    def document(self, value: Any) -> Any:
        """Return a JSON document without them. What a program of the day has written itself stays: see `OWN_FIELDS`."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self._name(str(key)): each if key in OWN_FIELDS else self.document(each)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.document(each) for each in value]
        return value

    def _name(self, name: str) -> str:
        """Return the name of a field. One of ours may be a user's name, too, such as `grace`."""
        return name if re.fullmatch(r"[a-z_]+", name) else self.text(name)

    def found_in(self, value: Any) -> list[str]:
        """Return which of the known values are still in a text or document, by what should have replaced them."""
        if isinstance(value, str):
            return [name for known, name in self._values if _occurrence_of(known).search(value)]
        if isinstance(value, Mapping):
            parts = [each for key, each in value.items() if key not in OWN_FIELDS]
            names = [key for key in value if not re.fullmatch(r"[a-z_]+", key)]
            return self.found_in([*names, *parts])
        if isinstance(value, list | tuple):
            return [name for each in value for name in self.found_in(each)]
        return []


def _occurrence_of(value: str) -> re.Pattern[str]:
    """Return the pattern of a value. A short one, such as a user's name, counts as a whole word only."""
    if len(value) >= 8:
        return re.compile(re.escape(value))
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])")
