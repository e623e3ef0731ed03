"""Mount namespaces with the devices of another host: NVIDIA's driver, EFA, CUDA's libraries and a small /dev/shm.

The files are fake; the processes that read them are real. This machine's own files are not changed.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cloudtrain.backends.container import mount_namespace

COMPAT = "/usr/local/cuda/compat"

_SHOW_OTHERS = """
mkdir -p {keep} && mount --rbind /usr/local {keep} && mount -t tmpfs tmpfs /usr/local
for each in {keep}/*; do
    if [ -d "$each" ]; then
        mkdir "/usr/local/${{each##*/}}" && mount --rbind "$each" "/usr/local/${{each##*/}}"
    fi
done
mkdir -p /usr/local/cuda
"""


@dataclass(frozen=True)
class FakeHost:
    """Files of a host.

    Attributes:
        folder: Folder of the fake files.
        driver: Line of NVIDIA's kernel module in /proc/driver/nvidia/version, or None.
        gpus: Models of the GPUs.
        efa: Names of the EFA devices.
        other_rdma: Names of RDMA devices with another driver.
        cuda: CUDA version in torch's version.py, or None for that of this machine.
        compat: Whether the image has CUDA's compatibility libraries.
        shm: Size of /dev/shm as mount writes it, or an empty text for that of this machine.
    """

    folder: Path
    driver: str | None = None
    gpus: tuple[str, ...] = ()
    efa: tuple[str, ...] = ()
    other_rdma: tuple[str, ...] = ()
    cuda: str | None = None
    compat: bool = False
    shm: str = ""

    def command(self, *words: str | Path) -> list[str]:
        """Return a command that executes another one on this host."""
        if not mount_namespace.is_available() or shutil.which("unshare") is None:
            pytest.skip("this machine allows no mount namespace")
        lines = ["set -e", *self._mounts(), 'exec "$@"']
        as_root = ["--map-root-user"] if os.geteuid() else []
        return [
            "unshare",
            "--mount",
            *as_root,
            "sh",
            "-c",
            "\n".join(lines),
            "sh",
            *map(str, words),
        ]

    def _mounts(self) -> list[str]:
        proc, classes = self.folder / "proc-driver", self.folder / "sys-class"
        (proc / "nvidia" / "gpus").mkdir(parents=True)
        if self.driver is not None:
            (proc / "nvidia" / "version").write_text(
                f"NVRM version: {self.driver}\nGCC version: gcc 11.4.0\n"
            )
        for index, model in enumerate(self.gpus):
            folder = proc / "nvidia" / "gpus" / f"0000:{index:02x}:1e.0"
            folder.mkdir()
            (folder / "information").write_text(
                f"Model: \t\t {model}\nIRQ:   \t\t {index}\nGPU Excluded:\t No\n"
            )
        (classes / "infiniband").mkdir(parents=True)
        for kind, names in (("efa", self.efa), ("mlx5_core", self.other_rdma)):
            (self.folder / "drivers" / kind).mkdir(parents=True)
            for name in names:
                (classes / "infiniband" / name / "device").mkdir(parents=True)
                (classes / "infiniband" / name / "device" / "driver").symlink_to(
                    self.folder / "drivers" / kind
                )
        mounts = [f"mount --bind {proc} /proc/driver", f"mount --bind {classes} /sys/class"]
        if self.cuda is not None:
            version = Path(torch.__file__).with_name("version.py")
            text = re.sub(r"(?m)^(cuda\b.*=).*$", rf"\1 '{self.cuda}'", version.read_text())
            (self.folder / "version.py").write_text(text)
            mounts.append(f"mount --bind {self.folder / 'version.py'} {version}")
        if self.compat:
            (self.folder / "cuda" / "compat").mkdir(parents=True)
            (self.folder / "cuda" / "compat" / "libcuda.so.1").touch()
            mounts += [_SHOW_OTHERS.format(keep=self.folder / "usr-local")]
            mounts += [f"mount --bind {self.folder / 'cuda'} /usr/local/cuda"]
        if self.shm:
            mounts.append(f"mount -t tmpfs -o size={self.shm} tmpfs /dev/shm")
        return mounts
