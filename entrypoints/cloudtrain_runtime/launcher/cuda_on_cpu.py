"""A stand-in for CUDA in local runs with `--cuda-on-cpu`: devices, queries and NCCL become the CPU and Gloo.

Each process of the ranks calls `start`, which changes public names of torch after its import. Standard library only.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from cloudtrain_runtime.launcher.shared_gpus import use_gloo
from cloudtrain_runtime.process.after_import import call_after_import, change_arguments

_NO_OPERATION = r"(re)?set_|(max_)?memory_(allo|rese|cach)|synchr|empty_|init|ipc_|(manual_)?seed|is_curr|utilization"
_CONTEXTS = (
    "Stream",
    "Event",
    "stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "device",
    "device_of",
)
_devices = SimpleNamespace(count=0, current=0)


def start(count: int) -> None:
    """Make this process, when it imports torch, find devices of CUDA in this number."""
    _devices.count = count
    call_after_import("torch", _patch_torch)
    call_after_import("torch.utils.cpp_extension", _patch_extensions)
    call_after_import(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        lambda fsdp: change_arguments(
            fsdp.FullyShardedDataParallel, "__init__", device_id=lambda _: fsdp.torch.device("cpu")
        ),
    )


def refuse(feature: str) -> Callable[..., NoReturn]:
    """Return a function that raises an error about a feature that has no stand-in."""
    message = f"{feature} needs a GPU, and --cuda-on-cpu does not imitate it: turn it off for this run, or run on a GPU"

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(message)

    return refused


def on_cpu(value: Any, *, numbers: bool = False) -> Any:
    """Return "cpu" for a device of CUDA, with `numbers` also for a number; other values unchanged."""
    if isinstance(value, str) and value.startswith("torch.cuda."):
        # The name of a tensor type, such as torch.cuda.FloatTensor.
        return value.replace("cuda.", "", 1)
    is_number = numbers and isinstance(value, int) and not isinstance(value, bool)
    name = f"cuda:{value}" if is_number else _device_name(value)
    kind, _, index = name.partition(":")
    if kind == "cuda" and index.isdecimal() and int(index) >= _devices.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index} of {_devices.count} devices"
        )
    return "cpu" if kind == "cuda" else value


def _device_name(value: Any) -> str:
    is_device = isinstance(value, str) or type(value).__name__ == "device"
    return str(value) if is_device else ""


def _always(value: Any = None) -> Callable[..., Any]:
    return lambda *_, **__: value


class Stream(contextlib.nullcontext[None]):
    """A stream, an event or a context of torch.cuda: work is done when a call returns, and times are the CPU's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.device = sys.modules["torch"].device("cuda", _devices.current)
        self.at = time.perf_counter()

    record = __init__

    def __getattr__(self, name: str) -> Any:
        if name in ("wait", "wait_event", "wait_stream", "synchronize", "query", "is_capturing"):
            return _always(name == "query")
        if name == "record_event":
            return lambda event=None: event or Stream()
        if name == "elapsed_time":
            return lambda end: (end.at - self.at) * 1000
        if name.startswith("_"):
            raise AttributeError(name)
        return refuse(f"{name} of a stream or event")()


def _queries(torch: Any) -> dict[str, Any]:
    """Return the attributes of torch.cuda by name; functions without a stand-in are refused."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = SimpleNamespace(
        name="CPU (stand-in)", major=8, minor=0, total_memory=memory, multi_processor_count=1
    )
    names = {
        each
        for each in torch.cuda.__all__
        if callable(getattr(torch.cuda, each, None)) and "Error" not in each
    }
    idle = {name for name in names if re.match(_NO_OPERATION, name)}
    return {
        **{name: refuse(f"torch.cuda.{name}") for name in names},
        **{name: _always(0) for name in idle},
        **{name: getattr(torch, name) for name in names if name.endswith(("Tensor", "Storage"))},
        **{name: _always(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **dict.fromkeys(_CONTEXTS, Stream),
        "device_count": _always(_devices.count),
        "current_device": lambda: _devices.current,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "set_device": lambda device: (
            on_cpu(each := torch.device(device)) and vars(_devices).update(current=each.index or 0)
        ),
        "get_device_name": _always(facts.name),
        "get_device_capability": _always((8, 0)),
        "get_device_properties": _always(facts),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * _devices.count,
        "mem_get_info": _always((memory, memory)),
        "memory_stats": lambda *_: defaultdict(int),
    }


def _placement(torch: Any) -> type[Any]:
    """Return a mode of torch that changes the devices in each call."""

    class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = kwargs or {}
            # It remains a device of CUDA, because scripts read its type.
            if func is torch.device:
                is_index = bool(args) and isinstance(args[0], int)
                return func("cuda", *args) if is_index else func(*args, **given)
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            targets = map(_device_name, (*args[1:2], given.get("device")))
            is_download = func is torch.Tensor.cpu or (func is torch.Tensor.to and "cpu" in targets)
            placed = [on_cpu(each, numbers=func is torch.Tensor.to) for each in args]
            named = {name: on_cpu(each, numbers=name == "device") for name, each in given.items()}
            named.pop("pin_memory", None)
            try:
                result = func(*placed, **named)
            except (AssertionError, RuntimeError) as error:
                is_of_cuda = re.search("CUDA|NVIDIA", str(error))
                if not is_of_cuda or named.get("device") or not inspect.isbuiltin(func):
                    raise
                # Within `with torch.device("cuda")`, an argument for the device is missing.
                result = func(*placed, **{**named, "device": "cpu"})
            if is_download and result is args[0]:
                # A copy to the host shares no memory, as from a GPU.
                return result.clone()
            return result

    return OnCpu


def _patch_torch(torch: Any) -> None:
    if torch.__version__ < "2.6":
        sys.exit(
            f"error: --cuda-on-cpu needs torch 2.6 or newer; this machine has torch {torch.__version__}"
        )
    cuda = torch.cuda
    dist = torch.distributed
    nn = torch.nn
    queries = _queries(torch)
    mode = _placement(torch)
    for module in (cuda, cuda.memory, cuda.random, cuda.streams, cuda.graphs):
        vars(module).update({name: each for name, each in queries.items() if hasattr(module, name)})
    # torch has this module since 2.6.
    for name in getattr(getattr(torch, "accelerator", None), "__all__", ()):
        own = queries.get(re.sub("_(index|idx)$", "", name), refuse(f"torch.accelerator.{name}"))
        setattr(torch.accelerator, name, own)
    vars(cuda.nvtx).update({name: _always(0) for name in cuda.nvtx.__all__} | {"range": Stream})
    vars(cuda.nccl).update({name: refuse(f"torch.cuda.nccl.{name}") for name in cuda.nccl.__all__})
    vars(cuda.profiler).update(start=_always(), stop=_always(), profile=Stream)
    change_arguments(
        torch.profiler.profile,
        "__init__",
        activities=lambda each: each and [a for a in each if a.name == "CPU"],
    )
    to = nn.Module.to
    plain = torch.Generator
    # Layers lack float16 on CPUs.
    half = {torch.float16: torch.bfloat16}
    nn.Module.to = lambda self, *args, **named: to(
        self, *(on_cpu(each, numbers=True) for each in args), **named
    )
    new = {"__new__": lambda cls, device="cpu": plain.__new__(cls, on_cpu(device))}
    torch.Generator = type("Generator", (plain,), new)
    torch.Tensor.record_stream = _always()
    nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, process_group=None: module  # noqa: ARG005 (as in torch)
    nn.DataParallel.forward = lambda self, *args, **named: self.module(*args, **named)
    change_arguments(
        nn.parallel.DistributedDataParallel,
        "__init__",
        device_ids=_always(),
        output_device=_always(),
    )
    change_arguments(
        torch.autocast, "__init__", device_type=on_cpu, dtype=lambda dtype: half.get(dtype, dtype)
    )
    change_arguments(
        torch, "load", map_location=lambda place: place if _device_name(place) == "meta" else "cpu"
    )
    change_arguments(torch, "compile", disable=_always(True))
    change_arguments(torch, "set_default_device", device=on_cpu)
    change_arguments(torch.utils.data.DataLoader, "__init__", pin_memory=_always(False))
    change_arguments(dist.device_mesh.DeviceMesh, "__init__", device_type=on_cpu)
    use_gloo(dist)
    dist.is_nccl_available = _always(True)

    def in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return function(*args, **kwargs)

        return run

    # The mode of this thread; torch turns it off in the backward pass.
    mode().__enter__()
    threading.Thread.run = in_mode(threading.Thread.run)  # type: ignore[method-assign]
    change_arguments(torch.utils.checkpoint, "checkpoint", function=in_mode)


def _patch_extensions(module: Any) -> None:
    no_cuda = refuse("a CUDA extension")
    module.CUDAExtension = no_cuda
    change_arguments(
        module, "load", sources=lambda files: no_cuda() if ".cu" in str(files) else files
    )
    change_arguments(module, "load_inline", cuda_sources=lambda text: text and no_cuda())
