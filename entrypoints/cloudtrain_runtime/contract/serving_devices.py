"""The GPUs of each replica of a served model."""

from __future__ import annotations

from collections.abc import Sequence


def assign_devices(replicas: int, gpus: float, found: Sequence[str]) -> list[str]:
    """Return the GPUs of each replica, as the value of CUDA_VISIBLE_DEVICES.

    Args:
        replicas: Number of replicas.
        gpus: GPUs of each: none, a part of one, or a number without a fraction.
        found: The machine's GPUs.

    Raises:
        ValueError: there are not enough of them.
    """
    if not gpus:
        return [""] * replicas
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"a replica takes a part of one GPU, or several whole ones; got {gpus:g}")
    each = max(1, int(gpus))
    # As many replicas as fit share one GPU.
    sharing = max(1, int(1 / gpus))
    groups = [found[start : start + each] for start in range(0, len(found), each)]
    places = [",".join(group) for group in groups if len(group) == each for _ in range(sharing)]
    if len(places) < replicas:
        raise ValueError(
            f"{replicas} x {gpus:g} GPUs are needed, and this machine has {len(found)}: "
            f"enough for {len(places)} replicas"
        )
    return places[:replicas]
