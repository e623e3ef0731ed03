"""Where a file below `/opt/ml` of a local instance is on its machine.

In a mount namespace, paths are those of SageMaker. Other programs of the machine find the files below the instance's
folder, and those of the folders that are mounted into it elsewhere. `mounts`, beside the folder, has a link to each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath

from cloudtrain_runtime.contract.constants import INSTANCE_VARIABLE, ML_ROOT_VARIABLE


def mounts_of(root: Path) -> Path:
    """Return the folder with the links of an instance's mounts, by the instance's folder. It need not exist."""
    return root.parents[1] / "mounts"


def place_on_machine(root: Path, name: PurePath) -> Path:
    """Return where a file is on the machine.

    Args:
        root: The instance's folder.
        name: Path of the file below `/opt/ml`.
    """
    mounts = mounts_of(root)
    for mount in (*reversed(name.parents), name):
        link = mounts / mount
        if link.is_symlink():
            return link.readlink() / name.relative_to(mount)
    return root / name


def machine_path(path: Path, environ: Mapping[str, str]) -> Path:
    """Return where a file that a container names is on the machine; on SageMaker, the path itself."""
    folder = environ.get(INSTANCE_VARIABLE)
    root = environ.get(ML_ROOT_VARIABLE)
    if folder is None or root is None or not path.is_relative_to(root):
        return path
    return place_on_machine(Path(folder), path.relative_to(root))
