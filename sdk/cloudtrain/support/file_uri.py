"""`file://` URIs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit


def path_of(uri: str) -> Path:
    """Return the path of a `file:///` URI."""
    return Path(unquote(urlsplit(uri).path))
