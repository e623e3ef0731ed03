"""Files that are written as a whole or not at all, and files that are read up to a size."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path


def write_atomically(path: Path, text: str, *, private: bool = False) -> None:
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


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file, or of a longer one that much and one byte.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, whose content may never end.
        ValueError: the name holds a NUL.
    """
    # Without O_NONBLOCK the opening of a pipe that nothing writes to would never return.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file but a pipe or device", str(path))
        return file.read(most_bytes + 1)
