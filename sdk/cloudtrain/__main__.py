"""`cloudtrain` and `python -m cloudtrain`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

from cloudtrain.cli import run


def main() -> None:
    """Run the command line."""
    code = run(sys.argv[1:])
    if "sagemaker" in sys.modules:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End without the interpreter's shutdown, which with the SageMaker SDK lasts 0.6 s.

    A command that fails does not wait for the thread that still imports it, either. The shutdown would end that thread
    in the middle of a library's C++ code, which may abort the process (python/cpython#87135).
    """
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 (multiprocessing calls it, too)
    atexit._run_exitfuncs()  # noqa: SLF001 (there is no public name for it)
    with contextlib.suppress(OSError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
