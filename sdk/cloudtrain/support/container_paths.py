"""Paths of a container as texts, as jobs, scripts and logs name them."""

from __future__ import annotations

from typing import Final

from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE

CODE: Final = str(CONTAINER_TREE.code)
CODE_PREFIX: Final = f"{CODE}/"
"""Begin of the paths of the code's files."""
CHECKPOINTS: Final = str(CONTAINER_TREE.checkpoints)
"""Folder that is kept, also when the run is interrupted."""


def below_code(path: str) -> str:
    """Return a path of a container relative to the code folder; any other path as it is."""
    return "." if path == CODE else path.removeprefix(CODE_PREFIX)
