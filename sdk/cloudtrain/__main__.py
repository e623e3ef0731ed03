"""Entry point of `cloudtrain` and `python -m cloudtrain`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    fast_exit = _FastExit()
    atexit.register(fast_exit)  # the first exit handler, which runs last
    try:
        code = _run(sys.argv[1:])
    except KeyboardInterrupt:  # outside of the statements that handle it
        code = EXIT_INTERRUPTED
    fast_exit.code = code
    sys.exit(code)


class _FastExit:
    """Exit after the exit handlers, without the destruction of every module: 0.6 s with the SageMaker SDK.

    A failed command also does not wait for the thread that imports the SDK. The shutdown would end that thread inside a
    library's C++ code, which may abort the process (python/cpython#87135).

    Attributes:
        code: Exit code, or None for the interpreter's shutdown.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def __call__(self) -> None:
        if self.code is None:
            return
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(self.code)


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


if __name__ == "__main__":
    main()
