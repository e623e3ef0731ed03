"""Entry point of `cloudtrain` and `python -m cloudtrain`."""

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
    except KeyboardInterrupt:  # outside of the statements that handle it
        code = EXIT_INTERRUPTED
    if "sagemaker" in sys.modules:
        _exit_fast(code)
    sys.exit(code)


def _run(argv: list[str]) -> int:
    """Import the commands and run one. Ctrl-C during the imports ends the process without a traceback."""
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_default_handler:
        # A KeyboardInterrupt during an import would appear as an error of that import.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from cloudtrain.cli import run
    from cloudtrain.cli.os_errors import open_missing_streams

    open_missing_streams()
    if has_default_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(argv)


def _exit_fast(code: int) -> None:
    """Exit without the interpreter's shutdown, which takes 0.6 s with the SageMaker SDK.

    A failed command also does not wait for the thread that imports the SDK. The shutdown would end that thread inside a
    library's C++ code, which may abort the process (python/cpython#87135).
    """
    threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 (multiprocessing calls it, too)
    atexit._run_exitfuncs()  # noqa: SLF001 (there is no public name for it)
    with contextlib.suppress(OSError):  # the reader has closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
