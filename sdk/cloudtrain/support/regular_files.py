"""Reads of files that others may have put in place of cloudtrain's: regular ones only, and no more than expected.

A pipe would wait for ever, a device has no end, and a large file would take all memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST_BYTES = 1 << 26
"""Longest content of a file of cloudtrain's own, such as a plan or a manifest: 64 MiB."""


def open_regular(path: Path, *, follow_links: bool = True) -> IO[bytes]:
    """Open a regular file to read its bytes.

    Raises:
        OSError: It does not exist, cannot be opened, or is something else.
    """
    no_follow = 0 if follow_links else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | no_follow)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: As for `open_regular`, or the content has more bytes.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content
