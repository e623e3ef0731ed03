"""Ranks that a script starts itself by `torch.multiprocessing.spawn`: they end as the ranks of the launcher do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cloudtrain_runtime.process import fast_exit
from cloudtrain_runtime.process.after_import import call_after_import, change_arguments

_MODULE = "torch.multiprocessing.spawn"

_started_in: int | None = None
"""The process that has called `skip_shutdown`. A process that is forked from it has another id."""


class SpawnedRank:
    """A rank's function, which ends its process without the interpreter's shutdown.

    torch's reducer of DDP keeps the process group after the group was destroyed (torch 2.13), so the threads of Gloo
    still run in the shutdown. It can abort a rank that had succeeded.

    Args:
        function: What `spawn` was given.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        """Call the function with the process's index and the arguments of `spawn`."""
        self._function(*arguments)
        # multiprocessing itself ends a forked process without the shutdown.
        if os.getpid() == _started_in:
            fast_exit.exit_process(0)


def skip_shutdown() -> None:
    """Prepare this process, which may spawn ranks or be a spawned one.

    Called before anything else: exit handlers that are registered later run before the process ends.
    """
    global _started_in  # noqa: PLW0603 (a fact about this process)
    _started_in = os.getpid()
    fast_exit.register()
    call_after_import(_MODULE, _wrap)


def _wrap(module: Any) -> None:
    change_arguments(module, "start_processes", fn=SpawnedRank)
