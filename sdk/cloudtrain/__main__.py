"""`cloudtrain` and `python -m cloudtrain`."""

from __future__ import annotations

import contextlib
import os
import sys

from cloudtrain.cli import run


def main() -> None:
    """Run the command line."""
    code = run(sys.argv[1:])
    if "sagemaker" in sys.modules:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End without the interpreter's shutdown: with the SageMaker SDK it lasts as long as half of its import.

    And a command that fails does not wait for a thread that still imports it. The shutdown would end that thread in the
    middle of a library's C++ code, which aborts the process.
    """
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
