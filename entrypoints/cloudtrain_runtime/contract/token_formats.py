"""Formats of keys, tokens and passwords, for all that looks for them: job files, code folders, diffs, logs and errors.

Each format is a beginning, which may be shown, and a value. Logs hide too much rather than too little. A finding in a
file stops the user, so files have stricter values, or none where a format is common in harmless code.

Sources of the formats: the issuers' documentation and gitleaks' rules (config/gitleaks.toml), 2026-11.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class TokenFormat(NamedTuple):
    """One format.

    Attributes:
        kind: What it is, for a user.
        needles: Lowercase words, one of which is in each text that matches.
        begin: Regular expression of the beginning.
        value: That of the value behind it, in logs.
        in_files: That of the value in files; None where it is the same, an empty text where files are not searched.
    """

    kind: str
    needles: str
    begin: str
    value: str
    in_files: str | None = None


_GAP = r"""[\\"'`\s()\[\]{},:=>]{1,24}"""
"""Characters between a name and its value: `=`, `": "`, the same escaped, `</Name>`'s end, `, value = `."""
_TO_VALUE = (
    r"\w{0,20}" + _GAP + r"(?:(?:str|value|default|or)\b[\\\"'`\s:=]{1,8})?(?:[bfru]{1,2}\\?[\"'])?"
)
"""Text between a name and its value in code: `"] = "`, escaped in notebooks, `", value = "`, `", default="`, ` `."""
_MIXED = r"(?=[^\s\"'\\]{0,80}[0-9])(?=[^\s\"'\\]{0,80}[A-Za-z])"
"""Both letters and digits, which distinguishes a value from a name such as `required` or `os.environ`."""
_SCHEME = r"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://"
_AUTHORIZATION = (
    r"(?i:authorization)[\\\"']*\s*[:=]\s*[bfru]{0,2}[\\\"']*(?i:basic|token|apikey)\s+"
)
_URL_TO_VALUE = _SCHEME + r"[^\s/:@\"'`<>{}$]{0,80}:"
_VALUE_IN_URL = r"[^\s/@\"'\\]{1,300}(?=@)"
_USER_IN_URL = r"(?=[A-Za-z_-]{0,80}[0-9])(?=[0-9_-]{0,80}[A-Za-z])[A-Za-z0-9_-]{20,300}(?=@)"
_ELSEWHERE = r"@(?!localhost\b|127\.0\.0\.1\b|0\.0\.0\.0\b)"
_BOTH_CASES = r"(?=(?:[a-z0-9]*[A-Z]){7})(?=(?:[A-Z0-9]*[a-z]){7})"
"""As many letters of each case as chance gives; a name in camel case has fewer capitals."""
_SK_KINDS = r"(?:ant|proj|svcacct|admin|or-v1)-"
"""Kinds of keys that begin with `sk-`; older ones have none. Many words end with it, so the kind is looked for first."""
_KEY_BEGIN = r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"

_NAMES = (
    "password",
    "passwd",
    "passphrase",
    "client secret",
    *("access token", "api token", "auth token", "bearer token", "hf token", "session token"),
    *("access key", "api key", "private key"),
)
NAME_OF_SECRET: Final = "|".join(name.replace(" ", "[-_]?") for name in _NAMES)
"""Names of values that are secrets wherever they are. `token`, `key` and `secret` alone are common in harmless text."""

URL_CREDENTIALS: Final = rf"{_URL_TO_VALUE}(?![$<{{]){_VALUE_IN_URL}|{_SCHEME}{_USER_IN_URL}"
"""A password or token in a URL, where a placeholder such as `${TOKEN}` is none, but any other text is one."""

FORMATS: Final = (
    TokenFormat(
        "private key",
        "-----begin",
        _KEY_BEGIN,
        r"(?:[A-Za-z0-9+/=:,\s]|\\+[nr]|-(?!----))+",
        r"(?:[ \t]*(?:\\+[nr]|\r|\n)|[ \t]{1,4}[A-Za-z0-9+/]{40})",
    ),
    # The id, and the secret that may follow it, as in a table of keys.
    TokenFormat(
        "AWS access key id",
        "akia asia",
        r"\b",
        r"(?:AKIA|ASIA(?=[A-Z]*[0-9]))[A-Z0-9]{16}\b(?:"
        + _GAP
        + r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?",
    ),
    TokenFormat(
        "AWS secret access key",
        "secret",
        r"(?i:secret[-_ ]?(?:access[-_ ]?)?key)" + _TO_VALUE,
        r"(?=[^\s\"'\\]{0,39}[0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
        r"(?=[a-z0-9/+]{0,39}[A-Z])(?=[A-Z0-9/+]{0,39}[a-z])(?=[A-Za-z/+]{0,39}[0-9])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    TokenFormat(
        "AWS session token",
        "session_token sessiontoken session-token security-token securitytoken security_token",
        r"(?i:(?:session|security)[-_ ]?token)" + _TO_VALUE,
        r"[A-Za-z0-9/+=%._-]{16,}",
        r"(?=[A-Za-z/+]{0,200}[0-9])[A-Za-z0-9/+=]{100}",
    ),
    TokenFormat(
        "password in a header",
        "authorization",
        _AUTHORIZATION,
        r"[^\s\"'\\,]{8,}",
        _MIXED + r"[A-Za-z0-9+/=._-]{16}",
    ),
    TokenFormat(
        "token in a header",
        "bearer",
        r"(?i:\bbearer)\s+",
        _MIXED + r"[A-Za-z0-9._~+/=-]{8,}",
        _MIXED + r"[A-Za-z0-9._~+/=-]{24}",
    ),
    # Presigned uris, SigV4's header, signed uris and callbacks of other services.
    TokenFormat(
        "signature in a URL",
        "signature= x-amz- sig= awsaccesskeyid= token= api_key= apikey= x-goog-",
        r"(?i:\bX-(?:Amz|Goog)-(?:Signature|Security-Token|Credential)=|\bSignature=|[?&](?:sig|AWSAccessKeyId"
        r"|(?:access_|auth_|id_)?token|api_?key)=)",
        r"[^&\s\"'<>\\#;,)]+",
        "",
    ),
    TokenFormat(
        "shared access signature",
        "sig=",
        r"[?&]sig=",
        _MIXED + r"[A-Za-z0-9%+/=]{40,}",
    ),
    TokenFormat(
        "storage account key", "accountkey=", r"\bAccountKey=", r"[A-Za-z0-9+/]{64,}={0,2}"
    ),
    # In files letters and digits, which placeholders such as `password` and `{password}` do not have; not for this
    # machine alone.
    TokenFormat(
        "password in a URL",
        "@",
        _URL_TO_VALUE,
        _VALUE_IN_URL,
        r"(?=[^\s/:@]{0,300}[0-9])(?=[^\s/:@]{0,300}[A-Za-z])[^\s/:@\"'`<>{}$\\]{6,300}"
        + _ELSEWHERE,
    ),
    TokenFormat("token in a URL", "@", _SCHEME, _USER_IN_URL),
    TokenFormat(
        "password of curl",
        "curl",
        r"\bcurl\s(?:[^\n|;&]{0,100}?\s)?(?:-u|--user)[ =]?[\\\"']*[^\s:\"'$\\]{1,80}:",
        r"[^\s\"'$\\@]{6,300}",
        _MIXED + r"[^\s\"'$\\@{}]{6,300}",
    ),
    TokenFormat(
        "password of a host",
        "machine",
        r"\bmachine\s+\S{1,80}\s+login\s+\S{1,80}\s+password\s+",
        r"[^\s\"'\\]{6,300}",
        _MIXED + r"[^\s\"'\\${}]{6,300}",
    ),
    TokenFormat(
        "Hugging Face token",
        "hf_ api_org_",
        r"\b(?:hf|api_org)_",
        r"[A-Za-z0-9]{30,}",
        _BOTH_CASES + r"[A-Za-z0-9]{30}",
    ),
    TokenFormat(
        "GitHub token",
        "ghp_ gho_ ghs_ ghu_ ghr_ github_pat_",
        r"\b(?:gh[opsru]_|github_pat_)",
        r"[A-Za-z0-9_]{22,}",
    ),
    TokenFormat(
        "GitLab token",
        "glpat- gldt- glrt- glcbt- glptt- glagent-",
        r"\bgl(?:pat|dt|rt|cbt|ptt|agent)-",
        r"[A-Za-z0-9_-]{20,}",
    ),
    TokenFormat(
        "OpenAI or Anthropic key",
        "sk-",
        rf"\bsk-(?={_SK_KINDS}|[A-Za-z0-9]{{20}})",
        rf"(?=[A-Za-z_-]{{0,80}}[0-9])(?:{_SK_KINDS}[A-Za-z0-9_-]{{16,}}|[A-Za-z0-9]{{20,}})",
        rf"(?=[A-Za-z_-]{{0,80}}[0-9])(?:{_SK_KINDS}[A-Za-z0-9_-]{{20}}|[A-Za-z0-9]{{32}})",
    ),
    TokenFormat("Slack token", "xox xapp-", r"\b(?:xox[abeoprs]|xapp)-", r"[A-Za-z0-9-]{12,}"),
    TokenFormat(
        "Slack webhook",
        "hooks.slack.com",
        r"\bhooks\.slack\.com/(?:services|workflows)/",
        r"[A-Za-z0-9/]{40,}",
    ),
    TokenFormat("NVIDIA key", "nvapi-", r"\bnvapi-", r"[A-Za-z0-9_-]{60,}"),
    TokenFormat("Groq key", "gsk_", r"\bgsk_", r"[A-Za-z0-9]{50,}"),
    TokenFormat("Replicate token", "r8_", r"\br8_", r"[A-Za-z0-9]{37}\b"),
    TokenFormat("SendGrid key", "sg.", r"\bSG\.", r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{30,}"),
    TokenFormat("Google API key", "aiza", r"\bAIza", r"[A-Za-z0-9_-]{35}"),
    TokenFormat("npm token", "npm_", r"\bnpm_", r"[A-Za-z0-9]{36}\b"),
    TokenFormat("PyPI token", "pypi-", r"\bpypi-", r"AgE[A-Za-z0-9_-]{40,}"),
    TokenFormat("Stripe key", "k_live_", r"\b[rs]k_live_", r"[A-Za-z0-9]{16,}"),
    # A dash may be before the token. Its header has no such beginning in it, so a text of many is read once.
    TokenFormat(
        "JSON web token",
        "eyj",
        r"(?:(?<![A-Za-z0-9_-])|(?<=-))",
        r"eyJ(?:(?!-eyJ)[A-Za-z0-9_-]){8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
        r"eyJ(?:(?!-eyJ)[A-Za-z0-9_-]){8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8}",
    ),
    TokenFormat(
        "Weights & Biases key",
        "wandb",
        r"(?:(?i:wandb_?(?:api_?)?key)"
        + _TO_VALUE
        + r"|\bwandb\.login\([^()]{0,100}?\bkey\s*=\s*\\?[\"']"
        r"|\bwandb[\s\"',.]{1,4}login\b[^\n]{0,60}?\b)",
        r"[0-9a-f]{40}\b",
    ),
    TokenFormat(
        "Weights & Biases key",
        "wandb_v1_",
        r"\bwandb_v1_",
        r"[A-Za-z0-9_]{40,}",
        r"[A-Za-z0-9_]{60}",
    ),
    TokenFormat(
        "password or key by its name",
        " ".join(name.replace(" ", sep) for name in _NAMES for sep in ("", "_", "-")) + " ;pwd=",
        rf"(?i:{NAME_OF_SECRET}|(?<=;)pwd)" + r"[\\\"']{0,2}\s{0,2}[:=]\s{0,2}[\\\"']{0,2}",
        _MIXED + r"[A-Za-z0-9_+/=~!@#$^&*-]{8,}(?![\w.(\[])",
        "",
    ),
)
"""All formats. The first one that fits a place names it."""
