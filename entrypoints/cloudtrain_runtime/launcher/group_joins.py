"""Records of whether a script's ranks use a process group: one file per rank, for the launcher of its host.

A group that is only created joins nothing: each rank then trains alone. So a rank has joined when it has moved data in
a group of several ranks, by a collective or by DistributedDataParallel. Barriers move no data, and saving a checkpoint
is no training. Standard library only. torch is inspected only if the script has imported it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.process.after_import import call_after_import
from cloudtrain_runtime.process.environment import ml_tree

_MODULE = "torch.distributed.distributed_c10d"
"""The module of `init_process_group` and of the collectives, from which all others import them."""

_DDP_MODULE = "torch.nn.parallel.distributed"
"""The module of DistributedDataParallel, whose collectives are called from C++."""

_COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *("all_to_all_single", "broadcast", "broadcast_object_list", "gather", "gather_object"),
    *("irecv", "isend", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("send", "send_object_list"),
)
"""The functions that move data between ranks; a version of torch has most of them."""

_NO_TRAINING = ("cloudtrain_runtime.", "torch.distributed.checkpoint.")
"""Modules whose collectives say nothing about the training: they save checkpoints, or agree on a stop."""

_AROUND = (__name__, "cloudtrain_runtime.worker", "cloudtrain_runtime.process.function_call")
"""Modules of the runtime with frames in each stack: the functions that watch, the worker, the call of a function."""


class JoinState(enum.StrEnum):
    """The recorded state of a rank."""

    WAITING = "waiting"
    """The rank runs, and has not called `init_process_group` so far."""
    INITIALIZED = "initialized"
    """The rank runs, and has a group of several ranks in which it has moved no data so far."""
    JOINED = "joined"
    ALONE = "alone"
    """The script ended without a process group of several ranks."""
    UNUSED = "unused"
    """The script ended with a group of several ranks in which it has moved no data."""


class JoinRecorder:
    """Records the state of this rank; create it before the script.

    It wraps `init_process_group`, collectives and DistributedDataParallel when their modules are imported.
    """

    def __init__(self) -> None:
        self._path = ml_tree(os.environ).joins / os.environ.get("LOCAL_RANK", "0")
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._state = JoinState.WAITING
        call_after_import(_MODULE, self._wrap)
        call_after_import(_DDP_MODULE, self._wrap_ddp)
        self._write(JoinState.WAITING)

    def end(self) -> None:
        """Record the final state when the script has ended without a failure."""
        # torch may have been imported before this recorder was created.
        self._on_group()
        if self._state is JoinState.INITIALIZED:
            self._write(JoinState.UNUSED)
        elif self._state is JoinState.WAITING and not self._has_joined_elsewhere():
            self._write(JoinState.ALONE)

    def _has_joined_elsewhere(self) -> bool:
        """Return whether a process that the script has forked has joined."""
        try:
            return self._path.read_text(encoding="utf-8") == JoinState.JOINED
        except OSError:
            return False

    def _on_group(self) -> None:
        distributed: Any = sys.modules.get("torch.distributed")
        if self._state is not JoinState.WAITING or distributed is None:
            return
        if not distributed.is_available() or not distributed.is_initialized():
            return
        if self._world_size == 1:
            # The group has no other rank to exchange data with.
            self._write(JoinState.JOINED)
        elif distributed.get_world_size() > 1:
            self._write(JoinState.INITIALIZED)

    def _on_use(self, ranks: int) -> None:
        """Record that data has moved in a group of this many ranks."""
        # A group of one rank in a run of several ranks does not count.
        if self._state is not JoinState.JOINED and ranks > 1 and not _is_beside_training():
            self._write(JoinState.JOINED)

    def _write(self, state: JoinState) -> None:
        self._state = state
        # A full disk must not end the training.
        with contextlib.suppress(OSError):
            self._path.write_text(state, encoding="utf-8")

    def _wrap(self, module: Any) -> None:
        if not hasattr(module, "init_process_group"):
            # A build of torch without distributed.
            return
        plain = module.init_process_group

        @functools.wraps(plain)
        def init_process_group(*arguments: Any, **options: Any) -> None:
            given = inspect.signature(plain).bind(*arguments, **options).arguments
            _check_rank(given.get("rank"), given.get("world_size"))
            plain(*arguments, **options)
            self._on_group()

        module.init_process_group = init_process_group
        for name in _COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, self._watched(getattr(module, name), module))

    def _watched(self, plain: Callable[..., Any], module: Any) -> Callable[..., Any]:
        """Return a collective that records its use."""

        @functools.wraps(plain)
        def collective(*arguments: Any, **options: Any) -> Any:
            result = plain(*arguments, **options)
            if self._state is not JoinState.JOINED:
                given = inspect.signature(plain).bind(*arguments, **options).arguments
                self._on_use(module.get_world_size(given.get("group")))
            return result

        return collective

    def _wrap_ddp(self, module: Any) -> None:
        plain = module.DistributedDataParallel.__init__

        @functools.wraps(plain)
        def init(ddp: Any, *arguments: Any, **options: Any) -> None:
            plain(ddp, *arguments, **options)
            self._on_use(ddp.process_group.size())

        module.DistributedDataParallel.__init__ = init


def _check_rank(rank: object, world_size: object) -> None:
    """Raise if a script passes the rank among those of its host, which ranks of other hosts have, too.

    The group would wait for half an hour, or report that an address is in use.

    Raises:
        ValueError: It passes LOCAL_RANK as the rank of a group of all ranks, and RANK differs.
    """
    own = os.environ.get("RANK")
    local = os.environ.get("LOCAL_RANK")
    is_of_all = world_size in (None, -1) or str(world_size) == os.environ.get("WORLD_SIZE")
    if is_of_all and own != local and str(rank) == local:
        raise ValueError(
            f"init_process_group: the script passes rank {rank} for rank {own}. LOCAL_RANK numbers the ranks of one "
            "host, so two processes would have the same rank: use RANK, or pass no rank"
        )


def _is_beside_training() -> bool:
    """Return whether a collective is called by code that saves checkpoints or controls the run."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name not in _AROUND and name.startswith(_NO_TRAINING):
            return True
        frame = frame.f_back
    return False


def read_joins(tree: MlTree) -> list[JoinState]:
    """Return the recorded states of a host's ranks."""
    found = []
    for path in tree.joins.glob("*"):
        with contextlib.suppress(OSError, ValueError):
            found.append(JoinState(path.read_text(encoding="utf-8")))
    return found
