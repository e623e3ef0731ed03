"""Scanner for credentials, by file names and by content.

General scanners start too slowly to run before every plan. This one has two tables, names of credential files and names
whose content decides, and the formats of tokens that logs are searched for, too.
"""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cloudtrain.support.data_files import DataFile, data_files
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.token_formats import FORMATS, URL_CREDENTIALS

SCANNED_BYTES = 4 * 2**20
"""Bytes at the start of a file that are scanned. Longer files are data, not text that a person wrote."""

MAX_MATCHES = 3
"""Most matches that are reported per file."""

MAX_FILES = 20_000
"""Most files whose names are checked in a folder of data."""

_PROOF_BYTES = 2**16
"""Bytes that are read of a data file whose name alone does not decide."""


class NameTable:
    """Meanings of file names.

    Args:
        patterns: Shell patterns by meaning. The first meaning that fits counts.
    """

    def __init__(self, patterns: Mapping[str, Iterable[str]]) -> None:
        self._meanings = tuple(patterns)
        self._patterns = patterns

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        # One expression: ten thousand names times fifty patterns would take longer than to read the files.
        groups = ("|".join(map(fnmatch.translate, several)) for several in self._patterns.values())
        return re.compile("|".join(f"({group})" for group in groups))

    def find(self, base: str) -> str | None:
        """Return what a name without its folder means, or None."""
        match = self._pattern.match(base)
        return (
            None
            if match is None or match.lastindex is None
            else self._meanings[match.lastindex - 1]
        )


class SecretMatch(NamedTuple):
    """A place that looks like a credential. It never contains the credential itself.

    `line` is 1-based, or None for a match of the file's name or of a binary file.
    """

    name: str
    line: int | None
    kind: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.kind}"
            if self.line is None
            else f"{self.name}:{self.line}: {self.kind}"
        )


_FOLDERS = {
    ".aws": "AWS configuration and credentials",
    ".azure": "Azure configuration and credentials",
    ".gnupg": "GnuPG keys",
    ".kube": "Kubernetes configuration and credentials",
    ".ssh": "SSH keys",
}
_BACKUPS = (".bak", ".backup", ".old", ".orig", ".save", ".tmp", ".copy")
_HARMLESS_ENDS = (
    *(".example", ".sample", ".template", ".tmpl", ".dist", ".pub"),
    *(
        ".c",
        ".go",
        ".h",
        ".html",
        ".java",
        ".js",
        ".md",
        ".py",
        ".rs",
        ".rst",
        ".ts",
    ),  # sources are read as text
)
_HARMLESS_STARTS = ("example.", "sample.", "template.")

_NAMES = NameTable(
    {
        "environment file": (
            *(
                ".env",
                ".env.*",
                ".env[-_]*",
                ".envrc",
                ".flaskenv",
                "env.prod*",
                "env.dev*",
                "env.stag*",
                "env.local",
            ),
            *(
                "prod.env",
                "production.env",
                "dev.env",
                "local.env",
                "staging.env",
                "secret.env",
                "secrets.env",
            ),
        ),
        "private key": (
            "id_rsa",
            "id_dsa",
            "id_ecdsa",
            "id_ed25519",
            "id_rsa[-_]*",
            "id_ecdsa[-_]*",
            "id_ed25519[-_]*",
        ),
        "key store": ("*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.keytab"),
        "passwords of hosts": (".netrc", "_netrc", ".git-credentials", ".pgpass", ".htpasswd"),
        "credentials": (
            *(
                "credentials",
                "credentials.csv",
                "credentials.txt",
                "application_default_credentials.json",
            ),
            *(
                "aws_credentials",
                "aws_credentials.*",
                "aws-credentials",
                "aws-credentials.*",
                ".aws_credentials",
            ),
            *(
                "client_secret*.json",
                "service-account*.json",
                "service_account*.json",
                "*_accesskeys.csv",
            ),
            *("kaggle.json", ".pypirc", ".dockercfg", ".boto", ".s3cfg", "rclone.conf"),
            *("secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml"),
        ),
        "Terraform state": ("terraform.tfstate",),
    }
)
"""Lowercase names of files that are credentials."""

_PAIRS = {".huggingface/token": "Hugging Face token", "huggingface/token": "Hugging Face token"}
"""The same for a file in a folder."""

_SUSPECTS = NameTable(
    {
        "private key": ("*.pem", "*.key", "*.p8", "*.pk8", "*.ppk", "*.der"),
        "environment file": ("*.env",),
        "credentials": (
            "credentials.json",
            "credentials.yaml",
            "credentials.yml",
            "credentials.toml",
            "credentials.ini",
        ),
        "npm token": (".npmrc",),
    }
)
"""Lowercase names of files that may be credentials: certificates are `.pem`, too, and Gym environments `.env`."""

_SUSPECT_PAIRS = {".docker/config.json": "passwords of registries"}

# More names than in other files and logs: the name of such a file already says that it may have secrets.
_ASSIGNMENT = (
    rb"(?i:(?:secret|token|passw(?:or)?d|pwd|passphrase|[_-]?key|auth|dsn)[\"']?[ \t]*[:=][ \t]*[\"']?"
    rb"(?!your|example|xxx|change|null|none|true|false|http|todo)[^\s\"',<>{}\[\]$%*.#][^\s\"',<>{}\[\]$]{3})"
    rb"|" + URL_CREDENTIALS.encode()
)
_PROOFS = {
    "private key": lazy_pattern(
        rb"PRIVATE KEY(?: BLOCK)?-----|\APuTTY-User-Key-File"
        # DER (RFC 5958, 8017, 5915): a sequence that begins with version 0 or 1, or with the name of a cipher.
        rb"|\A\x30(?:[\x00-\x7f]|\x81.|\x82..)(?:\x02\x01[\x00\x01][\x02\x04\x30]"
        rb"|\x30.{1,3}\x06.\x2a\x86\x48\x86\xf7\x0d\x01[\x05\x0c])"
        rb"|\A\s*(?=[A-Za-z+/_-]*[0-9])[A-Za-z0-9+/_-]{32,}={0,2}\s*\Z",
        re.DOTALL,
    ),
    "environment file": lazy_pattern(_ASSIGNMENT),
    "credentials": lazy_pattern(_ASSIGNMENT),
    "npm token": lazy_pattern(rb"_(?:auth|authToken|password)[ \t]*=[ \t]*[\"']?[^\s\"'$]"),
    "passwords of registries": lazy_pattern(
        rb"\"(?:auth|identitytoken|registrytoken)\"\s*:\s*\"[^\"$]"
    ),
}
"""Patterns that prove by content that such a file is a credential."""

_IN_FILES = tuple(
    (
        each.kind,
        tuple(needle.encode() for needle in each.needles.split()),
        f"{each.begin}{each.value if each.in_files is None else each.in_files}".encode(),
    )
    for each in FORMATS
    if each.in_files != ""
)
"""Kind, lowercase words and pattern of each format that files are searched for."""
_FEWEST_CHARACTERS = 6
"""Different ones in the last 16 of a token: 16 hexadecimal digits by chance have fewer once in 25,000 times; zeros or
`xxxx`, which are placeholders, have one."""

# Regular expressions are slow, so they run only where fast searches find a possible token.
_RUN = b"x" * 20
"""No token is shorter than an AWS access key id, 20 characters."""
_LETTERS = bytes(ord("x") if bytes([code]).isalnum() else ord(" ") for code in range(256))
_TOKENS = bytes(
    ord("x") if bytes([code]).isalnum() or code in b"_-+/" else ord(" ") for code in range(256)
)
_ANCHORS = (
    *(b"xox", b"xapp-", b"AIza", b"glpat-", b"pypi-A", b"ecret", b"ECRET", b"PRIVATE KEY"),
    *(
        b"gldt-",
        b"glrt-",
        b"glcbt-",
        b"glptt-",
        b"glagent-",
        b"hooks.slack.com/",
        b"nvapi-",
        b"SG.",
    ),
    *(b"uthorization", b"UTHORIZATION", b"earer ", b"EARER ", b"AccountKey=", b"?sig=", b"&sig="),
)
"""Starts of tokens that may have no run of 20 letters and digits, because of other characters."""
_PREFIX = lazy_pattern(
    rb"(?:AK|AS)IA|gh[opsru]_|github_pat_|hf_|api_org_|npm_|k_live_|gsk_|r8_|eyJ|(?i:secret|wandb|(?:session|security)[-_ ]?token)"
)
"""One of these is before or in each run of 20 that belongs to a token without an anchor."""
_BEFORE, _BEHIND = 160, 128
"""Bytes before and behind a place that are searched, such as `wandb.login(relogin=True, key="`."""

_PAIRS_OF_WORDS = ((b"://", b"@"), (b"curl ", b"-u"), (b"machine ", b"password"))
"""Words of passwords that count only with a second one behind them."""
_PAIR_BYTES = 400
"""Bytes behind the first word, such as the `://` of a URL: user and password."""

VERSION = hashlib.sha256(repr((_IN_FILES, _PROOFS, _FEWEST_CHARACTERS, 4)).encode()).hexdigest()
"""Changes with the tables, which invalidates cached results."""


def kind_of_folder(base: str) -> str | None:
    """Return the kind of credentials in a folder of this name, without the folder above it, or None."""
    return _FOLDERS.get(base.lower())


def kind_by_name(name: str) -> str | None:
    """Return the kind of credentials in a file of this name, or None.

    The last two parts of a path count, in any case.
    """
    base, pair = _plain(name)
    return None if _is_harmless(base) else _NAMES.find(base) or _PAIRS.get(pair)


def suspected_kind(name: str) -> str | None:
    """Return the kind of credentials that a file of this name may contain, depending on its content, or None."""
    base, pair = _plain(name)
    return None if _is_harmless(base) else _SUSPECTS.find(base) or _SUSPECT_PAIRS.get(pair)


def _plain(name: str) -> tuple[str, str]:
    """Return a name without its folders, and with one, in lower case and without what an editor's backup adds."""
    lower = name.lower()
    while lower.endswith(_BACKUPS):
        lower = lower.rpartition(".")[0]
    folder, _, base = lower.rpartition("/")
    base = base.strip("#~")  # Emacs' `#name#` and `name~`
    return base, f"{folder[folder.rfind('/') + 1 :]}/{base}"


def _is_harmless(base: str) -> bool:
    return base.endswith(_HARMLESS_ENDS) or base.startswith(_HARMLESS_STARTS)


def scan_file(name: str, data: bytes) -> list[tuple[int, str]]:
    """Return (line, kind) of what looks like a credential in the start of a file's content; line 0 if it is no text.

    There are at most `MAX_MATCHES`. The name, as for `kind_by_name`, selects additional patterns.
    """
    found, kind = scan_text(data), suspected_kind(name)
    proof = _prove(kind, data) if kind is not None else None
    return found if proof is None or proof in found else sorted([proof, *found])[:MAX_MATCHES]


def _prove(kind: str, data: bytes) -> tuple[int, str] | None:
    text = _as_text(data)
    match = _PROOFS[kind].search(data if text is None else text)
    if match is None:
        return None
    return (0 if text is None else text.count(b"\n", 0, match.start()) + 1), kind


def scan_text(data: bytes) -> list[tuple[int, str]]:
    """Return (line, kind) of what looks like a credential, at most `MAX_MATCHES`; nothing of what is no text."""
    text = _as_text(data)
    if text is None:
        return []
    found: dict[tuple[int, str], None] = {}
    line, counted = 1, 0
    for at, kind in _search(text):
        line, counted = line + text.count(b"\n", counted, at), at
        found[line, kind] = None
        if len(found) == MAX_MATCHES:
            break
    return sorted(found)


def _as_text(data: bytes) -> bytes | None:
    """Return text in an encoding that keeps ASCII, as it is or from UTF-16; None of what is no text."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace").encode("utf-8", "replace")
    if data.find(b"\0", 0, 8000) < 0:  # the rule by which git recognises text
        return data
    # Windows' shells write UTF-16, in which each ASCII character has a zero before or behind it.
    for encoding, zeros in (("utf-16-le", data[1:8000:2]), ("utf-16-be", data[:8000:2])):
        if zeros.count(b"\0") > 0.7 * len(zeros):
            return data.decode(encoding, "replace").encode("utf-8", "replace")
    return None


def _search(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield offset and kind of each token, in order. Each byte is searched once, however many places look like one."""
    begin = end = 0
    for first, last in (*sorted(_windows(data)), (len(data) + 1, len(data) + 1)):
        if first > end:
            yield from _tokens(data, begin, end)
            begin = first
        end = max(end, min(last, len(data)))


def _windows(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each part of a text that may contain a token."""
    yield from _pairs(data)
    for anchor in _ANCHORS:
        for at in _all(data, anchor):
            yield at - _BEFORE, at + _BEHIND
    tokens = data.translate(_TOKENS)
    if _RUN not in tokens:
        return
    letters = data.translate(_LETTERS)
    at = letters.find(_RUN)
    while at >= 0:
        end = letters.find(b" ", at)
        end = len(data) if end < 0 else end
        if _PREFIX.search(data, max(0, at - _BEFORE), end):
            yield at - _BEFORE, end + _BEHIND
        at = letters.find(_RUN, end)
    at = data.find(b"sk-")  # as in task-7
    while at >= 0:
        is_start = not letters[max(0, at - 1) : at].strip() and tokens.startswith(_RUN, at)
        if is_start:
            yield at - _BEFORE, at + 2 * _BEHIND
        # A text may have thousands in a row, and what begins soon behind a found one is in the same part.
        at = data.find(b"sk-", at + (_BEHIND if is_start else 1))


def _pairs(data: bytes) -> Iterator[tuple[int, int]]:
    for first, second in _PAIRS_OF_WORDS:
        for at in _all(data, first):
            if data.find(second, at, at + _PAIR_BYTES) >= 0:
                yield at - _BEFORE, at + _PAIR_BYTES


def _all(data: bytes, part: bytes) -> Iterator[int]:
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + len(part))


def _tokens(data: bytes, begin: int, end: int) -> Iterator[tuple[int, str]]:
    """Yield offset and kind of each token in a part of a text, in order; of several at one place the first format."""
    begin = max(0, begin)
    words = data[begin:end].lower()
    found = [
        (match.start(), order, match.end(), kind)
        for order, (kind, needles, pattern) in enumerate(_IN_FILES)
        if any(needle in words for needle in needles)
        for match in _compiled(pattern).finditer(data, begin, end)
        if _is_token(match[0])
    ]
    last = begin
    for at, _, behind, kind in sorted(found):
        if at >= last:
            yield at, kind
            last = behind


@functools.cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)


def _is_token(text: bytes) -> bool:
    """Return whether a match is no placeholder: AWS's documentation writes EXAMPLE into every key that it shows."""
    return b"EXAMPLE" not in text and len(set(text[-16:])) >= _FEWEST_CHARACTERS


def scan_folder(path: Path, *, most: int = 10) -> list[SecretMatch]:
    """Return the files in a folder of data whose names are those of credentials, sorted by name.

    Data is too large to search: only the start of files with an undecided name, such as `.pem`, is read. Files that
    cannot be read are skipped; the upload reports them.

    Args:
        path: A folder or a file; a missing one gives no matches.
        most: Most matches. The search also ends after `MAX_FILES` files.
    """
    own = kind_of_folder(path.absolute().name) if path.is_dir() else None
    if own is not None:
        return [SecretMatch(f"{path.name}/", None, own)]
    found: dict[SecretMatch, None] = {}
    for file in itertools.islice(data_files(path), MAX_FILES):
        if (match := _match_in_data(file)) is not None:
            found[match] = None
        if len(found) == most:
            break
    return list(found)


def _match_in_data(file: DataFile) -> SecretMatch | None:
    """Return the match of a data file, or of the first folder above it that holds credentials."""
    parts = file.name.split("/")
    for depth, part in enumerate(parts[:-1], start=1):
        if (kind := kind_of_folder(part)) is not None:
            return SecretMatch("/".join(parts[:depth]) + "/", None, kind)
    kind = _in_data(file.name, str(file.path))
    return None if kind is None else SecretMatch(file.name, None, kind)


def _in_data(name: str, path: str) -> str | None:
    """Return the kind of credentials in a data file, by its name and, for a link, by the name of its target."""
    for each in (name, os.path.realpath(path)) if os.path.islink(path) else (name,):  # noqa: PTH114 (often)
        kind = kind_by_name(each)
        if kind is not None:
            return kind
        kind = suspected_kind(each)
        if kind is not None:
            with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123 (a string)
                if _prove(kind, file.read(_PROOF_BYTES)) is not None:
                    return kind
    return None
