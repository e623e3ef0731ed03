"""The code of a controller's start, kept in its folder: all its runs have it, whatever is edited meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.bundle import BUNDLES_FOLDER, Contents, Entry, ExcludedPath, collect
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.bundle.git_source import read_source
from cloudtrain.bundle.unpacking import UnpackError, unpack
from cloudtrain.controllers.folder import ControllerFolder
from cloudtrain.errors import CloudtrainError, UserError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import CodeInfo, GitSource
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_FOLDER = "code"
_CONTENTS_FILE = "code.json"


def read_code(job: JobSpec, home: Path) -> Contents:
    """Return the code of a job as it is now, with the commit that it comes from.

    Raises:
        BundleError: The code folder cannot be packed.
    """
    found = collect(job.code_directory, job.includes, home=home)
    source = read_source(job.code_directory)
    return dataclasses.replace(found, info=dataclasses.replace(found.info, source=source))


@dataclass(frozen=True)
class KeptCode:
    """The code of a controller's start.

    Attributes:
        place: The controller's folder.
        job: The job whose code it is.
        digest: Digest of the code.
    """

    place: ControllerFolder
    job: JobSpec
    digest: str

    def read(self) -> Contents:
        """Return the code with which the controller began.

        Raises:
            UserError: This machine has no copy of it, and the code folder differs from it.
            BundleError: This machine has no copy of it, and the code folder cannot be packed.
        """
        kept = self._read_copy()
        if kept is not None:
            return kept
        code = read_code(self.job, self.place.home)
        if self.place.stop_file.exists():
            # Nothing is started any more.
            return code
        if code.info.digest != self.digest:
            message = (
                f"{self.job.code_directory} differs from the code with which {self.place.id} began, of which this "
                "machine has no copy"
            )
            hint = f"restore it, continue on the machine that has started the {self.place.noun}, or start another: --new"
            raise UserError(message, hint)
        # The code folder itself has the same code.
        with contextlib.suppress(OSError, UnpackError):
            return self.keep(code)
        return code

    def keep(self, code: Contents) -> Contents:
        """Copy the code of the start into the controller's folder, and return the copy.

        Raises:
            BundleError: A file has changed since it was read.
            OSError: The copy cannot be written.
        """
        bundle = write_bundle(code, self.place.home / BUNDLES_FOLDER)
        folder = self.place.folder / _FOLDER
        # A process that was killed may have left one.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        unpack(bundle.path, folder)
        entries = tuple(
            each if each.source is None else each._replace(source=str(folder / each.name))
            for each in code.entries
        )
        kept = dataclasses.replace(code, entries=entries, folder=folder)
        write_atomically(self.place.folder / _CONTENTS_FILE, dump_json(_to_document(kept)) + "\n")
        return kept

    @property
    def has_changed(self) -> bool:
        """Whether the code folder certainly differs from the code of the start."""
        job = self.job
        try:
            found = collect(job.code_directory, job.includes, home=self.place.home)
        except (CloudtrainError, OSError):
            return False
        return found.info.digest != self.digest

    def _read_copy(self) -> Contents | None:
        """Return the copy in the folder; None if there is none, or it is not complete."""
        folder = self.place.folder / _FOLDER
        try:
            content = load_json((self.place.folder / _CONTENTS_FILE).read_bytes())
            entries = [
                each._replace(source=str(folder / each.name))
                for each in (Entry(*fields) for fields in content["entries"])
            ]
            entries += [Entry(*fields) for fields in content["written"]]
            source = None if content["source"] is None else GitSource(**content["source"])
            info = CodeInfo(content["digest"], content["bytes"], len(entries), source=source)
            left_out = tuple(ExcludedPath(*fields) for fields in content["left_out"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if info.digest != self.digest or not all(
            Path(each.source or folder).exists() for each in entries
        ):
            return None
        return Contents(tuple(sorted(entries)), left_out, (), info, folder=folder)


def _to_document(code: Contents) -> dict[str, Any]:
    source = code.info.source
    return {
        "digest": code.info.digest,
        "bytes": code.info.bytes,
        "source": None if source is None else dataclasses.asdict(source),
        "entries": [[*each._replace(source=None)] for each in code.entries if each.source],
        "written": [[*each] for each in code.entries if not each.source],
        "left_out": [[*each] for each in code.left_out],
    }
