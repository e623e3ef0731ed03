"""The folder of a sweep: its file `sweep.json`, the lock of its controller, and the request to stop."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

from cloudtrain.errors import RunNotFoundError, UserError, did_you_mean
from cloudtrain.job.document import Document
from cloudtrain.planning.plan import SAGEMAKER
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.run_id import is_run_id, make_run_id, submit_order
from cloudtrain.sweeps.loader import LoadedSweep, check_sweep
from cloudtrain_runtime.contract.strict_json import dump_json

SWEEPS_FOLDER = "sweeps"
SWEEP_FILE = "sweep.json"
CONTROLLER_LOG = "controller.log"
_LOCK_FILE = "lock"
_STOP_FILE = "stop"
_LOCK_ATTEMPTS = 20
_LOCK_PAUSE_SECONDS = 0.05
_NAME = re.compile(r"[a-zA-Z0-9-]+")


@dataclass(frozen=True)
class StoredSweep:
    """A sweep as its folder has it.

    Attributes:
        id: Id of the sweep, in the form of a run id.
        folder: Its folder.
        backend: Where its trials run.
        created: When it was started.
        identity: Equal for two sweeps of the same file and job in the same place.
        digest: Digest of the code.
        lowest_usd: Lowest reservation of a trial that was planned; 0 where trials are free.
        planned_trials: Number of trials.
        sweep: The sweep.
    """

    id: str
    folder: Path
    backend: str
    created: datetime
    identity: str
    digest: str
    lowest_usd: float
    planned_trials: int
    sweep: LoadedSweep

    @classmethod
    def create(cls, home: Path, sweep: LoadedSweep, backend: str, plan: tuple[str, float, int]) -> Self:
        """Create the folder of a new sweep.

        Args:
            home: Folder of local runs.
            sweep: The sweep.
            backend: Where its trials run.
            plan: Digest of the code, lowest reservation in US dollars, and number of trials.
        """
        identity, now = identity_of(sweep, backend), datetime.now(UTC)
        name = make_run_id(sweep.name, now, identity[:6])
        stored = cls(name, _make_folder(home, name), backend, now, identity, *plan, sweep)
        folder = stored.folder
        write_atomically(folder / SWEEP_FILE, dump_json(stored.to_document(), indent=1, default=str) + "\n")
        return stored

    @classmethod
    def adopt(cls, home: Path, content: Mapping[str, Any], base: Path) -> Self:
        """Create the folder of a sweep that another machine has started.

        Args:
            home: Folder of local runs.
            content: Content of its file.
            base: Folder on this machine where the relative paths of its job start.
        """
        folder = _make_folder(home, str(content["sweep"]))
        write_atomically(folder / SWEEP_FILE, dump_json({**content, "base": str(base)}, indent=1) + "\n")
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file of a sweep.

        Raises:
            UserError: it cannot be read, or another program wrote it.
        """
        path = folder / SWEEP_FILE
        try:
            content = json.loads(path.read_bytes())
            document = Document(f"the sweep {folder.name}", {**content["spec"], "job": content["job"]})
            return cls(
                content["sweep"],
                folder,
                content["backend"],
                datetime.fromisoformat(content["created"]),
                content["identity"],
                content["digest"],
                float(content["lowest_usd"]),
                int(content["planned_trials"]),
                check_sweep(document, Path(content["base"])),
            )
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}", "see: cloudtrain sweep status") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: this is not the file of a sweep: {error}", "start the sweep again") from None

    def to_document(self) -> dict[str, Any]:
        """Return the content of its file."""
        spec = self.sweep.identity_document()
        return {
            "sweep": self.id,
            "backend": self.backend,
            "created": self.created.isoformat(),
            "identity": self.identity,
            "digest": self.digest,
            "lowest_usd": self.lowest_usd,
            "planned_trials": self.planned_trials,
            "base": str(self.sweep.job.base),
            "job": spec.pop("job"),
            "spec": spec,
        }

    @property
    def log(self) -> Path:
        """The controller's log."""
        return self.folder / CONTROLLER_LOG

    @property
    def is_controlled(self) -> bool:
        """Whether a controller of this sweep runs on this machine."""
        with (self.folder / _LOCK_FILE).open("a+") as file:
            return not _try_lock(file)

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the lock of the controller, if no other process does; the value says whether this one does."""
        with (self.folder / _LOCK_FILE).open("a+") as file:
            # Who asks for `is_controlled` holds the lock for a moment.
            for _ in range(_LOCK_ATTEMPTS):
                if _try_lock(file):
                    yield True
                    return
                time.sleep(_LOCK_PAUSE_SECONDS)
            yield False

    def request_stop(self) -> None:
        """Ask the controller to stop the sweep."""
        (self.folder / _STOP_FILE).touch()

    def clear_stop(self) -> None:
        """Withdraw the request to stop."""
        (self.folder / _STOP_FILE).unlink(missing_ok=True)

    @property
    def is_stop_requested(self) -> bool:
        """Whether the sweep is to stop."""
        return (self.folder / _STOP_FILE).exists()


def _make_folder(home: Path, name: str) -> Path:
    folder = home / SWEEPS_FOLDER / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created: {error.strerror}", "set CLOUDTRAIN_HOME") from None
    ignore = home / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")  # keeps sweeps out of Git
    return folder


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def identity_of(sweep: LoadedSweep, backend: str) -> str:
    """Return the digest of a sweep's content and place."""
    content: Mapping[str, Any] = {**sweep.identity_document(), "backend": backend}
    return hashlib.sha256(dump_json(content, sort_keys=True, default=str).encode()).hexdigest()


def backend_option(backend: str) -> str:
    """Return the option of commands for a backend, after a space; an empty text for SageMaker, which needs none."""
    return "" if backend == SAGEMAKER else f" --{backend}"


def stored_ids(home: Path) -> list[str]:
    """Return the ids of the sweeps in a folder of local runs, the newest first."""
    try:
        with os.scandir(home / SWEEPS_FOLDER) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return []
    found = [name for name in names if is_run_id(name) and (home / SWEEPS_FOLDER / name / SWEEP_FILE).is_file()]
    return sorted(found, key=submit_order, reverse=True)


def find_stored(homes: Iterable[Path], name: str) -> StoredSweep:
    """Return the sweep of a name: its id, the beginning or end of one, a sweep's name, or `latest`.

    Raises:
        RunNotFoundError: there is none, or several have this name.
    """
    known = {found: home for home in reversed(list(homes)) for found in stored_ids(home)}
    newest = sorted(known, key=submit_order, reverse=True)
    chosen = [each for each in newest if each == name or each.rsplit("-", 3)[0] == name][:1]
    chosen = chosen or (newest[:1] if name == "latest" else [])
    if not chosen and _NAME.fullmatch(name):
        chosen = [each for each in newest if each.startswith(name) or each.endswith(name)]
    if len(chosen) > 1:
        raise RunNotFoundError(f"{name!r} can mean {', '.join(chosen[:5])}", "give more of the id")
    if not chosen:
        hint = did_you_mean(name, newest, "start one: cloudtrain sweep run sweep.yaml")
        raise RunNotFoundError(f"there is no sweep {name!r} on this machine", hint)
    return StoredSweep.read(known[chosen[0]] / SWEEPS_FOLDER / chosen[0])
