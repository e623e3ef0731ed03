"""The folder of a sweep and its file `sweep.json`; how sweeps are found by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from cloudtrain.controllers.folder import ControllerFolder, known_folders, make_folder
from cloudtrain.controllers.kept_code import KeptCode
from cloudtrain.errors import RunNotFoundError, UserError, did_you_mean
from cloudtrain.features.sweeps.loader import LoadedSweep, check_sweep
from cloudtrain.job.document import Document
from cloudtrain.runs.known_runs import LATEST, matching_runs
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.run_id import make_run_id
from cloudtrain_runtime.contract.format_version import FIELD, NewerFormatError, check_not_newer
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

SWEEPS_FOLDER = "sweeps"
SWEEP_FILE = "sweep.json"
_DATABASE = "sweep.db"
SWEEP_VERSION = 1
"""Version of the file and of the records of trials in the database."""
_FIELDS: dict[str, Callable[[Any], Any]] = {
    "backend": str,
    "identity": str,
    "digest": str,
    "lowest_usd": float,
    "planned_trials": int,
}
"""Fields of `StoredSweep` that its file has under the same names, and their types."""


@dataclass(frozen=True)
class StoredSweep(ControllerFolder):
    """A sweep as its folder has it.

    Attributes:
        backend: Where its trials run.
        created: When it was started.
        identity: Equal for two sweeps of the same file and job in the same place.
        digest: Digest of the code.
        lowest_usd: Lowest reservation of a trial that was planned; 0 where trials are free.
        planned_trials: Number of trials.
        sweep: The sweep.
    """

    noun = "sweep"

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
        identity = identity_of(sweep, backend)
        now = datetime.now(UTC)
        name = make_run_id(sweep.name, now, identity[:6])
        stored = cls(
            name, make_folder(home, SWEEPS_FOLDER, name), backend, now, identity, *plan, sweep
        )
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
        folder = make_folder(home, SWEEPS_FOLDER, str(content["sweep"]))
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
            check_not_newer(str(path), content, SWEEP_VERSION)
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
        except NewerFormatError as error:
            raise UserError(str(error)) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: this is not the file of a sweep: {error}", "start the sweep again"
            ) from None

    def to_document(self) -> dict[str, Any]:
        """Return the content of its file."""
        spec = self.sweep.identity_document()
        return {
            FIELD: SWEEP_VERSION,
            "sweep": self.id,
            "created": self.created.isoformat(),
            **{name: getattr(self, name) for name in _FIELDS},
            "base": str(self.sweep.job.base),
            "job": spec.pop("job"),
            "spec": spec,
        }

    @property
    def database(self) -> Path:
        """The file of its trials."""
        return self.folder / _DATABASE

    @property
    def code(self) -> KeptCode:
        """The code of its start."""
        return KeptCode(self, self.sweep.job, self.digest)


def identity_of(sweep: LoadedSweep, backend: str) -> str:
    """Return the digest of a sweep's content and place."""
    content: Mapping[str, Any] = {**sweep.identity_document(), "backend": backend}
    return hashlib.sha256(dump_json(content, sort_keys=True, default=str).encode()).hexdigest()


def known_sweeps(home: Path | None = None) -> dict[str, Path]:
    """Return the folders of this machine's sweeps, or of one folder of local runs, by id, the newest first."""
    return known_folders(SWEEPS_FOLDER, SWEEP_FILE, home)


def find_stored(name: str, home: Path | None = None) -> StoredSweep:
    """Return the sweep of a name: its id, the beginning or end of one, a sweep's name, or `latest`.

    Args:
        name: The name.
        home: The folder of local runs that has it; by default one of those of this machine.

    Raises:
        RunNotFoundError: there is none, or several have this name.
    """
    known = known_sweeps(home)
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
