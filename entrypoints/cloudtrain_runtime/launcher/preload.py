"""Imports of the fork server (fork_server.py), which imports this module by name. Nothing else may import it.

The modules initialize neither CUDA nor threads, which would not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal

from cloudtrain_runtime.process import fast_exit

_MODULES = (
    "torch._dynamo",  # behind DDP and every optimizer
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "cloudtrain_runtime.launcher.fork_server",
    "cloudtrain_runtime.checkpoint.script_api",
    "cloudtrain_runtime.training.trainer",
    "cloudtrain_runtime.worker",
)


def _end_server(server: int) -> None:
    if os.getpid() == server:
        os._exit(0)  # the interpreter's shutdown would take 0.5 s


# A signal to all processes of a host is a notice for the ranks, which save and then end. They are children of this
# process, and look dead when it has ended. It ends with the agent, whose pipe it watches.
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
fast_exit.register()  # first, so that it runs after the exit handlers of all other modules
atexit.register(_end_server, os.getpid())
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
    "1"  # query the driver's library, which creates no context
)
gc.disable()  # imports produce no garbage, and the collector takes a third of their time
for _name in _MODULES:
    with contextlib.suppress(ImportError):  # not in this version of torch
        importlib.import_module(_name)
gc.freeze()  # so that no worker's collector traverses these objects, which would also copy their memory
