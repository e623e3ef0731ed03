"""The process of a sweep's controller: `python -m cloudtrain.features.sweeps FOLDER`. It ends with the sweep."""

from __future__ import annotations

import sys
from pathlib import Path

from cloudtrain.controllers.process import run_controller
from cloudtrain.errors import EXIT_BUG
from cloudtrain.features.sweeps.service import control
from cloudtrain.features.sweeps.stored_sweep import StoredSweep


def main(folder: str) -> int:
    """Control the sweep in a folder until it has ended; return the exit code."""
    return run_controller(lambda report: control(StoredSweep.read(Path(folder)), report=report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) > 1 else EXIT_BUG)
