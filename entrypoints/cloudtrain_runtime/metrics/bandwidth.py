"""Bandwidth of an all-reduce over all ranks, measured once at the start."""

from __future__ import annotations

import time
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Bandwidth:
    """Speed of an all-reduce over all ranks."""

    bytes: int  # size of the reduced tensor
    seconds: float  # time of the fastest round, on the slowest rank
    world_size: int  # number of ranks

    @property
    def gbps(self) -> float:
        """Bus bandwidth in Gbit/s: the rate at which each rank sends, and with a ring over all ranks each host, too.

        The formula 2(n-1)/n x size / time is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md, read 2026-11-21).
        """
        return bus_factor(self.world_size) * self.bytes / self.seconds * _GIGABITS_PER_BYTE


def bus_factor(world_size: int) -> float:
    """Return how many times its data a rank sends in an all-reduce: 2(n-1)/n."""
    return 2 * (world_size - 1) / world_size


def report_bandwidth(context: Context, network_gbps: float | None = None) -> Bandwidth | None:
    """Measure and report the bandwidth; warn if it is far below the network's rating. All ranks call this.

    Args:
        context: This rank's context.
        network_gbps: Rated bandwidth of a host's network in Gbit/s; None if it is unknown.

    Returns:
        The measured bandwidth; None for one rank.
    """
    if context.world_size == 1:
        return None
    found = measure_bandwidth(context)
    if context.is_main:
        rating = network_gbps if len(context.hosts) > 1 else None
        warning = bandwidth_warning(found.gbps, rating, context.backend)
        emit(
            "bandwidth",
            gbps=found.gbps,
            bytes=found.bytes,
            seconds=found.seconds,
            world_size=found.world_size,
            hosts=len(context.hosts),
            backend=context.backend,
            rated_gbps=rating,
            warning=warning,
        )
        if warning is not None:
            log_line(f"warning: {warning}")
    return found


def measure_bandwidth(context: Context) -> Bandwidth:
    """Measure the bandwidth of an all-reduce. All ranks call this."""
    device = torch.device("cpu") if context.backend == "gloo" else context.device
    _all_reduce_seconds(_PROBE_BYTES, device)  # the first one also connects the ranks
    probe = min(_slowest(_all_reduce_seconds(_PROBE_BYTES, device)) for _ in range(_ROUNDS))
    budget = _BUDGET_SECONDS[context.backend] / _ROUNDS
    # The probe time is the same on all ranks, so they choose the same size.
    fitting = int(_PROBE_BYTES * budget / max(probe, 1e-6))
    size = 2 ** (min(max(fitting, _MIN_BYTES), _MAX_BYTES).bit_length() - 1)
    seconds = min(_slowest(_all_reduce_seconds(size, device)) for _ in range(_ROUNDS))
    return Bandwidth(size, seconds, context.world_size)


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
    _synchronize(device)
    began = time.perf_counter()
    dist.all_reduce(data)
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float) -> float:
    """Return the time of the slowest rank, on all ranks."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
