"""Errors that only follow the failure of another rank."""

from __future__ import annotations

import re

_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|DistBackendError|DistNetworkError"
    r"|ncclRemoteError|Socket closed|Timed out waiting"
)
_OWN_PORT = re.compile(r"failed to listen|EADDRINUSE|[Aa]ddress already in use")
"""A rank could not open its port, which torch reports as a DistNetworkError, too."""


def is_secondary_error(text: str) -> bool:
    """Return whether an error's text is one that a healthy rank fails with when it loses another one."""
    return _PEER_LOST.search(text) is not None and _OWN_PORT.search(text) is None
