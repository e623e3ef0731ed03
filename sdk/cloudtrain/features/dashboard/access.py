"""Access control of the dashboard: its token, the names under which it is reached, and its own pages only."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from typing import Final

from cloudtrain.support.proxies import LOOPBACK_NAMES
from cloudtrain_runtime.contract.host_header import host_name

CONTENT_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: nothing is loaded from elsewhere, and no script in its data runs."""

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class AccessControl:
    """Decides which requests the dashboard answers.

    The page's data needs the token, which only its address contains, behind `#`: browsers do not send that part.

    Args:
        token: The token.
        allowed_hosts: Host names under which a proxy serves the dashboard, besides those of loopback.
    """

    def __init__(self, token: str, allowed_hosts: Iterable[str] = ()) -> None:
        self._token = token
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    def rejection_reason(self, headers: Mapping[str, str], *, needs_token: bool) -> str:
        """Return why a request is rejected, or an empty string.

        Args:
            headers: The request's headers, by name in lowercase.
            needs_token: Whether it reads or changes runs.
        """
        host = headers.get("host", "")
        if (name := host_name(host)) not in LOOPBACK_NAMES | self._allowed:
            return (
                f"the dashboard is not reached as {name!r}; to allow this name: --allowed-host NAME"
            )
        # What is no address has nothing behind it, and is no origin that is allowed.
        origin = headers.get("origin", f"//{host}").partition("//")[2]
        if origin != host and host_name(origin) not in self._allowed:
            return "the dashboard rejects requests from other web pages"
        if not needs_token:
            return ""
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "the dashboard rejects requests from other web pages"
        if not hmac.compare_digest(headers.get("authorization", ""), f"Bearer {self._token}"):
            return "the token is missing or wrong: open the address that `cloudtrain dashboard` has printed"
        return ""
