"""What looks like a credential, by a file's name and by its text.

No general scanner starts fast enough to run before every plan, so this is a table of tokens whose shape their issuers
fix. Sources of the shapes: the issuers' documentation and gitleaks' rules (config/gitleaks.toml), 2026-11.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from cloudtrain.bundle.names import NameTable

SCANNED_BYTES = 4 * 2**20
"""What lies behind is data, not text that somebody wrote a token into."""

_TAIL, _DISTINCT = 20, 4
"""The random part of a token, and how many different characters 20 random ones have at the least."""
MOST_FINDINGS = 3
"""Findings that are told of one file."""


class Finding(NamedTuple):
    """Something that looks like a credential. Never holds the credential itself.

    Attributes:
        name: The file, relative to the code folder.
        line: 1-based line, or None where the name alone says it.
        kind: What it looks like.
    """

    name: str
    line: int | None
    kind: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}" if self.line is None else f"{self.name}:{self.line}: {self.kind}"


FOLDERS = {
    ".aws": "AWS configuration and credentials",
    ".azure": "Azure configuration and credentials",
    ".gnupg": "GnuPG keys",
    ".kube": "Kubernetes configuration and credentials",
    ".ssh": "SSH keys",
}
_HARMLESS = (".example", ".sample", ".template", ".dist", ".pub")
_NAMES = NameTable(
    {
        "environment file": (".env", ".env[.~_-]*", "*.env", "*.env.bak", "env.prod*", ".envrc", ".flaskenv"),
        # Other private keys (*.pem, *.key) are known by their text: most files of these names hold certificates.
        "private key": ("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.ppk"),
        "key store": ("*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.keytab"),
        "passwords of hosts": (".netrc", "_netrc", ".git-credentials", ".pgpass", ".htpasswd"),
        "credentials": (
            *("credentials", "credentials.json", "credentials.csv", "credentials.txt", "aws_credentials*"),
            *("application_default_credentials.json",),
            *(
                "client_secret*.json",
                "service-account*.json",
                "service_account*.json",
                "*_accesskeys.csv",
                "kaggle.json",
            ),
            *("secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml", ".pypirc", ".dockercfg"),
        ),
        "Terraform state": ("terraform.tfstate", "terraform.tfstate.backup"),
    }
)
_GLUE = rb"[\\\"'\])]{0,4}(?:\s*(?:[:=,]|=>)\s*|[ \t]+)[\\\"']{0,2}"
"""Between a variable's name and its value: `=`, `: `, `"] = "`, `", "`, a space, also escaped as in a notebook."""
_TEXTS = {
    "AWS access key id": rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "AWS secret access key": rb"(?i:secret_?access_?key)%b[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])" % _GLUE,
    "GitHub token": rb"\bgh[opsru]_[A-Za-z0-9]{36}|\bgithub_pat_[A-Za-z0-9_]{22}",
    "GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20}",
    "Hugging Face token": rb"\bhf_[A-Za-z0-9]{30}",
    "OpenAI or Anthropic key": rb"\bsk-(?:(?:ant|proj|svcacct|admin)-[A-Za-z0-9_-]{20}|[A-Za-z0-9]{32})",
    "Slack token": rb"\bxox[abeoprs]-[A-Za-z0-9-]{12}",
    "Google API key": rb"\bAIza[A-Za-z0-9_-]{35}",
    "npm token": rb"\bnpm_[A-Za-z0-9]{36}\b",
    "PyPI token": rb"\bpypi-AgE[A-Za-z0-9_-]{40}",
    "Stripe key": rb"\b[rs]k_live_[A-Za-z0-9]{16}",
    "JSON web token": rb"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8}",
    "Weights & Biases key": (
        rb"(?:(?i:wandb_api_key)%b|wandb login |wandb\.login\([^)\n]{0,60}key=[\"']|\bpassword\s+)"
        rb"[0-9a-f]{40}\b" % _GLUE
    ),
    "registry token": rb"_authToken\s*=\s*[\"']?[A-Za-z0-9_-]{20}",
    "password of a registry": rb"\"auth\"\s*:\s*\"[A-Za-z0-9+/]{20}",
    "private key": rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[ \t]*(?:\\[nr]|\r|\n)",
}
_TOKEN = re.compile(b"|".join(rb"(%b)" % text for text in _TEXTS.values()))
_KINDS = tuple(_TEXTS)

# The expression is slow, 3 MB/s. Searches in C come first, and show it only the places that may hold a token.
_RUN = b"x" * 20
"""No token is shorter than an AWS access key id, 20 characters."""
_LETTERS = bytes(ord("x") if bytes([code]).isalnum() else ord(" ") for code in range(256))
_TOKENS = bytes(ord("x") if bytes([code]).isalnum() or code in b"_-+/" else ord(" ") for code in range(256))
_ANCHORS = (b"sk-", b"xox", b"AIza", b"glpat-", b"pypi-A", b"ecret", b"ECRET")
"""Starts of tokens that may hold no run of 20 letters and digits, because other characters break it."""
_PREFIX = re.compile(rb"(?:AK|AS)IA|gh[opsru]_|github_pat_|hf_|npm_|k_live_|eyJ|(?i:secret|wandb|password|auth)")
"""One of these stands before or in each run of 20 that belongs to a token without an anchor."""
_BEFORE, _BEHIND = 48, 128
"""Bytes around a place that are looked at, such as `aws_secret_access_key = "`."""

VERSION = hashlib.sha256(_TOKEN.pattern).hexdigest()
"""Changes with the table: what an older one found is worth nothing."""


def by_name(base: str) -> str | None:
    """Return what a file's name says that it holds, or None.

    Args:
        base: The name without its folder.
    """
    return None if base.lower().endswith(_HARMLESS) else _NAMES.find(base.lower())


def in_text(data: bytes) -> list[tuple[int, str]]:
    """Return (line, kind) of what looks like a credential, at most `MOST_FINDINGS`; nothing of what is no text."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", "replace").encode()
    if data.find(b"\0", 0, 8000) >= 0:  # as git tells text
        return []
    found: list[tuple[int, str]] = []
    for at, kind in _search(data):
        line = (data.count(b"\n", 0, at) + 1, kind)
        if line not in found:
            found.append(line)
        if len(found) == MOST_FINDINGS:
            break
    return sorted(found)


def _search(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield offset and kind of each token; the same one perhaps twice."""
    for header in _all(data, b"PRIVATE KEY"):
        yield from _tokens(data, header - _BEFORE, header + _BEHIND)
    if _RUN not in data.translate(_TOKENS):
        return
    letters = data.translate(_LETTERS)
    at = letters.find(_RUN)
    while at >= 0:
        end = letters.find(b" ", at)
        end = len(data) if end < 0 else end
        if _PREFIX.search(data, max(0, at - _BEFORE), end):
            yield from _tokens(data, at - _BEFORE, end + _BEHIND)
        at = letters.find(_RUN, end)
    for anchor in _ANCHORS:
        for at in _all(data, anchor):
            yield from _tokens(data, at - _BEFORE, at + _BEHIND)


def _all(data: bytes, part: bytes) -> Iterator[int]:
    """Yield where a part lies."""
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + len(part))


def _tokens(data: bytes, begin: int, end: int) -> Iterator[tuple[int, str]]:
    for match in _TOKEN.finditer(data, max(0, begin), end):
        # AWS's documentation writes EXAMPLE into every key that it shows.
        if match.lastindex is not None and b"EXAMPLE" not in match[0] and _is_random(match[0]):
            yield match.start(), _KINDS[match.lastindex - 1]


def _is_random(token: bytes) -> bool:
    """Whether a token is no word or filler that only has its shape."""
    tail = token[-_TAIL:]
    kinds = sum(any(test(chr(code)) for code in tail) for test in (str.isdigit, str.isupper, str.islower))
    return len(set(tail)) >= _DISTINCT and (kinds > 1 or b"KEY" in token or tail.isdigit())
