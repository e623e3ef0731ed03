"""Workers of data loaders that outlive a stop signal to all processes of a host.

Their rank needs batches to reach the step at which all ranks save.
"""

from __future__ import annotations

import functools
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloudtrain_runtime.process.after_import import call_after_import

_DATA_LOADER_MODULE = "torch.utils.data.dataloader"


class OutliveStopSignal:
    """Makes a loader's worker ignore stop signals: a `worker_init_fn`.

    A loader that ends, or a rank that exits, ends its workers with the same signal: then they exit.

    Args:
        own: The function that the job gives to its loader, or None.
        acting: File that exists while the rank acts on stop notices; None if it always does.
    """

    def __init__(
        self, own: Callable[[int], object] | None = None, acting: Path | None = None
    ) -> None:
        self._own = own
        self._acting = acting
        self._is_ending = _shared_flag()
        # This also runs when this process exits.
        weakref.finalize(self, self._is_ending.fill_, 1)

    def end(self) -> None:
        """Let the workers obey the signal from now on."""
        self._is_ending.fill_(1)

    def __call__(self, worker: int) -> None:
        """Set the handlers, then call the job's function."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        if self._own is not None:
            self._own(worker)

    def _on_stop(self, number: int, _frame: object) -> None:
        is_acting = self._acting is None or self._acting.exists()
        if is_acting and not self._is_ending.item():
            return
        if self._acting is None:
            os._exit(0)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _shared_flag() -> Any:
    """Return a zero in shared memory."""
    import torch

    return torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]


def protect_loaders(acting: Path) -> None:
    """Let the workers of all data loaders of this process outlive stop signals while a file exists."""

    def wrap(module: Any) -> None:
        plain = module.DataLoader.__init__

        @functools.wraps(plain)
        def init(loader: Any, *arguments: Any, **options: Any) -> None:
            plain(loader, *arguments, **options)
            if loader.num_workers > 0:
                loader.worker_init_fn = OutliveStopSignal(loader.worker_init_fn, acting)

        module.DataLoader.__init__ = init

    call_after_import(_DATA_LOADER_MODULE, wrap)
