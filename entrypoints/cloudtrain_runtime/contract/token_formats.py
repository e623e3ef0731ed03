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
        kind="private key",
        needles="-----begin",
        begin=_KEY_BEGIN,
        value=r"(?:[A-Za-z0-9+/=:,\s]|\\+[nr]|-(?!----))+",
        in_files=r"(?:[ \t]*(?:\\+[nr]|\r|\n)|[ \t]{1,4}[A-Za-z0-9+/]{40})",
    ),
    # The id, and the secret that may follow it, as in a table of keys.
    TokenFormat(
        kind="AWS access key id",
        needles="akia asia",
        begin=r"\b",
        value=r"(?:AKIA|ASIA(?=[A-Z]*[0-9]))[A-Z0-9]{16}\b(?:"
        + _GAP
        + r"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?",
    ),
    TokenFormat(
        kind="AWS secret access key",
        needles="secret",
        begin=r"(?i:secret[-_ ]?(?:access[-_ ]?)?key)" + _TO_VALUE,
        value=r"(?=[^\s\"'\\]{0,39}[0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
        in_files=r"(?=[a-z0-9/+]{0,39}[A-Z])(?=[A-Z0-9/+]{0,39}[a-z])(?=[A-Za-z/+]{0,39}[0-9])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    TokenFormat(
        kind="AWS session token",
        needles="session_token sessiontoken session-token security-token securitytoken security_token",
        begin=r"(?i:(?:session|security)[-_ ]?token)" + _TO_VALUE,
        value=r"[A-Za-z0-9/+=%._-]{16,}",
        in_files=r"(?=[A-Za-z/+]{0,200}[0-9])[A-Za-z0-9/+=]{100}",
    ),
    TokenFormat(
        kind="password in a header",
        needles="authorization",
        begin=_AUTHORIZATION,
        value=r"[^\s\"'\\,]{8,}",
        in_files=_MIXED + r"[A-Za-z0-9+/=._-]{16}",
    ),
    TokenFormat(
        kind="token in a header",
        needles="bearer",
        begin=r"(?i:\bbearer)\s+",
        value=_MIXED + r"[A-Za-z0-9._~+/=-]{8,}",
        in_files=_MIXED + r"[A-Za-z0-9._~+/=-]{24}",
    ),
    # Presigned uris, SigV4's header, signed uris and callbacks of other services.
    TokenFormat(
        kind="signature in a URL",
        needles="signature= x-amz- sig= awsaccesskeyid= token= api_key= apikey= x-goog-",
        begin=r"(?i:\bX-(?:Amz|Goog)-(?:Signature|Security-Token|Credential)=|\bSignature=|[?&](?:sig|AWSAccessKeyId"
        r"|(?:access_|auth_|id_)?token|api_?key)=)",
        value=r"[^&\s\"'<>\\#;,)]+",
        in_files="",
    ),
    TokenFormat(
        kind="shared access signature",
        needles="sig=",
        begin=r"[?&]sig=",
        value=_MIXED + r"[A-Za-z0-9%+/=]{40,}",
    ),
    TokenFormat(
        kind="storage account key",
        needles="accountkey=",
        begin=r"\bAccountKey=",
        value=r"[A-Za-z0-9+/]{64,}={0,2}",
    ),
    # In files letters and digits, which placeholders such as `password` and `{password}` do not
    # have; not for this machine alone.
    TokenFormat(
        kind="password in a URL",
        needles="@",
        begin=_URL_TO_VALUE,
        value=_VALUE_IN_URL,
        in_files=r"(?=[^\s/:@]{0,300}[0-9])(?=[^\s/:@]{0,300}[A-Za-z])[^\s/:@\"'`<>{}$\\]{6,300}"
        + _ELSEWHERE,
    ),
    TokenFormat(kind="token in a URL", needles="@", begin=_SCHEME, value=_USER_IN_URL),
    TokenFormat(
        kind="password of curl",
        needles="curl",
        begin=r"\bcurl\s(?:[^\n|;&]{0,100}?\s)?(?:-u|--user)[ =]?[\\\"']*[^\s:\"'$\\]{1,80}:",
        value=r"[^\s\"'$\\@]{6,300}",
        in_files=_MIXED + r"[^\s\"'$\\@{}]{6,300}",
    ),
    TokenFormat(
        kind="password of a host",
        needles="machine",
        begin=r"\bmachine\s+\S{1,80}\s+login\s+\S{1,80}\s+password\s+",
        value=r"[^\s\"'\\]{6,300}",
        in_files=_MIXED + r"[^\s\"'\\${}]{6,300}",
    ),
    TokenFormat(
        kind="Hugging Face token",
        needles="hf_ api_org_",
        begin=r"\b(?:hf|api_org)_",
        value=r"[A-Za-z0-9]{30,}",
        in_files=_BOTH_CASES + r"[A-Za-z0-9]{30}",
    ),
    TokenFormat(
        kind="GitHub token",
        needles="ghp_ gho_ ghs_ ghu_ ghr_ github_pat_",
        begin=r"\b(?:gh[opsru]_|github_pat_)",
        value=r"[A-Za-z0-9_]{22,}",
    ),
    TokenFormat(
        kind="GitLab token",
        needles="glpat- gldt- glrt- glcbt- glptt- glagent-",
        begin=r"\bgl(?:pat|dt|rt|cbt|ptt|agent)-",
        value=r"[A-Za-z0-9_-]{20,}",
    ),
    TokenFormat(
        kind="OpenAI or Anthropic key",
        needles="sk-",
        begin=rf"\bsk-(?={_SK_KINDS}|[A-Za-z0-9]{{20}})",
        value=rf"(?=[A-Za-z_-]{{0,80}}[0-9])(?:{_SK_KINDS}[A-Za-z0-9_-]{{16,}}|[A-Za-z0-9]{{20,}})",
        in_files=rf"(?=[A-Za-z_-]{{0,80}}[0-9])(?:{_SK_KINDS}[A-Za-z0-9_-]{{20}}|[A-Za-z0-9]{{32}})",
    ),
    TokenFormat(
        kind="Slack token",
        needles="xox xapp-",
        begin=r"\b(?:xox[abeoprs]|xapp)-",
        value=r"[A-Za-z0-9-]{12,}",
    ),
    TokenFormat(
        kind="Slack webhook",
        needles="hooks.slack.com",
        begin=r"\bhooks\.slack\.com/(?:services|workflows)/",
        value=r"[A-Za-z0-9/]{40,}",
    ),
    TokenFormat(
        kind="NVIDIA key", needles="nvapi-", begin=r"\bnvapi-", value=r"[A-Za-z0-9_-]{60,}"
    ),
    TokenFormat(kind="Groq key", needles="gsk_", begin=r"\bgsk_", value=r"[A-Za-z0-9]{50,}"),
    TokenFormat(kind="Replicate token", needles="r8_", begin=r"\br8_", value=r"[A-Za-z0-9]{37}\b"),
    TokenFormat(
        kind="SendGrid key",
        needles="sg.",
        begin=r"\bSG\.",
        value=r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{30,}",
    ),
    TokenFormat(kind="Google API key", needles="aiza", begin=r"\bAIza", value=r"[A-Za-z0-9_-]{35}"),
    TokenFormat(kind="npm token", needles="npm_", begin=r"\bnpm_", value=r"[A-Za-z0-9]{36}\b"),
    TokenFormat(
        kind="PyPI token", needles="pypi-", begin=r"\bpypi-", value=r"AgE[A-Za-z0-9_-]{40,}"
    ),
    TokenFormat(
        kind="Stripe key", needles="k_live_", begin=r"\b[rs]k_live_", value=r"[A-Za-z0-9]{16,}"
    ),
    # A dash may be before the token. Its header has no such beginning in it, so a text of many is
    # read once.
    TokenFormat(
        kind="JSON web token",
        needles="eyj",
        begin=r"(?:(?<![A-Za-z0-9_-])|(?<=-))",
        value=r"eyJ(?:(?!-eyJ)[A-Za-z0-9_-]){8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
        in_files=r"eyJ(?:(?!-eyJ)[A-Za-z0-9_-]){8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8}",
    ),
    TokenFormat(
        kind="Weights & Biases key",
        needles="wandb",
        begin=r"(?:(?i:wandb_?(?:api_?)?key)"
        + _TO_VALUE
        + r"|\bwandb\.login\([^()]{0,100}?\bkey\s*=\s*\\?[\"']"
        r"|\bwandb[\s\"',.]{1,4}login\b[^\n]{0,60}?\b)",
        value=r"[0-9a-f]{40}\b",
    ),
    TokenFormat(
        kind="Weights & Biases key",
        needles="wandb_v1_",
        begin=r"\bwandb_v1_",
        value=r"[A-Za-z0-9_]{40,}",
        in_files=r"[A-Za-z0-9_]{60}",
    ),
    TokenFormat(
        kind="password or key by its name",
        needles=" ".join(name.replace(" ", sep) for name in _NAMES for sep in ("", "_", "-"))
        + " ;pwd=",
        begin=rf"(?i:{NAME_OF_SECRET}|(?<=;)pwd)" + r"[\\\"']{0,2}\s{0,2}[:=]\s{0,2}[\\\"']{0,2}",
        value=_MIXED + r"[A-Za-z0-9_+/=~!@#$^&*-]{8,}(?![\w.(\[])",
        in_files="",
    ),
)
"""All formats. The first one that fits a place names it."""
