"""`cloudtrain` and `python -m cloudtrain`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        code = _run(sys.argv[1:])
    except KeyboardInterrupt:  # before the first or after the last statement that handles it
        code = EXIT_INTERRUPTED
    if "sagemaker" in sys.modules:
        _leave(code)
    sys.exit(code)


def _run(argv: list[str]) -> int:
    """Import the commands and run one. A Ctrl-C while modules are imported ends the process without a traceback."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        # An exception in the middle of an import would appear as an error of that import.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from cloudtrain.cli import run
    from cloudtrain.cli.machine import open_missing_streams

    open_missing_streams()
    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(argv)


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
