"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a text file in one step: who reads it sees the old one or the new one, never a part.

    Args:
        path: The file, which need not exist.
        text: All that it holds then, with the ends of its lines as they are.
        private: Nobody but its owner may read it.

    Raises:
        OSError: it cannot be written; what was there stays, and nothing else is left.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        if private:
            partial.touch(0o600)
        partial.write_text(text, encoding="utf-8", newline="")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
