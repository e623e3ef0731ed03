"""Contents of a bundle: the files that it includes, those that it excludes and why, and its digest."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

from cloudtrain.bundle.code_folder import (
    BUNDLES_FOLDER,
    RUNTIME,
    ExcludedPath,
    SourceFile,
    walk_code_folder,
    walk_includes,
)
from cloudtrain.bundle.digests import Digest, Digests
from cloudtrain.bundle.rejections import (
    MAX_LISTED,
    OWN_IGNORE,
    combined_error,
    finding_order,
    printable_name,
    secrets_error,
    secrets_hint,
    unreadable_error,
)
from cloudtrain.errors import BundleError
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.secrets.scanner import SecretMatch
from cloudtrain.support.file_pointers import (
    SUBMODULE,
    PointerKind,
    Pointers,
)
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_size
from cloudtrain_runtime import contract
from cloudtrain_runtime.contract import INCLUDE_FOLDER, WORKER_SCRIPT

RUNTIME_FOLDER = Path(contract.__file__).parents[1]
RUNTIME_PACKAGE = RUNTIME_FOLDER.name
MAX_BYTES = 2 * 10**9
"""Largest size of a bundle's files together. Data belongs into a channel, not into the code."""

MOST_MODULES = 2000
"""Maximum number of modules that a plan lists, for `explain`."""

_NAMED_IN_SUMMARY = 3
_LISTED_IN_SUMMARY = 20

WORKER_SOURCE = '''"""Start one rank. Written by cloudtrain."""

from cloudtrain_runtime.worker import main

if __name__ == "__main__":
    main()
'''
ProgressCallback = Callable[[int, int], None]
"""Callback `(bytes_done, bytes_total)`."""


class Entry(NamedTuple):
    """One file of a bundle.

    Attributes:
        name: Path in the archive.
        source: Path of the file on this machine; None if cloudtrain writes it.
        size: Size in bytes.
        executable: Whether its owner may execute it.
        sha256: Digest of its content.
        why: Why the bundle includes it: `CODE`, `NAMED` or `RUNTIME`.
    """

    name: str
    source: str | None
    size: int
    executable: bool
    sha256: str
    why: str


@dataclass(frozen=True)
class Contents:
    """What a bundle includes and excludes.

    Attributes:
        entries: Included files in archive order.
        left_out: Excluded files and folders, by name.
        refused: Files that look like credentials and that `.cloudtrainignore` does not name. `collect` raises if there
            are any.
        info: Digest and size.
        pointers: Files and submodules that are there by name only.
        folder: Folder with a copy of the bundle's files, which is read in place of the job's folders; None without one.
    """

    entries: tuple[Entry, ...]
    left_out: tuple[ExcludedPath, ...]
    refused: tuple[SecretMatch, ...]
    info: CodeInfo
    pointers: Pointers = field(default_factory=lambda: Pointers({}))
    folder: Path | None = None

    def __repr__(self) -> str:
        return _summarize(self).to_text()

    def _repr_html_(self) -> str:
        return _summarize(self).to_html()

    @property
    def hint(self) -> str:
        """What to write for the first refused file; empty if no file is refused."""
        if not self.refused:
            return ""
        return secrets_hint(self.refused[0].name)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `files --json` prints."""
        return {
            "files": [
                {"name": entry.name, "bytes": entry.size, "why": entry.why}
                for entry in self.entries
            ],
            "left_out": [
                {"name": path.name, "reason": path.reason, "bytes": path.bytes}
                for path in self.left_out
            ],
            "refused": [
                {"name": printable_name(name), "line": line, "reason": kind}
                for name, line, kind in self.refused
            ],
            "bytes": self.info.bytes,
            "count": self.info.files,
            "digest": self.info.digest,
        }

    def digest_without(self, file: Path | None) -> str:
        """Return the digest of the bundle's files except one, which may be no part of the bundle."""
        if file is None:
            return self.info.digest
        path = os.path.realpath(file)
        ending = f"/{file.name}"
        others = (each for each in self.entries if not _is_file(each, path, ending))
        return _code_info(others).digest

    def exclusion_reason(self, name: str) -> str | None:
        """Return why a file or a folder above it is excluded; None if the file is included or does not exist.

        Args:
            name: Path below the code folder, with `/` between its parts.
        """
        name = os.path.normpath(name)
        if any(entry.name == name for entry in self.entries):
            return None
        parts = name.split("/")
        parents = {"/".join(parts[:count]) + "/" for count in range(1, len(parts))}
        return next(
            (path.reason for path in self.left_out if path.name == name or path.name in parents),
            None,
        )

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """The paths of the code's modules and packages by name, those nearest to the root first."""
        found: dict[str, str] = {}
        sources = [
            PurePosixPath(entry.name)
            for entry in self.entries
            if entry.why != RUNTIME and entry.name.endswith(".py")
        ]
        for path in sorted(sources, key=lambda path: (len(path.parts), path)):
            for part in (*reversed(path.parents[:-1]), path):
                if part.stem != "__init__":
                    found.setdefault(part.stem, str(part))
        return dict(itertools.islice(found.items(), MOST_MODULES))


def collect(
    directory: Path,
    includes: Mapping[str, Path] = MappingProxyType({}),
    *,
    home: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Contents:
    """List and digest the files of a code folder, and of folders outside of it, that its bundle includes.

    Args:
        directory: The code folder.
        includes: Folders of `code.include`, by the name under which they are imported.
        home: Folder of local runs, which is always excluded. Digests are cached below it.
        progress: Called after each file that has been read.

    Raises:
        BundleError: Files cannot be part of a bundle, or look like credentials and are not named in
            `.cloudtrainignore`. The message lists all of them.
    """
    contents = list_contents(directory, includes, home=home, progress=progress)
    if contents.refused:
        raise secrets_error(contents.refused)
    return contents


def list_contents(
    directory: Path,
    includes: Mapping[str, Path] = MappingProxyType({}),
    *,
    home: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Contents:
    """Do the same as `collect`, but return files that look like credentials in `refused`.

    Raises:
        BundleError: Files cannot be part of a bundle. The message also lists the files that look like credentials.
    """
    found = walk_code_folder(directory, home)
    problems = [*found.problems, *_reserved_names(found.files)]
    refused = found.refused
    submodules = [printable_name(name) for name in found.submodules]
    for included in walk_includes(includes, home):
        found.files += included.files
        found.excluded += included.excluded
        problems += included.problems
        refused += included.refused
        submodules += included.submodules
    files = sorted([*found.files, *_runtime_files()], key=lambda file: file.name)
    total = sum(file.status.st_size for file in files)
    if total > MAX_BYTES:
        # Reading the files would take long, and the bundle is rejected anyway.
        raise combined_error([*problems, _too_large(files, total)], refused)
    digests = Digests(directory, home / BUNDLES_FOLDER if home is not None else None)
    worker = WORKER_SOURCE.encode()
    worker_digest = hashlib.sha256(worker).hexdigest()
    entries = [
        Entry(
            name=WORKER_SCRIPT,
            source=None,
            size=len(worker),
            executable=False,
            sha256=worker_digest,
            why=RUNTIME,
        )
    ]
    done = 0
    pointers: dict[PointerKind, list[str]] = {}
    for file in files:
        digest = _read(digests, file)
        if isinstance(digest, BundleError):
            problems.append(digest)
            continue
        if not file.is_named:
            refused += [
                SecretMatch(file.name, line or None, kind) for line, kind in digest.credentials
            ]
        if digest.pointer is not None:
            pointers.setdefault(digest.pointer, []).append(printable_name(file.name))
        executable = bool(file.status.st_mode & stat.S_IXUSR) and file.why != RUNTIME
        entries.append(
            Entry(
                name=file.name,
                source=file.path,
                size=digest.size,
                executable=executable,
                sha256=digest.sha256,
                why=file.why,
            )
        )
        done += digest.size
        if progress is not None:
            progress(done, total)
    digests.save()
    if problems:
        raise combined_error(problems, refused)
    entries.sort()
    if submodules:
        pointers[SUBMODULE] = submodules
    return Contents(
        entries=tuple(entries),
        left_out=tuple(sorted(found.excluded, key=lambda path: path.name)),
        refused=tuple(sorted(refused, key=finding_order)),
        info=_code_info(entries),
        pointers=Pointers(pointers),
    )


def _reserved_names(files: Iterable[SourceFile]) -> Iterator[BundleError]:
    names = {file.name for file in files}
    if "setup.py" in names:
        yield BundleError(
            "the code folder has a setup.py at its root, which AWS's training toolkit would try to install",
            f"name it in {OWN_IGNORE}, or point code.directory at the folder of the sources",
        )
    if WORKER_SCRIPT in names or any(name.startswith(f"{RUNTIME_PACKAGE}/") for name in names):
        yield BundleError(
            f"the code folder has a {WORKER_SCRIPT} or {RUNTIME_PACKAGE}/ of its own", "rename it"
        )
    if any(name.startswith(f"{INCLUDE_FOLDER}/") for name in names):
        yield BundleError(
            f"the code folder has a folder {INCLUDE_FOLDER}, which bundles use themselves",
            "rename it",
        )


def _runtime_files() -> Iterator[SourceFile]:
    for folder, _, names in os.walk(RUNTIME_FOLDER):
        inner = os.path.relpath(folder, RUNTIME_FOLDER.parent)
        for name in names:
            if name.endswith(".py"):
                path = f"{folder}/{name}"
                # No Path: there are two hundred files.
                status = os.stat(path)  # noqa: PTH116
                yield SourceFile(f"{inner}/{name}", path, status, RUNTIME, is_named=False)


def _too_large(files: Iterable[SourceFile], total: int) -> BundleError:
    own = [file for file in files if file.why != RUNTIME]
    largest = sorted(own, key=lambda file: -file.status.st_size)[:MAX_LISTED]
    lines = "\n  ".join(
        f"{file.status.st_size / 1e6:10.1f} MB  {printable_name(file.name)}" for file in largest
    )
    return BundleError(
        f"the code folder has {total / 1e6:.0f} MB; a bundle may have at most {MAX_BYTES / 1e6:.0f} MB",
        f"name files to exclude in {OWN_IGNORE}; the largest files:\n  {lines}",
    )


def _read(digests: Digests, file: SourceFile) -> Digest | BundleError:
    try:
        return digests.of(
            file.name, file.path, file.status, target=file.target, is_own=file.why == RUNTIME
        )
    except FileNotFoundError:
        return BundleError(
            f"{printable_name(file.name)} vanished while the code was read", "try again"
        )
    except OSError as error:
        return unreadable_error(file.name, error)


def _is_file(entry: Entry, path: str, ending: str) -> bool:
    if entry.source is None or not entry.source.endswith(ending):
        # Most files: the links in their paths are not resolved.
        return False
    return os.path.realpath(entry.source) == path


def _code_info(entries: Iterable[Entry]) -> CodeInfo:
    files = tuple(entries)
    digest = hashlib.sha256()
    for entry in files:
        digest.update(f"{entry.name}\0{int(entry.executable)}\0{entry.sha256}\n".encode())
    return CodeInfo(digest.hexdigest(), sum(entry.size for entry in files), len(files))


def _summarize(contents: Contents) -> Summary:
    """Return a summary of a bundle; the HTML table lists its files, too."""
    own = [entry for entry in contents.entries if entry.why != RUNTIME]
    runtime = len(contents.entries) - len(own)
    rows: list[Row] = [
        ("files", _name_first([entry.name for entry in own], "file")),
        ("runtime", f"{count(runtime, 'file')} of cloudtrain_runtime"),
        ("sha256", contents.info.digest),
    ]
    if contents.left_out:
        rows.append(("excluded", _name_first([path.name for path in contents.left_out], "path")))
    if contents.refused:
        rejected = _name_first([match.name for match in contents.refused], "file")
        rows.append(("rejected", f"{rejected}: look like secrets"))
    details = [
        ("", f"{entry.name}, {format_size(entry.size)}") for entry in own[:_LISTED_IN_SUMMARY]
    ]
    if len(own) > _LISTED_IN_SUMMARY:
        more = count(len(own) - _LISTED_IN_SUMMARY, "more file")
        details.append(("", f"and {more}, in .entries"))
    details += [
        ("excluded", f"{path.name}: {path.reason}")
        for path in contents.left_out[:_LISTED_IN_SUMMARY]
    ]
    return Summary(
        f"Contents of {count(contents.info.files, 'file')}, {format_size(contents.info.bytes)}",
        rows,
        details,
    )


def _name_first(names: list[str], noun: str) -> str:
    if not names:
        return "none"
    more = ", ..." if len(names) > _NAMED_IN_SUMMARY else ""
    return f"{count(len(names), noun)}: {', '.join(names[:_NAMED_IN_SUMMARY])}{more}"
