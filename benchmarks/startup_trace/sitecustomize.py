"""Trace of a start-up for first_step.py, without changes to the product.

Python imports a module of this name in each process that has this folder on PYTHONPATH. It wraps the functions below
when their modules are imported, and appends `nanoseconds process-id name` to the file in TRACE_FILE. All processes use
the machine's monotonic clock, so their entries are comparable.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FUNCTIONS = {
    "cloudtrain.client.client": ("Client.submit",),
    "cloudtrain.client.planning_inputs": ("read_job", "plan_job"),
    "cloudtrain.client.submission": ("Submission.send",),
    "cloudtrain.bundle.archive": ("write_bundle",),
    "cloudtrain.backends.local.backend": ("LocalBackend.submit", "LocalBackend._start"),
    "cloudtrain.backends.container.job": ("run_job", "_Job.prepare", "_Job.start"),
    "cloudtrain_runtime.worker": ("run_rank", "run_task", "run_script"),
    "cloudtrain_runtime.process.process_group": ("join_ranks",),
    "cloudtrain_runtime.task": ("load_task", "checked_datasets"),
    "cloudtrain_runtime.training.trainer": ("Trainer.__init__", "Trainer._train_epochs", "Trainer._log"),
    "torch.distributed.run": ("run",),
    "torch.distributed.elastic.agent.server.api": ("SimpleElasticAgent._rendezvous",),
    "torch.distributed.elastic.agent.server.local_elastic_agent": ("LocalElasticAgent._start_workers",),
    "torch.distributed.distributed_c10d": ("init_process_group",),
    "torch.nn.parallel.distributed": ("DistributedDataParallel.__init__",),
}
MODULES = ("torch", "cloudtrain_runtime.launcher.preload", *FUNCTIONS)
"""Modules whose import is traced, too."""


def record(name: str) -> None:
    """Append an entry to the trace file."""
    line = f"{time.monotonic_ns()} {os.getpid()} {name}\n"
    descriptor = os.open(os.environ["TRACE_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _traced(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        record(f"{name} begins")
        try:
            return function(*args, **kwargs)
        finally:
            record(f"{name} ends")

    return call


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        record(f"import {name} begins")
        self._loader.exec_module(module)
        record(f"import {name} ends")
        for path in FUNCTIONS.get(name, ()):
            owner: Any = module
            *parents, last = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            if hasattr(owner, last):
                setattr(owner, last, _traced(getattr(owner, last), f"{name.rpartition('.')[2]}.{path}"))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES or name in sys.orig_argv[:3]:  # `python -m` runs the module and does not import it
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[arg-type]
        return spec


if "TRACE_FILE" in os.environ:
    record(f"process {sys.orig_argv[-1].rpartition('.')[2]}")
    sys.meta_path.insert(0, _Finder())
