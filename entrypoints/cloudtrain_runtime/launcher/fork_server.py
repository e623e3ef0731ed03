"""Start of a Task's workers: multiprocessing's fork server imports torch once, and each worker is a fork of it."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

_PRELOAD = "cloudtrain_runtime.launcher.preload"


def start_server() -> None:
    """Start the server, which imports while this process continues. It ends with this process and its workers.

    The server inherits this process's environment: set what torch reads at import before this call.
    """
    multiprocessing.set_forkserver_preload([_PRELOAD])
    forkserver.ensure_running()


def start_worker(script: str, environ: Mapping[str, str]) -> BaseProcess:
    """Fork a process that runs a script with this environment as `python script` would, and return it.

    The process leads a session and a process group of its own.
    """
    context = multiprocessing.get_context("forkserver")
    worker = context.Process(target=_run_script, args=(script, dict(environ)))
    worker.start()
    return worker


def _run_script(script: str, environ: Mapping[str, str]) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # A server that was started under nohup ignores signals. torchrun's agent handles them, so its workers do not.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [script]
    # Data loaders start their processes as in any other program, and not from the server.
    multiprocessing.set_start_method(None, force=True)
    importlib.invalidate_caches()
    gc.enable()
    # Generators that were seeded in the server; `random` reseeds itself in every fork.
    sys.modules["torch"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    runpy.run_path(str(Path(script).absolute()), run_name="__main__")
