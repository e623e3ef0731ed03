"""Records of whether a script's ranks join a process group: one file per rank, for the launcher of its host.

Standard library only. torch is inspected only if the script has imported it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
from typing import Any

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.process.after_import import call_after_import
from cloudtrain_runtime.process.environment import ml_tree

_MODULE = "torch.distributed.distributed_c10d"
"""The module of `init_process_group`, from which all others import it."""


class JoinState(enum.StrEnum):
    """The recorded state of a rank."""

    WAITING = "waiting"
    """The rank runs, and has not called `init_process_group` so far."""
    JOINED = "joined"
    ALONE = "alone"
    """The script ended without a process group of several ranks."""


class JoinRecorder:
    """Records the state of this rank; create it before the script.

    It wraps `init_process_group` when the function's module is imported.
    """

    def __init__(self) -> None:
        self._path = ml_tree(os.environ).joins / os.environ.get("LOCAL_RANK", "0")
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._has_joined = False
        call_after_import(_MODULE, self._wrap)
        self._write(JoinState.WAITING)

    def end(self) -> None:
        """Record the final state when the script has ended without a failure."""
        self._on_join()
        if not self._has_joined:
            self._write(JoinState.ALONE)

    def _on_join(self) -> None:
        distributed: Any = sys.modules.get("torch.distributed")
        is_joined = (
            distributed is not None and distributed.is_available() and distributed.is_initialized()
        )
        # A group of one rank in a run of several ranks does not count.
        if (
            not self._has_joined
            and is_joined
            and (self._world_size == 1 or distributed.get_world_size() > 1)
        ):
            self._has_joined = True
            self._write(JoinState.JOINED)

    def _write(self, state: JoinState) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the training
            self._path.write_text(state, encoding="utf-8")

    def _wrap(self, module: Any) -> None:
        if not hasattr(module, "init_process_group"):  # a build of torch without distributed
            return
        plain = module.init_process_group

        @functools.wraps(plain)
        def init_process_group(*arguments: Any, **options: Any) -> None:
            plain(*arguments, **options)
            self._on_join()

        module.init_process_group = init_process_group


def read_joins(tree: MlTree) -> list[JoinState]:
    """Return the recorded states of a host's ranks."""
    found = []
    for path in tree.joins.glob("*"):
        with contextlib.suppress(OSError, ValueError):
            found.append(JoinState(path.read_text(encoding="utf-8")))
    return found
