"""The process of a sweep's controller: `python -m cloudtrain.features.sweeps FOLDER`. It ends with the sweep."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from cloudtrain.errors import EXIT_BUG, CloudtrainError
from cloudtrain.features.sweeps.service import control
from cloudtrain.features.sweeps.stored_sweep import StoredSweep


def main(folder: str) -> int:
    """Control the sweep in a folder until it has ended; return the exit code."""
    try:
        control(StoredSweep.read(Path(folder)), report=_print)
    except CloudtrainError as error:
        _print(f"error: {error.for_terminal()}")
        return error.exit_code
    return 0


def _print(text: str) -> None:
    # A log that cannot be written, as on a full disk, does not end the sweep.
    with contextlib.suppress(OSError):
        os.write(1, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n".encode("utf-8", "replace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) > 1 else EXIT_BUG)
