"""The process of a chain's controller: `python -m cloudtrain.features.recovery FOLDER`. It ends with the chain."""

from __future__ import annotations

import sys
from pathlib import Path

from cloudtrain.controllers.process import run_controller
from cloudtrain.errors import EXIT_BUG
from cloudtrain.features.recovery.service import control
from cloudtrain.features.recovery.stored_chain import StoredChain


def main(folder: str) -> int:
    """Control the chain in a folder until it has ended; return the exit code."""
    place = Path(folder)
    stored = StoredChain(place.name, place)
    return run_controller(lambda report: control(stored, report=report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) > 1 else EXIT_BUG)
