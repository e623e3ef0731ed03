"""Bandwidth of an all-reduce over all ranks, measured once at the start."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.run_context import Context

_PROBE_BYTES = 2**18
_MIN_BYTES, _MAX_BYTES = 2**20, 2**28
"""The maximum saturates a network of 3200 Gbit/s; a round takes some ten milliseconds."""

_BUDGET_SECONDS = {"gloo": 0.01, "nccl": 0.3, "smddp": 0.3}
"""Time limit of all rounds together, by backend."""

_ROUNDS = 3
_WARNING_SHARE = 0.2
"""Share of the rated bandwidth below which a warning is logged: latency and small rounds alone cost less than that."""

_GIGABITS_PER_BYTE = 8 / 1e9


def report_bandwidth(context: Context, network_gbps: float | None = None) -> None:
    """Measure and report the bandwidth; warn if it is far below the network's rating. All ranks call this.

    Args:
        context: This rank's context.
        network_gbps: Rated bandwidth of a host's network in Gbit/s; None if it is unknown.
    """
    if context.world_size == 1:
        return
    size, seconds = measure_bandwidth(context)
    if context.is_main:
        gbps = bus_bandwidth(size, seconds, context.world_size)
        rating = network_gbps if len(context.hosts) > 1 else None
        warning = bandwidth_warning(gbps, rating, context.backend)
        emit(
            "bandwidth",
            gbps=gbps,
            bytes=size,
            seconds=seconds,
            world_size=context.world_size,
            hosts=len(context.hosts),
            backend=context.backend,
            rated_gbps=rating,
            warning=warning,
        )
        if warning is not None:
            log_line(f"warning: {warning}")


def bus_bandwidth(size: int, seconds: float, world_size: int) -> float:
    """Return the bus bandwidth of an all-reduce of so many bytes in Gbit/s: the rate at which each rank sends.

    With a ring over all ranks it is the rate of each host, too. The formula 2(n-1)/n x size / time is that of NVIDIA's
    nccl-tests (doc/PERFORMANCE.md, read 2026-11-21).
    """
    return 2 * (world_size - 1) / world_size * size / seconds * _GIGABITS_PER_BYTE


def measure_bandwidth(context: Context) -> tuple[int, float]:
    """Return the bytes of an all-reduce, and the seconds of its fastest round on the slowest rank.

    All ranks call this, and get the same result.
    """
    device = torch.device("cpu") if context.backend == "gloo" else context.device
    _all_reduce_seconds(_PROBE_BYTES, device)  # the first one also connects the ranks
    probe = min(_slowest(_all_reduce_seconds(_PROBE_BYTES, device)) for _ in range(_ROUNDS))
    budget = _BUDGET_SECONDS[context.backend] / _ROUNDS
    # The probe time is the same on all ranks, so they choose the same size.
    fitting = int(_PROBE_BYTES * budget / max(probe, 1e-6))
    size = 2 ** (min(max(fitting, _MIN_BYTES), _MAX_BYTES).bit_length() - 1)
    return size, min(_slowest(_all_reduce_seconds(size, device)) for _ in range(_ROUNDS))


def bandwidth_warning(gbps: float, rated_gbps: float | None, backend: str) -> str | None:
    """Return a warning about a low bandwidth and what to do, or None.

    There is no warning for Gloo: it uses one connection, however fast the network is.
    """
    if rated_gbps is None or backend == "gloo" or gbps >= _WARNING_SHARE * rated_gbps:
        return None
    return (
        f"ranks exchange data at {gbps:,.0f} Gbit/s, and the instances' network is rated {rated_gbps:,.0f} Gbit/s: "
        "EFA is not active? Set code.env: {NCCL_DEBUG: INFO} and look for 'NET/OFI' and 'efa' in the log; the image "
        "needs the EFA installer's libfabric and aws-ofi-nccl, the security group must allow all traffic to itself, "
        "in both directions"
    )


def _all_reduce_seconds(size: int, device: torch.device) -> float:
    data = torch.zeros(size // 4, device=device)
    synchronize(device)
    began = time.perf_counter()
    dist.all_reduce(data)
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all work; a CPU has no pending work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float) -> float:
    """Return the time of the slowest rank, on all ranks."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
