"""Secondary errors: those that are only a consequence of another rank's failure."""

from __future__ import annotations

import re

_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|DistBackendError|DistNetworkError"
    r"|ncclRemoteError|Socket closed|Timed out waiting"
)
_OWN_PORT = re.compile(r"failed to listen|EADDRINUSE|[Aa]ddress already in use")
"""The rank could not open its own port, which torch also reports as a DistNetworkError."""


def is_secondary_error(text: str) -> bool:
    """Return whether a healthy rank raises an error with this text when it loses a peer."""
    return _PEER_LOST.search(text) is not None and _OWN_PORT.search(text) is None
