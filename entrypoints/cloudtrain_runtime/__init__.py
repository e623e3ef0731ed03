"""What travels into the container: the launcher, the worker and the shared training loop.

A Task imports `Task` from here; a script may ask `context()` for its place. Both are loaded on first use, so that the
SDK can import `cloudtrain_runtime.contract` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloudtrain_runtime.context import Context, context
    from cloudtrain_runtime.task import Batch, Task

__all__ = ["Batch", "Context", "Task", "context"]

_HOME = {"Context": "context", "context": "context", "Batch": "task", "Task": "task"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    # `context` is a module and a function; the function is what the public name means.
    globals()["context"] = importlib.import_module(f"{__name__}.context").context
    return getattr(module, name)
