"""Access control of the sandbox: requests need one of its access keys and must not come from a web page.

The access key id is the secret: everyone who knows it may use the sandbox. Signatures are not verified.
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
_SIGNATURE = re.compile(r"AWS4-[A-Z0-9-]+\s+(?:.*[\s,])?Credential=([^/\s,]+)/")
_KEY_PARAMETERS = ("x-amz-credential", "awsaccesskeyid")
"""Query parameters of presigned URLs: SigV4's, and SigV2's, which boto3 still uses in some regions."""
_BROWSER_HEADERS = ("HTTP_ORIGIN", "HTTP_SEC_FETCH_SITE")
_CORS_PREFIX = "access-control-"
_ISSUED_KEY = re.compile(rb"<AccessKeyId>([^<]+)</AccessKeyId>")
KEY_ISSUING_OPERATIONS = frozenset(
    {
        "AssumeRole",
        "AssumeRoleWithSAML",
        "AssumeRoleWithWebIdentity",
        "GetFederationToken",
        "GetSessionToken",
    }
)
"""STS operations whose responses contain access keys."""


def make_access_key() -> str:
    """Return a random access key id in AWS's character set."""
    return KEY_PREFIX + secrets.token_hex(_KEY_BITS // 8).upper()


class AccessControl:
    """The access keys and addresses that a sandbox accepts.

    Args:
        port: The port on loopback.
        *keys: Access key ids that are valid from the start.
    """

    def __init__(self, port: int, *keys: str) -> None:
        # Requests to other host names are rejected, which prevents DNS rebinding.
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._keys = set(keys)
        self._lock = threading.Lock()

    def rejection_reason(self, environ: Mapping[str, Any]) -> str:
        """Return why a request is rejected, or an empty string."""
        if any(name in environ for name in _BROWSER_HEADERS):
            return "the sandbox rejects requests from web pages"
        if str(environ.get("HTTP_HOST", "")).lower() not in self._hosts:
            return "the sandbox accepts only requests to the address in AWS_ENDPOINT_URL"
        with self._lock:
            keys = tuple(self._keys)
        given = _access_key(environ).encode()
        if not any([hmac.compare_digest(given, known.encode()) for known in keys]):  # noqa: C419 (constant time)
            return (
                "the access key does not belong to this sandbox: export the `environment` that "
                "`cloudtrain sandbox` prints, or use `cloudtrain submit --sandbox`"
            )
        return ""

    def accept_issued(self, response: bytes) -> None:
        """Accept the access keys in a response of the sandbox's own STS."""
        with self._lock:
            self._keys |= {key.decode("ascii", "replace") for key in _ISSUED_KEY.findall(response)}


def without_cors(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return headers without those that let web pages of other origins read the response."""
    return [(name, value) for name, value in headers if not name.lower().startswith(_CORS_PREFIX)]


def _access_key(environ: Mapping[str, Any]) -> str:
    """Return the access key id of a request, or an empty string."""
    signed = _SIGNATURE.match(str(environ.get("HTTP_AUTHORIZATION", "")))
    if signed is not None:
        return signed[1]
    if "HTTP_AUTHORIZATION" in environ:
        return ""
    for name, values in parse_qs(str(environ.get("QUERY_STRING", ""))).items():
        if name.lower() in _KEY_PARAMETERS:
            return values[0].partition("/")[0]
    return ""
