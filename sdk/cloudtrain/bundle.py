"""`Bundle`: the deterministic, content-addressed archive that travels.

It holds the user's code folder, the runtime package and the root script that starts one rank. Its digest is over
names, modes and contents, so the same code has the same digest on every machine and day, and is uploaded once.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from cloudtrain.errors import BundleError
from cloudtrain.plan import CodeInfo
from cloudtrain_runtime.contract import BUNDLE_FILE, WORKER_SCRIPT

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".cloudtrainignore")
RUNTIME_PACKAGE = "cloudtrain_runtime"
MAX_BYTES = 2 * 10**9
"""Largest bundle before compression. Data belongs into a channel, not into the code."""

_ALWAYS_LEFT_OUT = {
    ".git": "version control",
    ".hg": "version control",
    ".svn": "version control",
    ".cloudtrain": "runs of cloudtrain",
    ".venv": "virtual environment",
    "venv": "virtual environment",
    "node_modules": "packages",
    "__pycache__": "cache",
    ".mypy_cache": "cache",
    ".ruff_cache": "cache",
    ".pytest_cache": "cache",
    ".ipynb_checkpoints": "cache",
    ".DS_Store": "of the desktop",
}
_SECRETS = (".env", ".netrc", "credentials", ".aws", ".ssh", "id_rsa", "id_ed25519")
_SECRET_SUFFIXES = (".pem", ".key", ".p12")
_WORKER = '''"""Start one rank. Written by cloudtrain."""

from cloudtrain_runtime.worker import main

if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Entry:
    """One file that travels: its name in the archive, where it lies (None: written by cloudtrain), and its size."""

    name: str
    source: Path | None
    size: int
    executable: bool


@dataclass(frozen=True)
class Contents:
    """What travels and what does not.

    Attributes:
        entries: Files in archive order.
        left_out: (name, reason) of what stays behind.
    """

    entries: tuple[Entry, ...]
    left_out: tuple[tuple[str, str], ...]
    info: CodeInfo


@dataclass(frozen=True)
class Bundle:
    """A written archive."""

    path: Path
    info: CodeInfo


def collect(directory: Path, *, home: Path | None = None) -> Contents:
    """List and digest what travels from a code folder.

    Args:
        directory: The code folder.
        home: Folder of local runs, which stays behind wherever it is.

    Raises:
        BundleError: something in the folder cannot travel.
    """
    left_out: list[tuple[str, str]] = []
    entries = list(_walk(directory, PurePosixPath(), _home_rule(directory, home), left_out))
    _check(entries)
    entries += list(_runtime_entries())
    entries.append(Entry(WORKER_SCRIPT, None, len(_WORKER), executable=False))
    entries.sort(key=lambda entry: entry.name)
    total = sum(entry.size for entry in entries)
    if total > MAX_BYTES:
        largest = sorted(entries, key=lambda entry: -entry.size)[:10]
        lines = "\n  ".join(f"{entry.size / 1e6:10.1f} MB  {entry.name}" for entry in largest)
        raise BundleError(
            f"the code folder has {total / 1e6:.0f} MB; at most {MAX_BYTES / 1e6:.0f} MB travel",
            f"name what should stay in .cloudtrainignore; the largest files:\n  {lines}",
        )
    return Contents(tuple(entries), tuple(left_out), CodeInfo(_digest(entries), total, len(entries)))


def write_bundle(contents: Contents, folder: Path) -> Bundle:
    """Write the archive to `<folder>/<digest>/sourcedir.tar.gz`, unless it is there already.

    Equal contents give equal bytes: names sorted, times and owners zero, modes 644 or 755.
    """
    target = folder / contents.info.digest / BUNDLE_FILE
    if target.is_file():
        return Bundle(target, contents.info)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".writing-", delete=False) as partial:
        try:
            with (
                gzip.GzipFile(filename="", mode="wb", fileobj=partial, compresslevel=6, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                for entry in contents.entries:
                    _add(archive, entry)
            partial.flush()
            Path(partial.name).replace(target)
        except BaseException:
            Path(partial.name).unlink(missing_ok=True)
            raise
    return Bundle(target, contents.info)


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    header = tarfile.TarInfo(entry.name)
    header.mode = 0o755 if entry.executable else 0o644
    if entry.source is None:
        header.size = entry.size
        archive.addfile(header, io.BytesIO(_WORKER.encode()))
        return
    with entry.source.open("rb") as file:
        header.size = os.fstat(file.fileno()).st_size
        if header.size != entry.size:
            raise BundleError(f"{entry.name} changed while it was packed", "submit again when nothing writes to it")
        archive.addfile(header, file)


def _digest(entries: list[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        if entry.source is None:
            content = hashlib.sha256(_WORKER.encode()).hexdigest()
        else:
            with entry.source.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{entry.name}\0{int(entry.executable)}\0{content}\n".encode())
    return digest.hexdigest()


def _runtime_entries() -> Iterator[Entry]:
    """Yield the files of the installed runtime package, which travels with every bundle."""
    found = importlib.util.find_spec(RUNTIME_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise BundleError(f"{RUNTIME_PACKAGE} is not installed", "install cloudtrain again")
    folder = Path(next(iter(found.submodule_search_locations)))
    for path in sorted(folder.rglob("*.py")):
        name = f"{RUNTIME_PACKAGE}/{path.relative_to(folder).as_posix()}"
        yield Entry(name, path, path.stat().st_size, executable=False)


_Rules = list[tuple[PurePosixPath, "GitIgnoreSpec"]]


def _walk(root: Path, below: PurePosixPath, rules: _Rules, left_out: list[tuple[str, str]]) -> Iterator[Entry]:
    """Yield the files below a folder that travel. `rules` are the ignore files of this folder's parents."""
    rules = [*rules, *_read_rules(root, below)]
    with os.scandir(root / below) as found:
        children = sorted(found, key=lambda child: child.name)
    for child in children:
        name = below / child.name
        # A link out of the tree would not exist in the container: what it points to travels, if it is inside.
        is_folder = child.is_dir()
        reason = _left_out_because(name, rules, is_folder=is_folder)
        if reason is not None:
            left_out.append((f"{name}/" if is_folder else str(name), reason))
            continue
        if child.is_symlink():
            _check_link(root, name)
        if is_folder:
            if child.is_symlink():
                raise BundleError(f"{name} is a link to a folder", "copy it, or name it in .cloudtrainignore")
            yield from _walk(root, name, rules, left_out)
            continue
        status = child.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{name} is neither file nor folder", "name it in .cloudtrainignore")
        yield Entry(str(name), Path(child.path), status.st_size, executable=bool(status.st_mode & stat.S_IXUSR))


def _check_link(root: Path, name: PurePosixPath) -> None:
    target = (root / name).resolve()
    if not target.exists() or not target.is_relative_to(root.resolve()):
        raise BundleError(
            f"{name} is a link to {target}, outside of the code folder", "copy it, or name it in .cloudtrainignore"
        )


def _home_rule(root: Path, home: Path | None) -> _Rules:
    if home is None or not home.is_relative_to(root):
        return []
    from pathspec import GitIgnoreSpec

    return [(PurePosixPath(), GitIgnoreSpec.from_lines([f"/{home.relative_to(root).as_posix()}/"]))]


def _read_rules(root: Path, below: PurePosixPath) -> _Rules:
    rules: _Rules = []
    for name in IGNORE_FILES:
        path = root / below / name
        if path.is_file():
            from pathspec import GitIgnoreSpec

            rules.append((below, GitIgnoreSpec.from_lines(path.read_text(encoding="utf-8").splitlines())))
    return rules


def _left_out_because(name: PurePosixPath, rules: _Rules, *, is_folder: bool) -> str | None:
    """Return why a file or folder stays behind, or None. Later and deeper rules win, as in git."""
    if name.name in _ALWAYS_LEFT_OUT:
        return _ALWAYS_LEFT_OUT[name.name]
    if name.suffix in (".pyc", ".pyo"):
        return "cache"
    if is_folder and name.name.endswith(".egg-info"):
        return "build output"
    if name.name in _SECRETS or name.suffix in _SECRET_SUFFIXES:
        return "looks like a secret"
    verdict: bool | None = None
    for folder, spec in rules:
        relative = str(name.relative_to(folder)) + ("/" if is_folder else "")
        result = spec.check_file(relative).include
        if result is not None:
            verdict = result
    return "ignored" if verdict else None


def _check(entries: list[Entry]) -> None:
    names = {entry.name for entry in entries}
    if "setup.py" in names:
        raise BundleError(
            "setup.py lies at the root of the code folder, where AWS's training toolkit would try to install it",
            "name it in .cloudtrainignore, or point code.directory at the folder of the sources",
        )
    taken = WORKER_SCRIPT in names or any(name.startswith(f"{RUNTIME_PACKAGE}/") for name in names)
    if taken:
        raise BundleError(f"the code folder has a {WORKER_SCRIPT} or {RUNTIME_PACKAGE}/ of its own", "rename it")
