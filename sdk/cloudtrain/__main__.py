"""`cloudtrain` and `python -m cloudtrain`."""

from __future__ import annotations

import sys

from cloudtrain.cli import run


def main() -> None:
    """Run the command line."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
