"""Which requests the sandbox accepts: those that carry one of its access keys and do not come from a web page.

The access key id is the secret: whoever knows it may use the sandbox. Signatures are not verified.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

KEY_PREFIX = "SANDBOX"
_KEY_BITS = 128
_SIGNED = re.compile(r"AWS4-[A-Z0-9-]+\s+(?:.*[\s,])?Credential=([^/\s,]+)/")
_QUERY_NAMES = ("x-amz-credential", "awsaccesskeyid")
"""Of presigned URLs: SigV4's, and that of the older form, which boto3 still makes for some regions."""
_FROM_A_PAGE = ("HTTP_ORIGIN", "HTTP_SEC_FETCH_SITE")
_CORS = "access-control-"
_ISSUED = re.compile(rb"<AccessKeyId>([^<]+)</AccessKeyId>")
KEY_ISSUING_OPERATIONS = frozenset(
    {"AssumeRole", "AssumeRoleWithSAML", "AssumeRoleWithWebIdentity", "GetFederationToken", "GetSessionToken"}
)
"""Operations of STS whose answers hold access keys."""


def make_access_key() -> str:
    """Return a random access key id, in the characters that AWS's have."""
    return KEY_PREFIX + secrets.token_hex(_KEY_BITS // 8).upper()


class AccessControl:
    """The access keys of a sandbox, and the addresses that it answers to.

    Args:
        *keys: Access key ids that are valid from the start.
    """

    def __init__(self, *keys: str) -> None:
        self._keys = set(keys)
        self._hosts: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def listen_on(self, port: int) -> None:
        """Name the port; requests to other hosts are refused, such as those that a rebound DNS name leads here."""
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})

    def refusal(self, environ: Mapping[str, Any]) -> str:
        """Return why a request is refused, or an empty string."""
        if any(name in environ for name in _FROM_A_PAGE):
            return "the sandbox does not answer web pages"
        if str(environ.get("HTTP_HOST", "")).lower() not in self._hosts:
            return "the sandbox answers only to the address in AWS_ENDPOINT_URL"
        if not self._is_known(_access_key(environ)):
            return (
                "the access key is not one of this sandbox: export the `environment` that `cloudtrain sandbox` prints, "
                "or use `cloudtrain submit --sandbox`"
            )
        return ""

    def note_issued(self, answer: bytes) -> None:
        """Accept the keys in an answer of the sandbox's own STS."""
        with self._lock:
            self._keys |= {key.decode("ascii", "replace") for key in _ISSUED.findall(answer)}

    def _is_known(self, key: str) -> bool:
        with self._lock:
            keys = tuple(self._keys)
        return any([hmac.compare_digest(key.encode(), known.encode()) for known in keys])  # noqa: C419 (same time for each)


def without_cors(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return headers that let no web page of another origin read an answer."""
    return [(name, value) for name, value in headers if not name.lower().startswith(_CORS)]


def _access_key(environ: Mapping[str, Any]) -> str:
    """Return the access key id of a request, or an empty string."""
    signed = _SIGNED.match(str(environ.get("HTTP_AUTHORIZATION", "")))
    if signed is not None:
        return signed[1]
    if "HTTP_AUTHORIZATION" in environ:
        return ""
    for name, values in parse_qs(str(environ.get("QUERY_STRING", ""))).items():
        if name.lower() in _QUERY_NAMES:
            return values[0].partition("/")[0]
    return ""
