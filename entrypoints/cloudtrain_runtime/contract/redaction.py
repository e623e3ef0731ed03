"""Redaction of secrets in logs and errors: keys, tokens, signatures, and the values of the job's secrets.

`redact` recognizes secrets by their format, which their issuers fix, by the name before them, or by a value passed to
`register_values`. It redacts too much rather than too little, but never ids, digests, uris and numbers; JSON stays
valid. The SDK's scanner of files has its own table of patterns, which is stricter, because a finding there stops the
user.

A log has many lines and few secrets: a text without any of a rule's keywords is passed through without a regular
expression.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import json
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

from cloudtrain_runtime.contract.strict_json import dump_json

REPLACEMENT = "***"
"""Replacement of a redacted value."""

MIN_CHARACTERS = 6
"""Shorter values are not redacted by value: `true` or `1` would remove half of a log."""

_GAP = r"""[\\"'`\s()\[\]{},:=>]{1,12}"""
"""Characters between a name and its value: `=`, `": "`, the same escaped, `</Name>`'s end, `, value = `."""
_MIXED = r"(?=[^\s\"'\\]{0,80}[0-9])(?=[^\s\"'\\]{0,80}[A-Za-z])"
"""Both letters and digits, which distinguishes a value from a name such as `required` or `os.environ`."""


_RULES: tuple[tuple[str, str], ...] = (
    (
        "-----begin",
        r"(-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----)(?:[A-Za-z0-9+/=:,\s]|\\[nr]|-(?!----))+",
    ),
    # The id, and the secret that may follow it, as in a table of keys.
    (
        "akia asia",
        r"\b(?:AKIA|ASIA(?=[A-Z]*[0-9]))[A-Z0-9]{16}\b(?:"
        + _GAP
        + r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?",
    ),
    (
        "secret",
        r"((?i:secret[-_ ]?(?:access[-_ ]?)?key)\w{0,20}"
        + _GAP
        + r")(?=[^\s\"'\\]{0,39}[0-9/+])[A-Za-z0-9/+]{40}"
        r"(?![A-Za-z0-9/+=])",
    ),
    (
        "session_token sessiontoken session-token security-token securitytoken security_token",
        r"((?i:(?:session|security)[-_ ]?token)" + _GAP + r")[A-Za-z0-9/+=%._-]{16,}",
    ),
    (
        "authorization",
        r"((?i:authorization)[\\\"']*\s*[:=]\s*[\\\"']*(?i:basic|token|apikey)\s+)[^\s\"'\\,]{8,}",
    ),
    ("bearer", r"((?i:\bbearer)\s+)" + _MIXED + r"[A-Za-z0-9._~+/=-]{8,}"),
    # Presigned uris, SigV4's header, signed uris and callbacks of other services.
    (
        "signature= x-amz- sig= awsaccesskeyid= token= api_key= apikey= x-goog-",
        (
            r"((?i:\bX-(?:Amz|Goog)-(?:Signature|Security-Token|Credential)=|\bSignature=|[?&](?:sig|AWSAccessKeyId"
            r"|(?:access_|auth_|id_)?token|api_?key)=))[^&\s\"'<>\\#;,)]+"
        ),
    ),
    ("@", r"(\b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@\"']{0,80}:)[^\s/@\"'\\]{1,300}(?=@)"),
    ("hf_ api_org_", r"\b(hf_|api_org_)[A-Za-z0-9]{30,}"),
    ("ghp_ gho_ ghs_ ghu_ ghr_ github_pat_", r"\b(gh[opsru]_|github_pat_)[A-Za-z0-9_]{22,}"),
    ("glpat-", r"\b(glpat-)[A-Za-z0-9_-]{20,}"),
    (
        "sk-",
        r"\b(sk-)(?=[A-Za-z_-]{0,80}[0-9])(?:(?:ant|proj|svcacct|admin)-[A-Za-z0-9_-]{16,}|[A-Za-z0-9]{20,})",
    ),
    ("xox", r"\b(xox[abeoprs]-)[A-Za-z0-9-]{10,}"),
    ("aiza", r"\b(AIza)[A-Za-z0-9_-]{35}"),
    ("npm_", r"\b(npm_)[A-Za-z0-9]{36}\b"),
    ("pypi-", r"\b(pypi-)AgE[A-Za-z0-9_-]{40,}"),
    ("k_live_", r"\b([rs]k_live_)[A-Za-z0-9]{16,}"),
    ("eyj", r"\b(eyJ)[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
    (
        "wandb",
        r"((?i:wandb_?(?:api_?)?key)\w{0,20}"
        + _GAP
        + r"|\bwandb[\s\"',.]{1,4}login\b[^\n]{0,60}?\b)[0-9a-f]{40}\b"
        r"|\b(wandb_v1_)[A-Za-z0-9_]{40,}",
    ),
    (
        "passw passphrase api_key apikey api-key access_token auth_token access-token auth-token",
        r"((?i:passw(?:or)?d|passphrase|api[-_]?key|(?:access|auth)[-_]token)[\\\"']{0,2}\s{0,2}[:=]\s{0,2}[\\\"']{0,2})"
        + _MIXED
        + r"[A-Za-z0-9_+/=~!@#$^&*-]{8,}(?![\w.(\[])",
    ),
)
"""Patterns of values to redact, each after the lowercase keywords without which no text matches it.

A pattern's groups are kept, and the rest is redacted. It is compiled on demand: most processes never need it.
"""

_SECRET_NAME = re.compile(r"(?i)pass|secret|token|key|credential|auth")
_WORDS = tuple((needle, pattern) for needles, pattern in _RULES for needle in needles.split())

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
    _by_value[:] = [re.compile("|".join(map(re.escape, longest)))] if longest else []


def encoded_forms(value: str) -> Iterator[str]:
    """Yield the forms of a value in a text: in JSON, Python, HTML, a uri, base64, line by line, and its parts."""
    in_json = (dump_json(value)[1:-1], dump_json(value, ensure_ascii=False)[1:-1])
    in_uri = (quote(value, safe=safe, errors="replace") for safe in ("", "/"))
    forms = (
        *(value, *in_json, dump_json(in_json[0])[1:-1], repr(value)[1:-1], html.escape(value)),
        *(*in_uri, quote_plus(value, errors="replace"), *_in_base64(value)),
    )
    lines = value.splitlines() if "\n" in value else ()
    yield from dict.fromkeys(form for form in forms if len(form) >= MIN_CHARACTERS)
    yield from (line for line in lines if len(line) >= 2 * MIN_CHARACTERS)
    for part in _parts(value) if value.lstrip().startswith("{") else ():
        yield from encoded_forms(part)


def _in_base64(value: str) -> Iterator[str]:
    """Yield what a longer text with this value has of it in base64, such as `user:value` of basic authorization."""
    content = value.encode("utf-8", "surrogatepass")
    for before, mixed in ((0, 0), (1, 2), (2, 3)):
        encoded = base64.b64encode(bytes(before) + content).decode().rstrip("=")
        # The first and the last characters depend on what is around the value.
        yield encoded[mixed : len(encoded) - bool((before + len(content)) % 3)]


def _parts(value: str) -> Iterator[str]:
    """Yield the values in a JSON object whose names indicate a secret, such as a password but not a user name."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(value)
        pairs = content.items() if isinstance(content, dict) else ()
        yield from (
            part for name, part in pairs if isinstance(part, str) and _SECRET_NAME.search(name)
        )


def redact(text: str) -> str:
    """Return a text with keys, tokens and registered values replaced."""
    for found in _by_value:
        text = found.sub(REPLACEMENT, text)
    lowercase = text.lower()
    for pattern in {rule: None for needle, rule in _WORDS if needle in lowercase}:
        text = _compiled(pattern).sub(_hide, text)
    return text


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
        self._pattern = re.compile(b"|".join(map(re.escape, self._values))) if found else None
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
        rest, self._rest = self._rest, b""
        return rest

    def _held_bytes(self, text: bytes) -> int:
        """Return the number of bytes at the end that may be the beginning of a value."""
        longest = min(len(text), max(map(len, self._values)) - 1)
        for count in range(longest, 0, -1):
            end = text[-count:]
            if any(value.startswith(end) for value in self._values):
                return count
        return 0
