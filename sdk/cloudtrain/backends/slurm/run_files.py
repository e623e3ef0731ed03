"""Files that the steps of a Slurm job exchange in the run's shared folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cloudtrain.backends.container.job_folder import JobFolder
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract.json_checks import ObjectSchema, count, mapping, text
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

JOB_FILE = "job"
"""File with Slurm's id of the run's job."""

STOP_FILE = "stop"
"""File that exists when the user has asked for a stop."""

_NUMBER_BYTES = 20


def read_job(root: Path) -> str:
    """Return Slurm's id of a run's job, or an empty text where it is not recorded yet."""
    try:
        found = read_regular(root / JOB_FILE, _NUMBER_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""
    return found if found.isdecimal() else ""


def claim_job(root: Path, job: str) -> str:
    """Record the id of a run's job unless another one is recorded; return the recorded one.

    Raises:
        OSError: It cannot be recorded.
    """
    partial = root / f".{JOB_FILE}.{job}"
    partial.write_text(f"{job}\n", encoding="ascii")
    try:
        # Unlike a rename, a link replaces nothing, also on network file systems.
        (root / JOB_FILE).hardlink_to(partial)
    except FileExistsError:
        return read_job(root)
    finally:
        partial.unlink(missing_ok=True)
    return job


@dataclass(frozen=True)
class NodePlan:
    """What a host step needs to know.

    Attributes:
        hosts: Name of the host in the job, such as algo-1, by the name of its node.
        addresses: Address of each host.
        port: TCP port at which the hosts' agents agree.
        variables: Further variables of the containers.
    """

    hosts: Mapping[str, str]
    addresses: Mapping[str, str]
    port: int
    variables: Mapping[str, str]


_NODE_PLAN = ObjectSchema(
    {"hosts": mapping(text), "addresses": mapping(text), "port": count, "variables": mapping(text)},
)


@dataclass(frozen=True)
class AttemptFiles:
    """The files of one attempt: written by the batch step, read by the host steps, and the other way round."""

    folder: JobFolder

    @property
    def nodes(self) -> Path:
        """What the host steps need to know."""
        return self._place / "nodes.json"

    @property
    def log(self) -> Path:
        """Output of srun and of the host steps themselves."""
        return self._place / "srun.log"

    def exit_code(self, host: str) -> Path:
        """File with the exit code of a host's container."""
        return self._place / f"exit-{host}"

    def order(self, signal_name: str) -> Path:
        """File that exists when the containers are to get SIGTERM, or to be killed."""
        return self._place / signal_name

    def beat(self) -> None:
        """Show the host steps that the batch step lives."""
        (self._place / "beat").touch()

    def beats(self) -> int:
        """Return a number that changes as long as the batch step lives."""
        try:
            return (self._place / "beat").stat().st_mtime_ns
        except OSError:
            return 0

    def create(self) -> None:
        """Create the folder of the files."""
        self._place.mkdir(parents=True, exist_ok=True)

    def write_nodes(self, plan: NodePlan) -> None:
        """Write what the host steps need to know."""
        write_atomically(self.nodes, dump_json(asdict(plan)), private=True)

    def read_nodes(self) -> NodePlan:
        """Return what the batch step has written.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is damaged.
        """
        return NodePlan(**_NODE_PLAN(load_json(read_regular(self.nodes))))

    def read_exit_code(self, host: str) -> int | None:
        """Return the exit code of a host's container, or None before its end."""
        try:
            return int(read_regular(self.exit_code(host), _NUMBER_BYTES))
        except (OSError, ValueError):
            return None

    @property
    def _place(self) -> Path:
        return self.folder.attempt_folder / "slurm"


def has_order(file: Path) -> bool:
    """Return whether a file exists, as other nodes see it.

    A network file system may answer from a cache; listing the folder asks again.
    """
    try:
        return file.name in os.listdir(file.parent)  # noqa: PTH208 (the names alone)
    except OSError:
        return False
