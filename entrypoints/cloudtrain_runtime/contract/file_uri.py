"""Paths in `file://` URIs."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit


def path_of(uri: str) -> Path:
    """Return the path of a `file:///` URI, or of a plain path.

    The name of a file is bytes, which need not be UTF-8; `Path.as_uri` keeps them.
    """
    if not uri.startswith("file://"):
        return Path(uri)
    return Path(os.fsdecode(unquote_to_bytes(urlsplit(uri).path)))
