"""The code that runs in the container: the launcher, the worker and the shared training loop.

A Task imports `Task` from here. A script can call `context()` for its rank and folders, use `checkpoint` to save and
resume, call `report()` to report progress and metrics, and read its samples through `GlobalOrderSampler`.

All names are imported lazily, so that the SDK can import `cloudtrain_runtime.contract` without torch.
"""

from __future__ import annotations

TYPE_CHECKING = (
    False  # not from typing: the launcher must set its signal handler before slow imports
)
if TYPE_CHECKING:
    from typing import Any

    from cloudtrain_runtime import checkpoint
    from cloudtrain_runtime.data import FileStream, GlobalOrderSampler
    from cloudtrain_runtime.process import heartbeat
    from cloudtrain_runtime.process.progress_report import report
    from cloudtrain_runtime.process.run_context import Context, context
    from cloudtrain_runtime.task import Batch, Task

__all__ = [
    "Batch",
    "Context",
    "FileStream",
    "GlobalOrderSampler",
    "Task",
    "checkpoint",
    "context",
    "heartbeat",
    "report",
]

_MODULE_OF = {
    "Batch": "task",
    "Context": "process.run_context",
    "FileStream": "data",
    "GlobalOrderSampler": "data",
    "Task": "task",
    "checkpoint": "checkpoint",
    "context": "process.run_context",
    "heartbeat": "process.heartbeat",
    "report": "process.progress_report",
    "watch": "process.heartbeat",  # its name in version 0.1
}
_MODULES = ("checkpoint", "heartbeat", "watch")


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = module if name in _MODULES else getattr(module, name)
    return value
