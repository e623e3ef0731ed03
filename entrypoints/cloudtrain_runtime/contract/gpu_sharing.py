"""The GPUs of ranks: which CUDA shows, and whether ranks share them. The hosts of a local run share one machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from cloudtrain_runtime.contract.constants import CARDS_VARIABLE, HOSTS_HERE_VARIABLE


def visible_devices(text: str) -> tuple[str, ...]:
    """Return the GPUs in a value of CUDA_VISIBLE_DEVICES: up to the first that is none, as CUDA reads it."""
    names = (device.strip() for device in text.split(","))
    return tuple(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def is_gpu_shared(ranks_per_host: int, gpus: int, environ: Mapping[str, str]) -> bool:
    """Return whether several ranks use one GPU, on any host of this machine; NCCL needs a GPU for each rank.

    Hosts have disjoint GPUs of equal number, or one each if there are fewer GPUs than hosts, so counting suffices.

    Args:
        ranks_per_host: Ranks of this host.
        gpus: GPUs that this host may use.
        environ: Environment of the container.
    """
    ranks = ranks_per_host * int(environ.get(HOSTS_HERE_VARIABLE, "1"))
    return 0 < int(environ.get(CARDS_VARIABLE, gpus)) < ranks
