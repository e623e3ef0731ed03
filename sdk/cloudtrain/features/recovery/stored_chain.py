"""The folder of a chain with its record, and the copy of the code with which its first attempt begins."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cloudtrain.controllers.folder import ControllerFolder, known_folders, make_folder
from cloudtrain.runs.attempt_chain import (
    CHAIN_FILE,
    CHAIN_VERSION,
    CHAINS_FOLDER,
    Chain,
    read_chain,
)
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.format_version import FIELD
from cloudtrain_runtime.contract.strict_json import dump_json


@dataclass(frozen=True)
class StoredChain(ControllerFolder):
    """The folder of a chain, at `<home>/chains/<id>`."""

    noun = "chain"

    @classmethod
    def create(cls, home: Path, chain: Chain) -> Self:
        """Create the folder of a new chain.

        Raises:
            UserError: It exists already, or cannot be created.
        """
        stored = cls(chain.id, make_folder(home, CHAINS_FOLDER, chain.id))
        stored.write(chain)
        return stored

    @classmethod
    def find(cls, run: str, home: Path | None = None) -> Self | None:
        """Return the folder of the chain that begins with a run, or None."""
        folder = known_folders(CHAINS_FOLDER, CHAIN_FILE, home).get(run)
        return None if folder is None else cls(run, folder)

    @property
    def file(self) -> Path:
        """The record."""
        return self.folder / CHAIN_FILE

    def read(self) -> Chain:
        """Return the recorded chain.

        Raises:
            UserError: It cannot be read, or another program wrote it.
        """
        return read_chain(self.folder)

    def write(self, chain: Chain) -> None:
        """Record a chain."""
        content: dict[str, Any] = {FIELD: CHAIN_VERSION, **chain.to_document()}
        write_atomically(self.file, dump_json(content, indent=1) + "\n")


def has_time(chain: Chain) -> bool:
    """Return whether another attempt may still begin."""
    return time.time() - chain.created < chain.limits.time
