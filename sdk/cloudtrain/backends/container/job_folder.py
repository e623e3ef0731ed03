"""The folder of a run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.contract.attempts import read_attempt

ATTEMPT_FILE = "attempt"
"""File with the number of a run's newest attempt; absent where a run has always one."""


@dataclass(frozen=True)
class JobFolder:
    """The folder of a run: one log and one tree per host, and the events of all hosts.

    Attributes:
        root: The folder.
        attempt: Number of the attempt, from 1. A run that is interrupted on a cluster with a queue has several, each
            with logs and trees of its own: processes of a lost node may live on and write to the former ones.
    """

    root: Path
    attempt: int = 1

    @classmethod
    def newest(cls, root: Path) -> JobFolder:
        """Return the folder of a run with its newest attempt."""
        return cls(root, read_attempt(root / ATTEMPT_FILE))

    @property
    def logs(self) -> Path:
        """The folder of `<host>.log`."""
        return self.root / "logs"

    @property
    def events(self) -> Path:
        """The events of all hosts, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def interpreter(self) -> Path:
        """File with the path of the containers' Python; absent for this process's."""
        return self.root / "interpreter"

    @property
    def python(self) -> str:
        """Path of the containers' Python."""
        recorded = self.interpreter
        return os.fsdecode(recorded.read_bytes()) if recorded.is_file() else sys.executable

    def tree(self, host: str) -> MlTree:
        """Return a host's /opt/ml."""
        return MlTree(self.own / "hosts" / host / "opt" / "ml")

    def log(self, host: str) -> Path:
        """Return a host's log."""
        name = host if self.attempt == 1 else f"{host}.{self.attempt}"
        return self.logs / f"{name}.log"

    @property
    def own(self) -> Path:
        """The folder of this attempt."""
        return self.root if self.attempt == 1 else self.attempt_folder

    @property
    def attempt_folder(self) -> Path:
        """The folder with what belongs to this attempt alone."""
        return self.root / "attempts" / str(self.attempt)


def host_of(log: Path) -> str:
    """Return the host whose log this is."""
    return log.name.partition(".")[0]
