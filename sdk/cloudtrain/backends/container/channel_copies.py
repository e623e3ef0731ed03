"""Copies of the data of a job, one for each instance, that cost nothing: overlays of the user's folders.

On an instance a channel is a copy that ends with it, so a job may delete and rewrite its files. Here the data is the
user's own folder. Each instance gets an overlay of it: reads come from the folder, and changes go to an upper layer
inside the run, which is deleted at the end. `mount_namespace` mounts the overlays where only the instance sees them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from cloudtrain.backends.container import mount_namespace
from cloudtrain.backends.container.mount_namespace import MERGED, SOURCE, UPPER, WORK
from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.contract.machine_paths import place_on_machine


def add_copy(tree: MlTree, name: str, source: Path) -> Path:
    """Prepare a copy of a folder for an instance; return where the instance finds it.

    Args:
        tree: The instance's /opt/ml.
        name: Name of the channel.
        source: The folder.
    """
    folder = Path(mount_namespace.copies_of(str(tree.root))) / name
    for each in (UPPER, WORK, MERGED):
        (folder / each).mkdir(parents=True)
    (folder / SOURCE).symlink_to(source.resolve())
    if not mount_namespace.is_enabled():
        mount_namespace.link_source(str(folder))
    return folder / MERGED


def original_of(tree: MlTree, path: Path) -> Path:
    """Return where a file of a channel is outside of its instance, which alone sees the copy."""
    path = place_on_machine(tree.root, path.relative_to(tree.root))
    copies = Path(os.path.realpath(mount_namespace.copies_of(str(tree.root))))
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(copies):
        return path
    name, _, *rest = real.relative_to(copies).parts
    return copies.joinpath(name, SOURCE, *rest)


def end_copies(tree: MlTree) -> None:
    """Delete what an instance has changed. Links then lead to the original data and other mounts."""
    copies = Path(mount_namespace.copies_of(str(tree.root)))
    for folder in sorted(copies.glob("*")):
        for each in (UPPER, WORK):
            _delete(folder / each)
        with contextlib.suppress(OSError):
            mount_namespace.link_source(str(folder))
    mount_namespace.link_mounts(str(tree.root))


def _delete(folder: Path) -> None:
    """Delete a folder of an overlay; the kernel creates some that their owner may not read."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            # The target of a link may be the user's own.
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
