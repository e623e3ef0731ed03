"""Redaction of secrets in logs and errors: keys, tokens, signatures, and the values of the job's secrets.

`redact` recognizes secrets by their format, which their issuers fix, by the name before them, or by a value passed to
`register_values`. It redacts too much rather than too little, but never ids, digests, uris and numbers; JSON stays
valid.

A log has many lines and few secrets: a text without any of a rule's keywords is passed through without a regular
expression.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.strict_json import dump_json, load_json
from cloudtrain_runtime.contract.token_formats import FORMATS

REPLACEMENT = "***"
"""Replacement of a redacted value."""

MIN_CHARACTERS = 6
"""Shorter values are not redacted by value: `true` or `1` would remove half of a log."""

_RULES = tuple((each.needles, f"({each.begin}){each.value}") for each in FORMATS)
"""Patterns of values to redact, each after the lowercase keywords without which no text matches it.

A pattern's group is kept, and the rest is redacted. It is compiled on demand: most processes never need it.
"""

# More names than in other texts: these are members of a value that is a secret.
_SECRET_NAME = lazy_pattern(r"(?i)pass|secret|token|key|credential|auth")
_WORDS = tuple((needle, pattern) for needles, pattern in _RULES for needle in needles.split())

_KEY_LINE = lazy_pattern(r"(\s*(?:\[[^\]\s]{1,40}\]:?\s*)?)[A-Za-z0-9+/]{1,80}={0,2}\s*")
"""A line of a private key, behind the mark of its rank."""
_KEY_LINES = 200
"""Most lines of a key, if its end is not seen."""

_kept: dict[str, None] = {}
_by_value: list[re.Pattern[str]] = []


def register_values(values: Iterable[str]) -> None:
    """Register values that `redact` replaces from now on in this process.

    Args:
        values: Values of secrets. Those with fewer than `MIN_CHARACTERS` characters are ignored.
    """
    for value in values:
        _kept.update(dict.fromkeys(encoded_forms(value)))
    # Longest first, so that a value that contains another one is replaced completely.
    longest = sorted(_kept, key=len, reverse=True)
    patterns = []
    if longest:
        patterns.append(re.compile("|".join(map(re.escape, longest))))
    # Replaced in one step, because other threads may redact meanwhile.
    _by_value[:] = patterns


def encoded_forms(value: str) -> Iterator[str]:
    """Yield the forms of a value in a text: in JSON, Python, HTML, a uri, base64, line by line, and its parts."""
    # Few processes have secrets, and all import this module at their start.
    import html

    in_json = (dump_json(value)[1:-1], dump_json(value, ensure_ascii=False)[1:-1])
    in_uri = (quote(value, safe=safe, errors="replace") for safe in ("", "/"))
    forms = (
        value,
        *in_json,
        # JSON inside a string of JSON.
        dump_json(in_json[0])[1:-1],
        repr(value)[1:-1],
        html.escape(value),
        *in_uri,
        quote_plus(value, errors="replace"),
        *_in_base64(value),
    )
    yield from dict.fromkeys(form for form in forms if len(form) >= MIN_CHARACTERS)
    if "\n" in value:
        # Short lines of a value may be common text.
        yield from (line for line in value.splitlines() if len(line) >= 2 * MIN_CHARACTERS)
    if value.lstrip().startswith("{"):
        for part in _parts(value):
            yield from encoded_forms(part)


def _in_base64(value: str) -> Iterator[str]:
    """Yield what a longer text with this value has of it in base64, such as `user:value` of basic authorization."""
    content = value.encode("utf-8", "surrogatepass")
    for before, mixed in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(before) + content).decode().rstrip("=")
        # The first and the last characters depend on what is around the value.
        is_last_mixed = (before + len(content)) % 3 != 0
        end = len(encoded) - is_last_mixed
        yield encoded[mixed:end]


def _parts(value: str) -> Iterator[str]:
    """Yield the values in a JSON object whose names indicate a secret, such as a password but not a user name."""
    with contextlib.suppress(ValueError):
        content = load_json(value)
        if not isinstance(content, dict):
            return
        for name, part in content.items():
            if isinstance(part, str) and _SECRET_NAME.search(name):
                yield part


def redact(text: str) -> str:
    """Return a text with keys, tokens and registered values replaced."""
    for found in _by_value:
        text = found.sub(REPLACEMENT, text)
    lowercase = text.lower()
    for pattern in {rule: None for needle, rule in _WORDS if needle in lowercase}:
        text = _compiled(pattern).sub(_hide, text)
    return text


class LineRedactor:
    """Redacts the lines of one stream, of which each is a text of its own, and private keys go over many."""

    def __init__(self) -> None:
        self._left = 0

    def redact(self, line: str) -> str:
        """Return the next line with keys, tokens and registered values replaced."""
        if self._left and (body := _KEY_LINE.fullmatch(line)) is not None:
            self._left -= 1
            return body[1] + REPLACEMENT
        if "PRIVATE KEY" in line:
            has_begun = "-----BEGIN" in line and "-----END" not in line
            self._left = _KEY_LINES if has_begun else 0
        return redact(line)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _hide(match: re.Match[str]) -> str:
    return "".join([part or "" for part in match.groups()]) + REPLACEMENT


class RedactingStream:
    """Redacts values in a stream of bytes. A possible beginning of a value is held back until the next piece.

    Args:
        values: As for `register_values`.
    """

    def __init__(self, values: Iterable[str]) -> None:
        found = {
            form.encode("utf-8", "surrogateescape")
            for value in values
            for form in encoded_forms(value)
        }
        self._values = sorted(found, key=len, reverse=True)
        self._pattern: re.Pattern[bytes] | None = None
        if found:
            self._pattern = re.compile(b"|".join(map(re.escape, self._values)))
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Add a piece; return the bytes that can be printed."""
        if self._pattern is None:
            return piece
        text = self._pattern.sub(REPLACEMENT.encode(), self._rest + piece)
        held = self._held_bytes(text)
        self._rest = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> bytes:
        """Return the bytes that are held back: no more data is expected soon."""
        rest = self._rest
        self._rest = b""
        return rest

    def _held_bytes(self, text: bytes) -> int:
        """Return the number of bytes at the end that may be the beginning of a value."""
        longest = min(len(text), max(map(len, self._values)) - 1)
        for count in range(longest, 0, -1):
            end = text[-count:]
            if any(value.startswith(end) for value in self._values):
                return count
        return 0
