"""The Host header of a request, by which a server on this machine recognises requests of web pages."""

from __future__ import annotations

from urllib.parse import urlsplit


def host_name(header: str) -> str:
    """Return the host in a Host header, or behind an origin's `//`, in lowercase; empty if it is not valid.

    Args:
        header: Its value, such as `localhost:8000`; it comes from outside.
    """
    try:
        parts = urlsplit(f"//{header}")
        # A port that is no number raises an error, too.
        _ = parts.port
    except ValueError:
        return ""
    # A user, a path and what else an address may have do not belong here.
    if parts.netloc != header or "@" in header:
        return ""
    return (parts.hostname or "").lower()
