"""The checkpoint files that a script writes itself: which host wrote them, and whether they hold all of the state.

Files are read as archives. Nothing in them is unpickled.
"""

from __future__ import annotations

import contextlib
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from cloudtrain_runtime.contract.machine_paths import place_on_machine

_SHARDED = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
"""Modules of tensors of which a rank has only a part: DTensor since torch 2.5 and before, ShardedTensor."""
_TENSORBOARD = "events.out.tfevents"
_LOGS = (".csv", ".log", ".out", ".txt")
_ARCHIVE_BEGIN = b"PK\x03\x04"
_UNFINISHED = ("tmp", "temp", "part", "new", "incomplete")
_MOST_PICKLE_BYTES = 50_000_000


@dataclass(frozen=True)
class SavedFile:
    """A file below a host's /opt/ml/checkpoints.

    Attributes:
        host: Its host.
        name: Its path below that folder.
        size: Bytes.
        modified: When it was last written, in seconds since the epoch.
        path: Where it is.
    """

    host: str
    name: str
    size: int
    modified: float
    path: Path


def saved_files(roots: list[Path], since: float = 0.0) -> list[SavedFile]:
    """Return the files that hosts have saved, those of `code.outputs` included, without logs.

    Args:
        roots: The folder of each host's /opt/ml.
        since: Only files written at this time or later.
    """
    found = []
    for root in roots:
        folder = place_on_machine(root, PurePath("checkpoints"))
        if not folder.is_dir():
            continue
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            # A script replaces its files, so one may be gone by now.
            with contextlib.suppress(OSError):
                stat = path.stat()
                if path.is_file() and not is_log(name) and stat.st_mtime >= since:
                    file = SavedFile(
                        host=root.parent.parent.name,
                        name=name,
                        size=stat.st_size,
                        modified=stat.st_mtime,
                        path=path,
                    )
                    found.append(file)
    return found


def is_log(name: str) -> bool:
    """Return whether a file is a log by its name: no training can continue from it."""
    return _TENSORBOARD in name or name.endswith(_LOGS)


def damaged_archive(files: list[SavedFile]) -> str:
    """Return the name of a file of torch.save whose archive is damaged; empty if there is none."""
    for file in files:
        try:
            if zipfile.is_zipfile(file.path):
                with zipfile.ZipFile(file.path) as archive:
                    if archive.testzip() is not None:
                        return file.name
            elif _is_cut_off(file):
                return file.name
        except (OSError, zipfile.BadZipFile):
            return file.name
    return ""


def _is_cut_off(file: SavedFile) -> bool:
    """Return whether a file begins as an archive and has no end, unless its name is that of a file before a rename."""
    if any(word in file.name.lower() for word in _UNFINISHED):
        return False
    with file.path.open("rb") as opened:
        return opened.read(len(_ARCHIVE_BEGIN)) == _ARCHIVE_BEGIN


def partial_state(files: list[SavedFile], ranks: int) -> str:
    """Return what is wrong if files hold parts of sharded tensors, and not of every rank; else an empty text."""
    sharded = [file for file in files if any(_names_shards(text) for text in _pickles(file.path))]
    if not sharded or len(sharded) >= ranks:
        return ""
    count = "1 file" if len(sharded) == 1 else f"{len(sharded)} files"
    return (
        f"{sharded[0].name} holds sharded tensors, of which each rank has a part, and {count} of them exist for "
        f"{ranks} ranks: gather the state before saving (get_model_state_dict with full_state_dict=True), or save on "
        "every rank"
    )


def _pickles(path: Path) -> Iterator[bytes]:
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(".pkl") and entry.file_size <= _MOST_PICKLE_BYTES:
                    yield archive.read(entry)
    except (OSError, zipfile.BadZipFile):
        return


def _names_shards(content: bytes) -> bool:
    """Return whether a pickle names a module of sharded tensors. It is read, not executed."""
    try:
        return any(
            isinstance(argument, str) and argument.startswith(_SHARDED)
            for _, argument, _ in pickletools.genops(content)
        )
    except ValueError:
        return False
