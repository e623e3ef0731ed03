"""Size of /dev/shm, through which the workers of a DataLoader pass tensors to their rank.

No sharing strategy of torch avoids it: `file_descriptor` and `file_system` both allocate there by shm_open.
"""

from __future__ import annotations

import shutil

FOLDER = "/dev/shm"  # noqa: S108 (not a temporary file)
BYTES_PER_WORKER = 128 * 2**20
"""What one worker may need: three batches, two of them prefetched, of 40 MiB."""


def shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm, or None on a machine without it."""
    try:
        return shutil.disk_usage(FOLDER).total
    except OSError:
        return None


def most_workers(ranks: int) -> int | None:
    """Return how many workers each of a host's ranks can have; None without limit."""
    size = shared_memory_bytes()
    return None if size is None else size // (BYTES_PER_WORKER * max(1, ranks))
