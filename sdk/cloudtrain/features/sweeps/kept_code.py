"""The code of a sweep's start, kept in the sweep's folder: all its trials run with it, whatever is edited meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

from cloudtrain.bundle import BUNDLES_FOLDER, Contents, Entry, ExcludedPath, collect
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.bundle.git_source import read_source
from cloudtrain.bundle.unpacking import UnpackError, unpack
from cloudtrain.errors import CloudtrainError, UserError
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
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


def keep_code(stored: StoredSweep, code: Contents) -> Contents:
    """Copy the code of a sweep's start into the sweep's folder, and return the copy.

    Raises:
        BundleError: A file has changed since it was read.
        OSError: The copy cannot be written.
    """
    bundle = write_bundle(code, stored.home / BUNDLES_FOLDER)
    folder = stored.folder / _FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    folder.mkdir()
    unpack(bundle.path, folder)
    kept = dataclasses.replace(
        code,
        entries=tuple(
            each if each.source is None else each._replace(source=str(folder / each.name))
            for each in code.entries
        ),
        folder=folder,
    )
    write_atomically(stored.folder / _CONTENTS_FILE, dump_json(_to_document(kept)) + "\n")
    return kept


def code_of(stored: StoredSweep) -> Contents:
    """Return the code with which a sweep began.

    Raises:
        UserError: This machine has no copy of it, and the code folder differs from it.
        BundleError: This machine has no copy of it, and the code folder cannot be packed.
    """
    kept = _read_kept(stored)
    if kept is not None:
        return kept
    code = read_code(stored.sweep.job, stored.home)
    if stored.stop_file.exists():
        return code  # nothing is started any more
    if code.info.digest != stored.digest:
        message = (
            f"{stored.sweep.job.code_directory} differs from the code with which {stored.id} began, of which this "
            "machine has no copy"
        )
        hint = "restore it, continue on the machine that has started the sweep, or start another: --new"
        raise UserError(message, hint)
    with contextlib.suppress(OSError, UnpackError):  # the code folder itself has the same code
        return keep_code(stored, code)
    return code


def has_changed(stored: StoredSweep) -> bool:
    """Return whether the code folder certainly differs from the code of a sweep's start."""
    job = stored.sweep.job
    try:
        return collect(job.code_directory, job.includes, home=stored.home).info.digest != (
            stored.digest
        )
    except (CloudtrainError, OSError):
        return False


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


def _read_kept(stored: StoredSweep) -> Contents | None:
    """Return the copy in a sweep's folder; None if there is none, or it is not complete."""
    folder = stored.folder / _FOLDER
    try:
        content = load_json((stored.folder / _CONTENTS_FILE).read_bytes())
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
    if info.digest != stored.digest or not all(
        Path(each.source or folder).exists() for each in entries
    ):
        return None
    return Contents(tuple(sorted(entries)), left_out, (), info, folder=folder)
