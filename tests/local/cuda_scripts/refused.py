"""Features that have no stand-in, and mistakes that fail on GPUs, too: each prints its error."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import cpp_extension


def capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")


ATTEMPTS: dict[str, Callable[[], Any]] = {
    "graphs": capture,
    "callables": lambda: torch.cuda.make_graphed_callables(
        torch.nn.Linear(1, 1).cuda(), (torch.ones(1).cuda(),)
    ),
    "extension": lambda: cpp_extension.load_inline(
        "kernel", cpp_sources="", cuda_sources="__global__ void f() {}"
    ),
    "file": lambda: cpp_extension.load("kernel", ["kernel.cu"]),
    "setup": lambda: cpp_extension.CUDAExtension("kernel", ["kernel.cu"]),
    "raw": lambda: torch.cuda.current_stream().cuda_stream,
    "nccl": lambda: torch.cuda.nccl.all_reduce([torch.ones(1).cuda()]),
    "ordinal": lambda: torch.ones(1).to("cuda:2"),
    "set": lambda: torch.cuda.set_device(9),
}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is printed)
        print(f"refused {name}: {type(error).__name__}: {error}", flush=True)
weights = torch.nn.Linear(1, 1, bias=False).cuda()
kept = {key: value.cpu() for key, value in weights.state_dict().items()}
with torch.no_grad():
    weights.weight += 1
print("kept weights are a copy:", not torch.equal(kept["weight"], weights.weight.cpu()), flush=True)
