"""The folder of a sweep: its file `sweep.json`, the lock of its controller, and the request to stop."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

from cloudtrain.client.home import all_homes
from cloudtrain.errors import RunNotFoundError, UserError, did_you_mean
from cloudtrain.features.sweeps.loader import LoadedSweep, check_sweep
from cloudtrain.job.document import Document
from cloudtrain.runs.known_runs import LATEST, matching_runs
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.home_folder import make_home
from cloudtrain.support.run_id import is_run_id, make_run_id, written_order
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

SWEEPS_FOLDER = "sweeps"
SWEEP_FILE = "sweep.json"
CONTROLLER_LOG = "controller.log"
_POLL_SECONDS = 1.0
_AWS_POLL_SECONDS = 30.0
_LOCK_FILE = "lock"
_PAUSE_FILE = "pause"
_PAUSE_BYTES = 1024
_LOCK_ATTEMPTS = 20
_LOCK_PAUSE_SECONDS = 0.05
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "backend": str,
    "identity": str,
    "digest": str,
    "lowest_usd": float,
    "planned_trials": int,
}
"""Fields of `StoredSweep` that its file has under the same names, and their types."""


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
    def create(
        cls, home: Path, sweep: LoadedSweep, backend: str, plan: tuple[str, float, int]
    ) -> Self:
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
        write_atomically(
            folder / SWEEP_FILE, dump_json(stored.to_document(), indent=1, default=str) + "\n"
        )
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
        write_atomically(
            folder / SWEEP_FILE, dump_json({**content, "base": str(base)}, indent=1) + "\n"
        )
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file of a sweep.

        Raises:
            UserError: it cannot be read, or another program wrote it.
        """
        path = folder / SWEEP_FILE
        try:
            content = load_json(path.read_bytes())
            document = Document(
                f"the sweep {folder.name}", {**content["spec"], "job": content["job"]}
            )
            return cls(
                id=content["sweep"],
                folder=folder,
                created=datetime.fromisoformat(content["created"]),
                sweep=check_sweep(document, Path(content["base"]), has_files=False),
                **{name: kind(content[name]) for name, kind in _FIELDS.items()},
            )
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read: {error.strerror}", "see: cloudtrain sweep status"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: this is not the file of a sweep: {error}", "start the sweep again"
            ) from None

    def to_document(self) -> dict[str, Any]:
        """Return the content of its file."""
        spec = self.sweep.identity_document()
        return {
            "sweep": self.id,
            "created": self.created.isoformat(),
            **{name: getattr(self, name) for name in _FIELDS},
            "base": str(self.sweep.job.base),
            "job": spec.pop("job"),
            "spec": spec,
        }

    @property
    def home(self) -> Path:
        """The folder of local runs that it is in."""
        return self.folder.parent.parent

    @property
    def log(self) -> Path:
        """The controller's log."""
        return self.folder / CONTROLLER_LOG

    @property
    def is_controlled(self) -> bool:
        """Whether a controller of this sweep runs on this machine."""
        with (self.folder / _LOCK_FILE).open("a+") as file:
            return not _try_lock(file)

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks at the sweep: more where each of them calls AWS."""
        calls_aws = self.sweep.is_tuning and facts_of(self.backend).is_billed
        return _AWS_POLL_SECONDS if calls_aws else _POLL_SECONDS

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

    @property
    def stop_file(self) -> Path:
        """The file whose existence asks the controller to stop the sweep."""
        return self.folder / "stop"

    def write_pause(self, cause: str) -> None:
        """Record why no trial starts at present; an empty cause ends the pause.

        The file has its full size from the start, so that it can be written on a full disk.
        """
        content = cause.encode("utf-8", "replace")[:_PAUSE_BYTES].ljust(_PAUSE_BYTES)
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder / _PAUSE_FILE, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, content)
            finally:
                os.close(descriptor)

    def read_pause(self) -> str:
        """Return why no trial starts at present; empty without a pause."""
        try:
            content = (self.folder / _PAUSE_FILE).read_bytes()
        except OSError:
            return ""
        return content.decode("utf-8", "replace").strip()


def _make_folder(home: Path, name: str) -> Path:
    folder = home / SWEEPS_FOLDER / name
    try:
        make_home(home)
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created: {error.strerror}", "set CLOUDTRAIN_HOME"
        ) from None
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


def known_sweeps() -> dict[str, Path]:
    """Return the folders of this machine's sweeps by id, the newest first."""
    found: dict[str, Path] = {}
    for home in all_homes():
        for file in (home / SWEEPS_FOLDER).glob(f"*/{SWEEP_FILE}"):
            if is_run_id(file.parent.name):
                found.setdefault(file.parent.name, file.parent)
    names = sorted(found, key=lambda name: written_order(name, found[name]), reverse=True)
    return {name: found[name] for name in names}


def find_stored(name: str) -> StoredSweep:
    """Return the sweep of a name: its id, the beginning or end of one, a sweep's name, or `latest`.

    Raises:
        RunNotFoundError: there is none, or several have this name.
    """
    known = known_sweeps()
    newest = list(known)
    chosen, is_first_meant = ([name], True) if name in known else matching_runs(name, newest)
    if name == LATEST and not is_first_meant:
        chosen = newest[:1]
    if len(chosen) > 1 and not is_first_meant:
        raise RunNotFoundError(f"{name!r} can mean {', '.join(chosen[:5])}", "give more of the id")
    if not chosen:
        hint = did_you_mean(name, newest, "start one: cloudtrain sweep run sweep.yaml")
        raise RunNotFoundError(f"there is no sweep {name!r} on this machine", hint)
    return StoredSweep.read(known[chosen[0]])
