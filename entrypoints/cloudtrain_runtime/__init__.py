"""What travels into the container: the launcher, the worker and the shared training loop.

A Task imports `Task` from here; a script may ask `context()` for its place, and take its samples in the order of
`GlobalOrderSampler`. All are loaded on first use, so that the SDK can import `cloudtrain_runtime.contract` without
torch.
"""

from __future__ import annotations

import sys
from types import ModuleType

TYPE_CHECKING = False  # not from typing: the launcher must set its signal handler before slow imports
if TYPE_CHECKING:
    from typing import Any

    from cloudtrain_runtime.context import Context, context
    from cloudtrain_runtime.data import FileStream, GlobalOrderSampler
    from cloudtrain_runtime.task import Batch, Task

__all__ = ["Batch", "Context", "FileStream", "GlobalOrderSampler", "Task", "context"]

_HOME_OF = {
    "Batch": "task",
    "Context": "context",
    "FileStream": "data",
    "GlobalOrderSampler": "data",
    "Task": "task",
    "context": "context",
}


class _Package(ModuleType):
    """`context` is the function, though a module of that name exists, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME_OF and isinstance(value, ModuleType):
            return  # the import system binding a submodule over a public name
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


sys.modules[__name__].__class__ = _Package
