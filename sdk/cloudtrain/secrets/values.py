"""Secrets among named values: settings, environment variables, tags and command-line arguments."""

from __future__ import annotations

import re
from typing import Any

from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.redaction import REPLACEMENT, redact
from cloudtrain_runtime.contract.token_formats import NAME_OF_SECRET, URL_CREDENTIALS

_PASSWORDS = r"(?:password|passwd|passphrase|(?:^|_)pwd|(?:^|_|ssh)pass)(?:$|_)"
_PASSWORD = lazy_pattern(rf"(?i){_PASSWORDS}")
_VARIABLE = lazy_pattern(
    rf"(?i)(?:^|_)(?:secret|token|credentials?|{NAME_OF_SECRET})(?:$|_)|token$|apikey$|{_PASSWORDS}"
)
# `token` alone is not included: it is most often an argument of a tokenizer.
_ARGUMENT = lazy_pattern(rf"(?i)(?:^|[-_])(?:secret|{NAME_OF_SECRET})$")
# Such names are often harmless, so the value must look random, too.
_MAYBE_SECRET = lazy_pattern(r"(?i)(?:key|auth)$")
_CONNECTION_STRING_PART = lazy_pattern(r"(?i)(?:account_?key|access_?key|password|pwd)=[^;&\s]{6,}")
_RANDOM = lazy_pattern(
    r"[0-9a-fA-F]{32,}|(?=.*\d.*\d)(?=.*[A-Z].*[A-Z])(?=.*[a-z].*[a-z])[\w+/=-]{20,}"
)
_AWS_SECRET = lazy_pattern(r"(?=.*\d)(?=.*[A-Z])(?=.*[a-z])[A-Za-z0-9+/]{40}")
_LONG_RANDOM = lazy_pattern(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=[^0-9]*[0-9])[A-Za-z0-9/+=]{40,}")
"""A random text, such as a secret access key (40 characters) or a session token (more)."""
_NUMBER = lazy_pattern(r"(?i)[\d.,:e+-]*")
_HARMLESS = lazy_pattern(r"(?i)true|false|yes|no|on|off|none|null|auto|[./~][^\n]*|[^\n]{0,5}")
"""Values that are never secrets, besides numbers: switches, paths and very short texts."""
_URL_CREDENTIALS = lazy_pattern(URL_CREDENTIALS)
_WORD_OF_SECRET = lazy_pattern(
    r"(?i:secret|password|passwd|passphrase|credential|token(?![a-z])|auth(?![a-z])"
    r"|(?<![a-z])(?:key|pass|pwd)(?![a-z])|(?:access|account|api|private|ssh)_?(?:key|pass))"
    # In the middle of a name such as `wandbKey`, but not in `monkey`.
    r"|(?<=[a-z])(?:Key|Pass|Pwd)(?![a-z])"
)
"""Words in names of secrets. They are in other names, too: this only decides which lines are shown to their user."""
_NAME_AND_VALUE = ({"name", "value"}, {"key", "value"})
_ASSIGNMENT = lazy_pattern(r"(?<![\w-])([\w-]+)(\s*[=:]\s*|\s+)([^\s,]+)")


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name usually holds a secret."""
    return _VARIABLE.search(name) is not None


def may_name_secret(text: str) -> bool:
    """Return whether a text, such as a line of a file, has a word of names of secrets. Often nothing is one."""
    return _WORD_OF_SECRET.search(text) is not None


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return a value of a job without the texts that look like secrets by their names, or by the one before in a list.

    Args:
        value: A mapping, a list, or another value.
        name: The name of the value; all that it has is a secret if its name is one.
    """
    if isinstance(value, dict):
        names = {key: str(key) for key in value}
        labels = {label.lower(): key for key, label in names.items()}
        if set(labels) in _NAME_AND_VALUE:
            # `{name: DB_PASSWORD, value: VALUE}`, in any order
            label = value[labels.get("name", labels.get("key"))]
            names[labels["value"]] = str(label)
        return {
            key: mask_secrets(each, _name_below(name, names[key])) for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        texts = [each if isinstance(each, str) else "" for each in value]
        # `[--password, VALUE]`
        before = [""] + [each.lstrip("-") if each.startswith("-") else "" for each in texts]
        return [
            mask_secrets(each, _name_below(name, option))
            for each, option in zip(value, before, strict=False)
        ]
    text = _mask_text(str(getattr(value, "text", value)))
    if is_secret_variable(name, text) or is_secret_argument(name, text):
        return REPLACEMENT
    return text if isinstance(value, str) else value


def _mask_text(text: str) -> str:
    """Return a text such as `DB_PASSWORD=VALUE` or `--password VALUE` without the values of secrets."""

    def mask(found: re.Match[str]) -> str:
        name, between, value = found.groups()
        if is_secret_variable(name, value) or is_secret_argument(name.lstrip("-"), value):
            return f"{name}{between}{REPLACEMENT}"
        return found[0]

    return redact(_ASSIGNMENT.sub(mask, text))


def _name_below(name: str, own: str) -> str:
    return name if is_secret_name(name) or not own else own


def is_random_secret(text: str) -> bool:
    """Return whether a text, whatever its name, looks like a key or token."""
    return _LONG_RANDOM.fullmatch(text) is not None or contains_secret(text)


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable or tag looks like a secret by its name and value."""
    if _CONNECTION_STRING_PART.search(value):
        return True
    if is_secret_name(name):
        return not _is_harmless(name, value)
    return _MAYBE_SECRET.search(name) is not None and _RANDOM.fullmatch(value) is not None


def is_secret_argument(name: str, value: str) -> bool:
    """Return whether an argument of a program looks like a secret by its name, without dashes, and value."""
    return _ARGUMENT.search(name) is not None and not _is_harmless(name, value)


def contains_secret(text: str) -> bool:
    """Return whether a text contains a key or token in one of the formats that logs are redacted of."""
    return redact(text) != text


def contains_url_credentials(text: str) -> bool:
    """Return whether a URL in a text has a password or token. A placeholder such as `${TOKEN}` is none."""
    return _URL_CREDENTIALS.search(text) is not None


def _is_harmless(name: str, value: str) -> bool:
    if _AWS_SECRET.fullmatch(value):
        return (
            False  # AWS's keys may begin with a slash, as paths do, but paths hardly have this form
        )
    if _PASSWORD.search(name) is None and _NUMBER.fullmatch(value):
        return True
    return _HARMLESS.fullmatch(value) is not None
