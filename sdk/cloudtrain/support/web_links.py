"""Links to web pages in data from outside, such as a run's log: only those of the web, without what a reader cannot see."""

from __future__ import annotations

from urllib.parse import urlsplit

_MOST_CHARACTERS = 500


def web_link(text: str) -> str:
    """Return an address of the web as it is; an empty string for any other text."""
    if len(text) > _MOST_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        return ""
    try:
        parts = urlsplit(text)
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        return ""
    return text
