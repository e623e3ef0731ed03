"""Checkpoints: save and load the state of a run, so that it continues bit for bit.

A script needs three calls:

    from cloudtrain_runtime import checkpoint

    start = checkpoint.load(model=model, optimizer=optimizer)
    for step in range(start.step + 1, total + 1):
        ...
        optimizer.step()
        checkpoint.save(step, model=model, optimizer=optimizer)
        if checkpoint.should_stop():
            break

The functions are imported on first use: the launcher and `cloudtrain checkpoints` use this package without torch.
"""

from __future__ import annotations

# Not from typing: the launcher must set its signal handler before slow imports.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from cloudtrain_runtime.checkpoint.script_api import Resumed, load, save, should_stop

__all__ = ["Resumed", "load", "save", "should_stop"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cloudtrain_runtime.checkpoint import script_api

    return getattr(script_api, name)
