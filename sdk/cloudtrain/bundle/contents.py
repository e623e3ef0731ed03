"""What travels, what stays behind and why, and the digest of it all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.bundle.default_ignores import (
    cache_reason,
    environment_reason,
    result_folder_reason,
    result_reason,
)
from cloudtrain.bundle.digests import Digest, Digests
from cloudtrain.bundle.ignore import IgnoreFile, Rule, escape, read_ignore_file
from cloudtrain.errors import BundleError
from cloudtrain.planning.plan import CodeInfo
from cloudtrain.secrets import scanner
from cloudtrain.secrets.scanner import SecretMatch
from cloudtrain_runtime.contract import WORKER_SCRIPT

GIT_IGNORE, OWN_IGNORE = ".gitignore", ".cloudtrainignore"
RUNTIME_PACKAGE = "cloudtrain_runtime"
BUNDLES_FOLDER = "bundles"
MAX_BYTES = 2 * 10**9
"""Largest bundle. Data belongs into a channel, not into the code."""

CODE, NAMED, RUNTIME = "code", f"named in {OWN_IGNORE}", "runtime of cloudtrain"
"""Why a file travels."""

WORKER_SOURCE = '''"""Start one rank. Written by cloudtrain."""

from cloudtrain_runtime.worker import main

if __name__ == "__main__":
    main()
'''
ProgressCallback = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all."""

_MOST_SHOWN = 10
_HISTORY = ".git"
_HOME_FOLDER = ".cloudtrain"


class Entry(NamedTuple):
    """One file that travels.

    Attributes:
        name: In the archive.
        source: Where it lies; None if cloudtrain writes it.
        size: In bytes.
        executable: Whether its owner may execute it.
        sha256: Digest of its content.
        why: `CODE`, `NAMED` or `RUNTIME`.
    """

    name: str
    source: str | None
    size: int
    executable: bool
    sha256: str
    why: str


class ExcludedPath(NamedTuple):
    """Something that stays behind.

    Attributes:
        name: Path below the code folder; a folder's ends with a slash.
        reason: Why; an ignore rule with its file and line.
        bytes: Size of a file; None of a folder, into which nobody looked.
        by_default: Whether it may be missed: a result or data that no rule of the user's names.
    """

    name: str
    reason: str
    bytes: int | None
    by_default: bool = False


@dataclass(frozen=True)
class Contents:
    """What travels and what does not.

    Attributes:
        entries: Files in archive order.
        left_out: What stays behind, by name.
        refused: What looks like a credential and is not named. `collect` raises when there is any.
        info: Digest and size.
    """

    entries: tuple[Entry, ...]
    left_out: tuple[ExcludedPath, ...]
    refused: tuple[SecretMatch, ...]
    info: CodeInfo

    @property
    def way_out(self) -> str:
        """What to write for the first of what is refused; empty when nothing is."""
        return _way_out(self.refused[0].name) if self.refused else ""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `files --json` prints."""
        return {
            "files": [{"name": entry.name, "bytes": entry.size, "why": entry.why} for entry in self.entries],
            "left_out": [{"name": left.name, "reason": left.reason, "bytes": left.bytes} for left in self.left_out],
            "refused": [
                {"name": printable_name(name), "line": line, "reason": kind} for name, line, kind in self.refused
            ],
            "bytes": self.info.bytes,
            "count": self.info.files,
            "digest": self.info.digest,
        }

    def why_left_out(self, name: str) -> str | None:
        """Return why a file stays behind, itself or with a folder above it; None when it travels or does not exist.

        Args:
            name: Path below the code folder, with `/` between its parts.
        """
        name = os.path.normpath(name)
        if any(entry.name == name for entry in self.entries):
            return None
        parts = name.split("/")
        above = {"/".join(parts[:count]) + "/" for count in range(1, len(parts))}
        return next((left.reason for left in self.left_out if left.name == name or left.name in above), None)


def collect(directory: Path, *, home: Path | None = None, progress: ProgressCallback | None = None) -> Contents:
    """List and digest what travels from a code folder.

    Args:
        directory: The code folder.
        home: Folder of local runs, which stays behind wherever it is. Digests are remembered below it.
        progress: Told about each file that has been read.

    Raises:
        BundleError: something in the folder cannot travel, or looks like a credential and is not named; all of it is
            told at once.
    """
    contents = list_contents(directory, home=home, progress=progress)
    if contents.refused:
        raise BundleError(_refusal(contents.refused), contents.way_out)
    return contents


def list_contents(directory: Path, *, home: Path | None = None, progress: ProgressCallback | None = None) -> Contents:
    """Do what `collect` does, but return what looks like a credential where nothing else is wrong.

    Raises:
        BundleError: something in the folder cannot travel. What looks like a credential is told with it.
    """
    walk = _Walk(directory, home)
    walk.run()
    problems, refused = [*walk.problems, *_bad_names(walk.files)], walk.refused
    files = sorted([*walk.files, *_runtime_files()], key=lambda file: file.name)
    total = sum(file.status.st_size for file in files)
    if total > MAX_BYTES:  # too much to be read only in order to be refused
        raise _problems([*problems, _too_large(files, total)], refused)
    digests = Digests(directory, home / BUNDLES_FOLDER if home is not None else None)
    entries, done = [_worker()], 0
    for file in files:
        digest = _read(digests, file)
        if isinstance(digest, BundleError):
            problems.append(digest)
            continue
        if file.why != RUNTIME and not file.named:
            refused += [SecretMatch(file.name, line or None, kind) for line, kind in digest.credentials]
        executable = bool(file.status.st_mode & stat.S_IXUSR) and file.why != RUNTIME
        entries.append(Entry(file.name, file.path, digest.size, executable, digest.sha256, file.why))
        done += digest.size
        if progress is not None:
            progress(done, total)
    digests.save()
    if problems:
        raise _problems(problems, refused)
    refused.sort(key=_by_place)
    entries.sort()
    return Contents(
        tuple(entries), tuple(sorted(walk.left_out, key=lambda left: left.name)), tuple(refused), _info(entries)
    )


def _info(entries: Iterable[Entry]) -> CodeInfo:
    digest = hashlib.sha256()
    total = count = 0
    for entry in entries:
        digest.update(f"{entry.name}\0{int(entry.executable)}\0{entry.sha256}\n".encode())
        total += entry.size
        count += 1
    return CodeInfo(digest.hexdigest(), total, count)


def _worker() -> Entry:
    data = WORKER_SOURCE.encode()
    return Entry(WORKER_SCRIPT, None, len(data), False, hashlib.sha256(data).hexdigest(), RUNTIME)


class _File(NamedTuple):
    """A file that travels, before it is read.

    Attributes:
        named: Whether a rule in `.cloudtrainignore` names the file itself.
        target: Where it is a link: what it leads to, as a path below the code folder.
    """

    name: str
    path: str
    status: os.stat_result
    why: str
    named: bool
    target: str | None = None


def _read(digests: Digests, file: _File) -> Digest | BundleError:
    try:
        return digests.of(file.name, file.path, file.status, target=file.target)
    except FileNotFoundError:
        return BundleError(f"{printable_name(file.name)} vanished while the code was read", "try again")
    except OSError as error:
        return _unreadable(file.name, error)


def _runtime_files() -> Iterator[_File]:
    """Yield the files of the installed runtime package, which travels with every bundle."""
    found = importlib.util.find_spec(RUNTIME_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise BundleError(f"{RUNTIME_PACKAGE} is not installed", "install cloudtrain again")
    folder = Path(next(iter(found.submodule_search_locations)))
    for path in folder.rglob("*.py"):
        name = f"{RUNTIME_PACKAGE}/{path.relative_to(folder).as_posix()}"
        yield _File(name, str(path), path.stat(), RUNTIME, named=False)


# ---------------------------------------------------------------- what is refused


def _refusal(found: tuple[SecretMatch, ...]) -> str:
    files = len({finding.name for finding in found})
    lines = [f"  {printable_name(str(finding))}" for finding in found[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"  and {len(found) - _MOST_SHOWN} more places")
    many = "1 file looks like it holds" if files == 1 else f"{files} files look like they hold"
    return "\n".join([f"{many} secrets, which would travel with the code:", *lines])


def _way_out(name: str) -> str:
    pattern = escape(name)
    return (
        f"in {OWN_IGNORE} the line {pattern} leaves it behind, and !{pattern} lets it travel; "
        "a run gets secrets by its role, or by code.env.NAME: {secret: <name in AWS Secrets Manager>}"
    )


def _by_place(finding: SecretMatch) -> tuple[str, int]:
    return finding.name, finding.line or 0


def _problems(problems: list[BundleError], refused: list[SecretMatch]) -> BundleError:
    """Return one error for all; those with the same way out stand together, at most `_MOST_SHOWN` of each."""
    if len(problems) == 1 and not refused:
        return problems[0]
    by_hint: dict[str, list[str]] = {}
    for problem in problems:
        by_hint.setdefault(problem.hint, []).append(problem.message)
    many = "1 thing keeps" if len(problems) == 1 else f"{len(problems)} things keep"
    lines = [f"{many} the code folder from travelling:"]
    for hint, messages in by_hint.items():
        lines += [f"  {message}" for message in sorted(messages)[:_MOST_SHOWN]]
        if len(messages) > _MOST_SHOWN:
            lines.append(f"  and {len(messages) - _MOST_SHOWN} more such")
        lines.append(f"    {hint}".replace("\n", "\n  "))
    if not refused:
        return BundleError("\n".join(lines))
    found = tuple(sorted(refused, key=_by_place))
    return BundleError("\n".join([*lines, _refusal(found)]), _way_out(found[0].name))


def _bad_names(files: Iterable[_File]) -> Iterator[BundleError]:
    """Yield what is wrong with names that mean something in a container."""
    names = {file.name for file in files}
    if "setup.py" in names:
        yield BundleError(
            "setup.py lies at the root of the code folder, where AWS's training toolkit would try to install it",
            f"name it in {OWN_IGNORE}, or point code.directory at the folder of the sources",
        )
    if WORKER_SCRIPT in names or any(name.startswith(f"{RUNTIME_PACKAGE}/") for name in names):
        yield BundleError(f"the code folder has a {WORKER_SCRIPT} or {RUNTIME_PACKAGE}/ of its own", "rename it")


def _too_large(files: Iterable[_File], total: int) -> BundleError:
    own = [file for file in files if file.why != RUNTIME]
    largest = sorted(own, key=lambda file: -file.status.st_size)[:_MOST_SHOWN]
    lines = "\n  ".join(f"{file.status.st_size / 1e6:10.1f} MB  {printable_name(file.name)}" for file in largest)
    return BundleError(
        f"the code folder has {total / 1e6:.0f} MB; at most {MAX_BYTES / 1e6:.0f} MB travel",
        f"name what should stay in {OWN_IGNORE}; the largest files:\n  {lines}",
    )


def _unreadable(name: str, error: OSError) -> BundleError:
    return BundleError(
        f"{printable_name(name)} cannot be read: {error.strerror}", f"make it readable, or name it in {OWN_IGNORE}"
    )


def printable_name(name: str) -> str:
    """Return a file's name as a terminal can show it."""
    return name if name.isprintable() else name.encode("unicode_escape", "surrogateescape").decode("ascii", "replace")


# ---------------------------------------------------------------- the walk


class _Folder(NamedTuple):
    """A folder to enter.

    Attributes:
        name: Path below the code folder with a slash at the end; empty for the code folder itself.
        own: `.cloudtrainignore` files that apply, the deepest first.
        git: `.gitignore` files that apply, the deepest first.
        named: Whether a rule in `.cloudtrainignore` names it or a folder above it.
        by_itself: Whether a rule names this very folder.
        closed: Whether it is left out but for what `.cloudtrainignore` names in it.
    """

    name: str
    own: tuple[IgnoreFile, ...]
    git: tuple[IgnoreFile, ...]
    named: bool = False
    by_itself: bool = False
    closed: bool = False


class _Verdict(NamedTuple):
    """What becomes of a file or folder.

    Attributes:
        reason: Why it stays behind; None if it travels; empty if its folder has said so.
        named: Whether a rule in `.cloudtrainignore` names it.
        final: Whether nothing below it can travel either.
        by_default: See `LeftOut`.
    """

    reason: str | None
    named: bool = False
    final: bool = False
    by_default: bool = False


class _Walk:
    """One pass over a code folder, without recursion, because folders may be nested deeper than Python's stack."""

    def __init__(self, root: Path, home: Path | None) -> None:
        self.files: list[_File] = []
        self.left_out: list[ExcludedPath] = []
        self.refused: list[SecretMatch] = []
        self.problems: list[BundleError] = []
        self._root = str(root)
        self._resolved = os.path.realpath(root)
        self._never = _names_of_home(self._resolved, home)

    def run(self) -> None:
        """Fill `files`, `left_out`, `refused` and `problems`."""
        stack: list[_Folder] = []
        with self._noting():
            stack.append(_Folder("", (), _rules_above(Path(self._resolved))))
        while stack:
            folder = stack.pop()
            with self._noting():
                stack.extend(self._enter(folder))

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Go on behind what cannot travel, so that all of it is told at once."""
        try:
            yield
        except BundleError as error:
            self.problems.append(error)

    def _enter(self, folder: _Folder) -> Iterator[_Folder]:
        """Look at what lies in a folder; yield the folders to enter. Where its rules cannot be read, nothing counts."""
        children = self._scan(folder.name)
        names = {child.name for child in children}
        verdict = _judge_content(folder, names)
        if verdict.reason is not None:
            opened = any(file.opens(folder.name[:-1]) for file in folder.own)
            self._leave(folder.name, verdict, None, opened=opened)
            if not opened:
                return
            folder = folder._replace(closed=True)
        folder = self._with_own_rules(folder, names)
        for child in children:
            below = None
            with self._noting():
                below = self._look(folder, child)
            if below is not None:
                yield below

    def _scan(self, name: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root + "/" + name) as found:
                return list(found)
        except OSError as error:
            raise _unreadable(name or self._root, error) from error

    def _with_own_rules(self, folder: _Folder, names: set[str]) -> _Folder:
        own, git = folder.own, folder.git
        for base in {GIT_IGNORE, OWN_IGNORE} & names:
            name = folder.name + base
            path = f"{self._root}/{name}"
            if not os.path.isfile(path):  # noqa: PTH113 (see _rules_above)
                continue
            rules = read_ignore_file(Path(path), printable_name(name), folder=folder.name)
            own, git = ((rules, *own), git) if base == OWN_IGNORE else (own, (rules, *git))
        return folder._replace(own=own, git=git)

    def _look(self, folder: _Folder, child: os.DirEntry[str]) -> _Folder | None:
        """Decide about one file or folder; return it if it is a folder to enter."""
        name = folder.name + child.name
        is_folder = _is_folder(child)
        size = 0 if is_folder else _size(child)
        verdict = self._judge(folder, name, child.name, size, is_folder=is_folder)
        kind = scanner.kind_of_folder(child.name) if is_folder else None
        if kind is not None and verdict.reason is None and not verdict.named:
            verdict = self._refuse_folder(folder, name, kind)
        if verdict.reason is not None:
            opened = is_folder and not verdict.final and any(file.opens(name) for file in folder.own)
            self._leave(f"{name}/" if is_folder else name, verdict, None if is_folder else size, opened=opened)
            return folder._replace(name=f"{name}/", closed=True) if opened else None
        if not is_folder:
            self._add(folder, child, name, named=verdict.named)
            return None
        if child.is_symlink():
            self._check_folder_link(name)
            return None
        named = folder.named or verdict.named
        return folder._replace(name=f"{name}/", named=named, by_itself=verdict.named, closed=False)

    def _refuse_folder(self, folder: _Folder, name: str, kind: str) -> _Verdict:
        if not any(file.opens(name) for file in folder.own):
            self.refused.append(SecretMatch(f"{name}/", None, kind))
            return _Verdict("", final=True)
        return _Verdict(kind)

    def _judge(  # noqa: PLR0911 (one return per rule)
        self, folder: _Folder, name: str, base: str, size: int, *, is_folder: bool
    ) -> _Verdict:
        """Apply the rules, the strongest first."""
        if base == _HISTORY:
            return _Verdict("version control", final=True)
        if base == _HOME_FOLDER or name in self._never:
            return _Verdict("runs of cloudtrain", final=True)
        own = _find(folder.own, name, is_folder=is_folder)
        if own is not None and not own.negated:
            return _Verdict(str(own), final=True)
        if own is not None and own.names_something:
            return _Verdict(None, named=True)
        if folder.closed:
            return _Verdict("")
        reason = cache_reason(base, is_folder=is_folder)
        if reason is not None:
            return _Verdict(reason)
        if folder.named:
            return _Verdict(None)
        git = _find(folder.git, name, is_folder=is_folder) if own is None else None
        if git is not None and not git.negated:
            return _Verdict(str(git))
        reason = None if is_folder else result_reason(base, size)
        return _Verdict(reason, by_default=True)

    def _leave(self, name: str, verdict: _Verdict, size: int | None, *, opened: bool) -> None:
        if verdict.reason:
            reason = verdict.reason + (f" (but for what {OWN_IGNORE} names in it)" if opened else "")
            self.left_out.append(ExcludedPath(printable_name(name), reason, size, verdict.by_default))

    def _add(self, folder: _Folder, child: os.DirEntry[str], name: str, *, named: bool) -> None:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            hint = f"rename it, or name it in {OWN_IGNORE}"
            raise BundleError(f"the name {printable_name(name)} is not UTF-8", hint) from error
        kinds, target = [scanner.kind_by_name(name)], None
        if child.is_symlink():
            target = self._check_link(name)
            kinds += [scanner.kind_by_name(target), *map(scanner.kind_of_folder, target.split("/")[:-1])]
            named = named or self._is_named(folder, target)
        try:
            status = child.stat()
        except OSError as error:
            raise _unreadable(name, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{printable_name(name)} is neither file nor folder", f"name it in {OWN_IGNORE}")
        kind = next((kind for kind in kinds if kind is not None), None)
        if kind is not None and not named:
            self.refused.append(SecretMatch(name, None, kind))
        why = NAMED if named or folder.named else CODE
        self.files.append(_File(name, child.path, status, why, named, target))

    def _is_named(self, folder: _Folder, target: str) -> bool:
        rule = _find((file for file in folder.own if target.startswith(file.folder)), target, is_folder=False)
        return rule is not None and rule.negated and rule.names_something

    def _check_link(self, name: str) -> str:
        """Return what a link points to, relative to the code folder.

        Raises:
            BundleError: what it points to lies outside, does not exist, or never travels.
        """
        path = f"{self._root}/{name}"
        target = os.path.realpath(path)
        hint = f"put a file in its place, or name it in {OWN_IGNORE}"
        if target != self._resolved and not target.startswith(self._resolved.rstrip("/") + "/"):
            raise BundleError(
                f"{printable_name(name)} is a link to {printable_name(target)}, outside of the code folder", hint
            )
        inside = target[len(self._resolved.rstrip("/")) + 1 :]
        parts = inside.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if _HISTORY in parts or _HOME_FOLDER in parts or above & self._never:
            raise BundleError(
                f"{printable_name(name)} is a link to {printable_name(inside)}, which never travels", hint
            )
        try:
            os.stat(path)  # noqa: PTH116 (a string, as everywhere in the walk)
        except OSError as error:
            what = (
                "leads to itself"
                if error.errno == errno.ELOOP
                else f"leads to {printable_name(inside)}: {error.strerror}"
            )
            raise BundleError(f"{printable_name(name)} is a link that {what}", hint) from error
        return inside

    def _check_folder_link(self, name: str) -> None:
        """Let a link to the folder of runs stay behind.

        Raises:
            BundleError: it is a link to any other folder.
        """
        target = os.path.realpath(f"{self._root}/{name}")
        if target[len(self._resolved.rstrip("/")) + 1 :] in self._never and target.startswith(self._resolved):
            self.left_out.append(ExcludedPath(printable_name(f"{name}/"), "runs of cloudtrain", None))
            return
        self._check_link(name)
        raise BundleError(f"{printable_name(name)} is a link to a folder", f"copy it, or name it in {OWN_IGNORE}")


def _names_of_home(root: str, home: Path | None) -> frozenset[str]:
    """Return what of the folder of runs lies below the code folder, which may be the same."""
    if home is None:
        return frozenset()
    inside = os.path.relpath(os.path.realpath(home), root)
    if inside == ".":
        return frozenset({"runs", BUNDLES_FOLDER})
    return frozenset() if inside.startswith("..") else frozenset({inside})


def _judge_content(folder: _Folder, names: set[str]) -> _Verdict:
    """Decide about a folder by the names of what lies in it. The code folder itself was named by the job."""
    if not folder.name or folder.closed:
        return _Verdict(None)
    reason = None if folder.by_itself else environment_reason(names)
    if reason is not None:
        return _Verdict(reason)
    base = folder.name[:-1].rpartition("/")[2]
    return _Verdict(None if folder.named else result_folder_reason(base, names), by_default=True)


def _rules_above(root: Path) -> tuple[IgnoreFile, ...]:
    """Return the `.gitignore` files between the code folder and the root of its repository, the deepest first."""
    above = (root, *root.parents)
    # os.path answers False where a folder may not be looked into; a Path would raise.
    depth = next((depth for depth, folder in enumerate(above) if os.path.exists(folder / _HISTORY)), 0)  # noqa: PTH110
    return tuple(
        read_ignore_file(
            folder / GIT_IGNORE,
            os.path.relpath(folder / GIT_IGNORE, root),
            above=f"{root.relative_to(folder).as_posix()}/",
        )
        for folder in above[1 : depth + 1]
        if os.path.isfile(folder / GIT_IGNORE)  # noqa: PTH113
    )


def _find(files: Iterable[IgnoreFile], name: str, *, is_folder: bool) -> Rule | None:
    return next((rule for file in files if (rule := file.find(name, is_folder=is_folder)) is not None), None)


def _size(child: os.DirEntry[str]) -> int:
    try:
        return child.stat().st_size
    except OSError:
        return 0  # a link to nothing; told when it should travel


def _is_folder(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:
        return False  # a link that leads to itself; told when it should travel
