"""Resources of this machine, without importing torch."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain_runtime.contract import LISTENING_PORTS
from cloudtrain_runtime.contract.gpu_sharing import visible_devices

if TYPE_CHECKING:
    from cloudtrain.planning.placement import Machine

_TRACKERS = ("tensorboard", "mlflow", "wandb")
_LEAST_BYTES = 1 << 20


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the ids of the NVIDIA GPUs that CUDA can use, in the form of CUDA_VISIBLE_DEVICES."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return visible_devices(chosen)
    devices = Path("/proc/driver/nvidia/gpus")
    if devices.is_dir():
        return tuple(str(index) for index, _ in enumerate(devices.iterdir()))
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return tuple(
        str(index)
        for index, line in enumerate(listing.stdout.splitlines())
        if line.startswith("GPU")
    )


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of the operating system for a full disk or quota."""


def is_disk_full(folder: Path) -> bool:
    """Return whether the file system of a folder has no room for another file of 1 MiB."""
    status = os.statvfs(folder)
    has_bytes = status.f_bavail * status.f_frsize >= _LEAST_BYTES
    # Some file systems count no files and report 0 of 0.
    has_files = status.f_files == 0 or status.f_favail > 0
    return not (has_bytes and has_files)


def this_machine() -> Machine:
    """Return what a plan needs to know about this machine."""
    from importlib import metadata

    from cloudtrain.backends.container.mount_namespace import is_available
    from cloudtrain.planning.placement import Machine

    gpus = visible_gpus()
    torch = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    return Machine(
        gpus=len(gpus),
        cards=count_cards(gpus),
        variables=frozenset(os.environ),
        has_ml_namespace=is_available(),
        missing=missing_trackers(),
        has_wandb_login=any(path.exists() for path in _wandb_logins()),
        torch=torch,
    )


def missing_trackers() -> frozenset[str]:
    """Return the packages of trackers that are not installed here."""
    return frozenset(each for each in _TRACKERS if importlib.util.find_spec(each) is None)


def _wandb_logins() -> Iterator[Path]:
    """Yield the files in which `wandb login` may have stored a key. Source: wandb.sdk.lib.wbauth, 0.31."""
    home = Path.home()
    yield Path(os.environ.get("NETRC", home / ".netrc"))
    yield home / "_netrc"
    yield Path(os.environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb"), "settings")


def count_cards(gpus: tuple[str, ...]) -> int:
    """Return how many of these GPUs NCCL can use together.

    A process of CUDA sees one MIG instance only, and NCCL refuses two of one GPU, so they count as one.
    """
    return 1 if any(name.startswith("MIG-") for name in gpus) else len(gpus)


def share_gpus(gpus: tuple[str, ...], hosts: int) -> list[tuple[str, ...]]:
    """Return the GPUs of each host: disjoint parts, or one shared GPU each if there are fewer GPUs than hosts."""
    if not gpus:
        return [()] * hosts
    if len(gpus) < hosts:
        return [(gpus[index % len(gpus)],) for index in range(hosts)]
    each = len(gpus) // hosts
    return [gpus[index * each : (index + 1) * each] for index in range(hosts)]


def host_addresses(hosts: tuple[str, ...]) -> dict[str, str]:
    """Return a loopback address for each host.

    Linux accepts all addresses of 127.0.0.0/8, so hosts get distinct addresses. Sorted as text, by which torchrun
    numbers hosts, they have the order of the hosts. On other systems all hosts share one address.
    """
    if sys.platform != "linux":
        return dict.fromkeys(hosts, "127.0.0.1")
    return {host: f"127.0.0.{host.rpartition('-')[2]}" for host in hosts}


def loopback_interface() -> str:
    """Return the name of the loopback network interface."""
    return "lo" if sys.platform == "linux" else "lo0"


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address, or in whose network it is; else an empty text."""
    import psutil

    wanted = ipaddress.ip_address(address)
    found = ""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family != socket.AF_INET or not entry.netmask:
                continue
            if entry.address == address:
                return name
            if wanted in ipaddress.ip_network(f"{entry.address}/{entry.netmask}", strict=False):
                found = found or name
    return found


def free_port() -> int:
    """Return a free TCP port, chosen at random so that concurrent runs do not choose the same one."""
    for port in random.SystemRandom().sample(LISTENING_PORTS, 64):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port between {LISTENING_PORTS.start} and {LISTENING_PORTS.stop}")
