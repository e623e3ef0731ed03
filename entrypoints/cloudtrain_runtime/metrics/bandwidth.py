"""How fast the ranks exchange gradients, measured once at the start."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.run_context import Context

_PROBE_BYTES = 2**18
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**28
"""Most: from there on a fabric of 3200 Gbit/s shows what it can; a round takes some ten milliseconds."""

_BUDGET_SECONDS = {"gloo": 0.01, "nccl": 0.3, "smddp": 0.3}
"""What all rounds together may take, by the ranks' backend."""

_ROUNDS = 3
_FAR_BELOW = 0.2
"""Share of the rating below which it is told: ordinary losses to latency and small rounds are not this large."""

_BITS = 8 / 1e9


@dataclass(frozen=True)
class Bandwidth:
    """What an all-reduce over all ranks achieves.

    Attributes:
        bytes: Size of what was reduced.
        seconds: Time of the fastest of some rounds, on the slowest rank.
        world_size: Number of ranks.
    """

    bytes: int
    seconds: float
    world_size: int

    @property
    def gbps(self) -> float:
        """Bus bandwidth in Gbit/s: what each rank sends, and over the ring of all ranks each host's network, too.

        The formula 2(n-1)/n x size / time is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md, read 2026-11-21).
        """
        return bus_factor(self.world_size) * self.bytes / self.seconds * _BITS


def bus_factor(world_size: int) -> float:
    """Return how often a rank sends its data in an all-reduce: 2(n-1)/n."""
    return 2 * (world_size - 1) / world_size


def report_bandwidth(place: Context, network_gbps: float | None = None) -> Bandwidth | None:
    """Measure and tell it, with a warning where the network is far below its rating. All ranks call it.

    Args:
        place: This rank's place.
        network_gbps: Rating of a host's network in Gbit/s; None where none is known.

    Returns:
        What was measured; None for one rank.
    """
    if place.world_size == 1:
        return None
    found = measure_bandwidth(place)
    if place.is_main:
        rating = network_gbps if len(place.hosts) > 1 else None
        warning = bandwidth_warning(found.gbps, rating, place.backend)
        emit(
            "bandwidth",
            gbps=found.gbps,
            bytes=found.bytes,
            seconds=found.seconds,
            world_size=found.world_size,
            hosts=len(place.hosts),
            backend=place.backend,
            rated_gbps=rating,
            warning=warning,
        )
        if warning is not None:
            log_line(f"warning: {warning}")
    return found


def measure_bandwidth(place: Context) -> Bandwidth:
    """Return what an all-reduce achieves. All ranks call it."""
    device = torch.device("cpu") if place.backend == "gloo" else place.device
    _all_reduce_seconds(_PROBE_BYTES, device)  # the first one also connects the ranks
    probe = min(_slowest(_all_reduce_seconds(_PROBE_BYTES, device)) for _ in range(_ROUNDS))
    budget = _BUDGET_SECONDS[place.backend] / _ROUNDS
    # All ranks know the same probe, so all choose the same size.
    fitting = int(_PROBE_BYTES * budget / max(probe, 1e-6))
    size = 2 ** (min(max(fitting, _LEAST_BYTES), _MOST_BYTES).bit_length() - 1)
    seconds = min(_slowest(_all_reduce_seconds(size, device)) for _ in range(_ROUNDS))
    return Bandwidth(size, seconds, place.world_size)


def bandwidth_warning(gbps: float, rated_gbps: float | None, backend: str) -> str | None:
    """Return what is wrong with a bandwidth and what to do, or None.

    Gloo is not judged: it uses one connection, whatever the network could do.
    """
    if rated_gbps is None or backend == "gloo" or gbps >= _FAR_BELOW * rated_gbps:
        return None
    return (
        f"ranks exchange data at {gbps:,.0f} Gbit/s, and the instances' network is rated {rated_gbps:,.0f} Gbit/s: "
        "EFA is not active? Set code.env: {NCCL_DEBUG: INFO} and look for 'NET/OFI' and 'efa' in the log; the image "
        "needs the EFA installer's libfabric and aws-ofi-nccl, the security group must allow all traffic to itself, "
        "in both directions"
    )


def _all_reduce_seconds(size: int, device: torch.device) -> float:
    data = torch.zeros(size // 4, device=device)
    _settle(device)
    began = time.perf_counter()
    dist.all_reduce(data)
    _settle(device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float) -> float:
    """Return the time of the slowest rank, which is the same number on all of them."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
