"""Ranks that a script starts itself by `torch.multiprocessing.spawn`: they end as the ranks of the launcher do."""

from __future__ import annotations

import os

from cloudtrain_runtime.process.after_import import call_after_import, change_arguments

TYPE_CHECKING = False  # not from typing: each Python process of the ranks imports this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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
        if os.getpid() == _started_in:
            from cloudtrain_runtime.process import fast_exit

            fast_exit.exit_process(0)


def skip_shutdown() -> None:
    """Let ranks that this process spawns end so, and this process if it is one of them.

    Called before anything else: exit handlers that are registered later run before the process ends.
    """
    global _started_in  # noqa: PLW0603 (a fact about this process)
    from cloudtrain_runtime.process import fast_exit

    _started_in = os.getpid()
    fast_exit.register()
    call_after_import(_MODULE, _wrap)


def _wrap(module: Any) -> None:
    change_arguments(module, "start_processes", fn=SpawnedRank)
