"""What a host has: driver, CUDA, GPUs, EFA, shared memory, disk, memory and packages, in one event before it trains.

Standard library only, like the launcher. Versions are read from files, because an import of torch takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cloudtrain_runtime.contract import MlTree, RunConfig
from cloudtrain_runtime.launcher.host import Host, count_gpus
from cloudtrain_runtime.process.event_log import emit, log_line
from cloudtrain_runtime.process.shared_memory import FOLDER, most_workers, shared_memory_bytes

_NVIDIA = Path("/proc/driver/nvidia")
_INFINIBAND = Path("/sys/class/infiniband")
_COMPAT = Path("/usr/local/cuda/compat")
"""The image's own libcuda, for hosts with an older driver. The start script of AWS's images exports it in a shell that
ends before the training starts."""

_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Oldest driver branch by CUDA's major version. Source: NVIDIA, CUDA Compatibility, table 1, 2026-11."""

_PACKAGES = (
    *(
        "torch",
        "numpy",
        "boto3",
        "s3torchconnector",
        "safetensors",
        "torchvision",
        "transformers",
        "accelerate",
    ),
    *("lightning", "trl", "peft", "deepspeed", "tensorboard", "mlflow", "sagemaker-training"),
)
_EFA_GBPS = 100
"""Every instance type with GPUs and at least this bandwidth has EFA."""

_LEAST_DISK_BYTES = 2 * 10**9
_FI_INFO_SECONDS = 5


@dataclass(frozen=True)
class Cuda:
    """The driver of a host and the CUDA of its image.

    Attributes:
        driver: Version of the host's driver, or None.
        version: CUDA version that torch was built for, or None.
        oldest_driver: Driver branch that this CUDA needs, or None.
        compat: Folder with the image's own driver libraries, if the host's driver is older than that; else None.
    """

    driver: str | None = None
    version: str | None = None
    oldest_driver: int | None = None
    compat: str | None = None

    @property
    def is_too_old(self) -> bool:
        """Whether the host's driver is older than CUDA needs."""
        if self.driver is None:
            return False
        branch = int(self.driver.partition(".")[0])
        return branch < (self.oldest_driver or 0)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return LD_LIBRARY_PATH with the image's driver libraries in front; nothing if they are not needed."""
        if self.compat is None:
            return {}
        others = [
            path
            for path in environ.get("LD_LIBRARY_PATH", "").split(":")
            if path not in ("", self.compat)
        ]
        return {"LD_LIBRARY_PATH": ":".join([self.compat, *others])}


def read_cuda() -> Cuda:
    """Return the driver of this host and the CUDA of its image."""
    try:
        version = _cuda_of_torch()
        major = (version or "").partition(".")[0]
        found = Cuda(driver=_driver(), version=version, oldest_driver=_DRIVERS.get(major))
        if found.is_too_old and (_COMPAT / "libcuda.so.1").exists():
            return replace(found, compat=str(_COMPAT))
    except (OSError, ValueError):
        return Cuda()
    return found


def report_environment(tree: MlTree, host: Host, config: RunConfig, cuda: Cuda) -> None:
    """Emit the event of this host, and print its warnings. It never raises an error."""
    try:
        gpus = _gpus()
        efa = _efa_devices()
        shm = shared_memory_bytes()
        free = shutil.disk_usage(tree.root).free
        warnings = [*_warnings(host, config, cuda, gpus=gpus, efa=efa)]
        if free < _LEAST_DISK_BYTES:
            warnings.append(
                f"only {free / 1e9:.1f} GB of the disk are free: free some, or on SageMaker raise cluster.volume"
            )
        emit(
            "environment",
            host=host.name,
            python=sys.version.split()[0],
            driver=cuda.driver,
            cuda=cuda.version,
            cuda_compat=cuda.compat,
            gpus=gpus,
            efa=efa,
            efa_provider=_efa_provider() if efa else None,
            shm_bytes=shm,
            disk_free_bytes=free,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            packages=_packages(),
            warnings=warnings,
        )
        for text in warnings:
            log_line(f"warning: {text}")
    except Exception as error:  # noqa: BLE001 (a report must not end a run)
        log_line(f"the environment of {host.name} is unknown: {type(error).__name__}: {error}")


def _warnings(
    host: Host, config: RunConfig, cuda: Cuda, *, gpus: list[str], efa: list[str]
) -> list[str]:
    found = []
    if cuda.is_too_old and cuda.compat is None:
        found.append(
            f"driver {cuda.driver} is too old for CUDA {cuda.version}, which needs {cuda.oldest_driver} or newer, and "
            f"there is no {_COMPAT}: use a PyTorch for an older CUDA (on SageMaker an older cluster.framework)"
        )
    if gpus and not efa and len(host.hosts) > 1 and (config.network_gbps or 0) >= _EFA_GBPS:
        found.append(
            f"no EFA device: NCCL uses TCP on a network rated {config.network_gbps:,.0f} Gbit/s"
        )
    ranks = max(1, config.processes_per_instance or count_gpus())
    can_have_workers = config.train is None or bool(gpus or config.train.workers)
    if can_have_workers and most_workers(ranks) == 0:
        mebibytes = (shared_memory_bytes() or 0) / 2**20
        plural = "" if ranks == 1 else "s"
        found.append(
            f"{FOLDER} has {mebibytes:,.0f} MiB, too little for loader workers of {ranks} rank{plural}: "
            "a Task loads its data without; a script's DataLoader needs num_workers=0"
        )
    return found


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel module, closed or open."""
    path = _NVIDIA / "version"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text)
    return match[1] if match else None


def _cuda_of_torch() -> str | None:
    """Return the CUDA version in torch's version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, flags=re.MULTILINE)
    return match[1] if match else None


def _gpus() -> list[str]:
    """Return the model of each GPU that the container sees."""
    texts = (
        path.read_text(encoding="utf-8") for path in sorted(_NVIDIA.glob("gpus/*/information"))
    )
    matches = (re.search(r"^Model:\s*(.+)$", text, flags=re.MULTILINE) for text in texts)
    return [match[1].strip() if match else "unknown" for match in matches]


def _efa_devices() -> list[str]:
    """Return the names of the RDMA devices that the kernel's EFA driver serves."""
    devices = sorted(_INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    return [
        device.name for device in devices if (device / "device" / "driver").resolve().name == "efa"
    ]


def _efa_provider() -> str | None:
    """Return the provider that libfabric finds for EFA, or None."""
    program = shutil.which("fi_info") or "/opt/amazon/efa/bin/fi_info"
    try:
        done = subprocess.run(
            [program, "-p", "efa"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_FI_INFO_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"^provider: (\S+)", done.stdout, flags=re.MULTILINE)
    return match[1] if match else None


def _packages() -> dict[str, str]:
    """Return the versions of the installed packages that matter for training."""
    # The import takes long.
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
