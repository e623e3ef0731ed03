"""Errors that only follow the failure of another rank."""

from __future__ import annotations

import re

_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|DistBackendError|DistNetworkError"
    r"|ncclRemoteError|Socket closed|Timed out waiting"
)


def is_effect(text: str) -> bool:
    """Return whether an error's text is one that a healthy rank fails with when it loses another one."""
    return _PEER_LOST.search(text) is not None
