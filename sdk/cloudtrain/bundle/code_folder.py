"""Walk over a code folder that decides which files its bundle includes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cloudtrain.bundle.default_ignores import (
    cache_reason,
    environment_reason,
    record_reason,
    result_folder_reason,
    result_reason,
)
from cloudtrain.bundle.git_source import find_gitlinks
from cloudtrain.bundle.ignore import IgnoreFile, Rule, read_ignore_file
from cloudtrain.bundle.rejections import OWN_IGNORE, printable_name, unreadable_error
from cloudtrain.errors import BundleError
from cloudtrain.secrets import scanner
from cloudtrain.secrets.scanner import SecretMatch
from cloudtrain.support.file_pointers import missing_submodules
from cloudtrain_runtime.contract import INCLUDE_FOLDER

BUNDLES_FOLDER = "bundles"
"""Folder of written bundles, below the folder of local runs."""

CODE = "code"
NAMED = f"named in {OWN_IGNORE}"
RUNTIME = "runtime of cloudtrain"
"""Why a bundle includes a file."""

_GIT_IGNORE = ".gitignore"
_GIT_FOLDER = ".git"
_HOME_FOLDER = ".cloudtrain"


class SourceFile(NamedTuple):
    """A file to include, before it is read.

    Attributes:
        name: Path below the code folder.
        path: Path on this machine.
        status: Its status.
        why: `CODE`, `NAMED` or `RUNTIME`.
        is_named: Whether a rule in `.cloudtrainignore` names the file itself.
        target: Target of a symbolic link, as a path below the code folder; None for other files.
    """

    name: str
    path: str
    status: os.stat_result
    why: str
    is_named: bool
    target: str | None = None


class ExcludedPath(NamedTuple):
    """A file or folder that a bundle excludes.

    Attributes:
        name: Path below the code folder; a folder's ends with a slash.
        reason: Why it is excluded; an ignore rule with its file and line.
        bytes: Size of a file; None for a folder, whose content is not listed.
        is_by_default: Whether it is a result or data that no rule of the user's names, so that users may miss it.
    """

    name: str
    reason: str
    bytes: int | None
    is_by_default: bool = False


@dataclass
class WalkResult:
    """What a walk found.

    `refused` are files and folders whose names look like credentials and are not named in `.cloudtrainignore`, and
    `problems` say why other files cannot be part of a bundle. `submodules` are those that are not checked out, each with
    a slash at its end.
    """

    files: list[SourceFile] = field(default_factory=list)
    excluded: list[ExcludedPath] = field(default_factory=list)
    refused: list[SecretMatch] = field(default_factory=list)
    problems: list[BundleError] = field(default_factory=list)
    submodules: list[str] = field(default_factory=list)


def walk_code_folder(root: Path, home: Path | None) -> WalkResult:
    """Decide about every file of a code folder. The folder of local runs, `home`, is always excluded."""
    return _Walker(root, home).run()


def walk_includes(includes: Mapping[str, Path], home: Path | None) -> Iterator[WalkResult]:
    """Decide about every file of the folders of `code.include`. Names begin with the folder in the bundle."""
    for name, folder in includes.items():
        found = walk_code_folder(folder, home)
        prefix = f"{INCLUDE_FOLDER}/{name}/"
        yield WalkResult(
            files=[each._replace(name=prefix + each.name) for each in found.files],
            excluded=[each._replace(name=prefix + each.name) for each in found.excluded],
            refused=[each._replace(name=prefix + each.name) for each in found.refused],
            problems=[
                BundleError(f"in {folder}: {each.message}", each.hint) for each in found.problems
            ],
            submodules=[prefix + each for each in found.submodules],
        )


class _Folder(NamedTuple):
    """A folder to enter.

    Attributes:
        name: Path below the code folder with a slash at the end; empty for the code folder itself.
        own: `.cloudtrainignore` files that apply, the deepest first.
        git: `.gitignore` files that apply, the deepest first.
        is_named: Whether a rule in `.cloudtrainignore` names it or a folder above it.
        is_named_itself: Whether such a rule names this very folder.
        is_closed: Whether it is excluded except for the files that `.cloudtrainignore` names in it.
    """

    name: str
    own: tuple[IgnoreFile, ...]
    git: tuple[IgnoreFile, ...]
    is_named: bool = False
    is_named_itself: bool = False
    is_closed: bool = False


class _Decision(NamedTuple):
    """Decision about a file or folder.

    Attributes:
        reason: Why it is excluded; None if it is included; empty if the decision about its folder gave the reason.
        is_named: Whether a rule in `.cloudtrainignore` names it.
        is_final: Whether everything below it is excluded, too.
        is_by_default: See `ExcludedPath`.
    """

    reason: str | None
    is_named: bool = False
    is_final: bool = False
    is_by_default: bool = False


class _Walker:
    """One pass over a code folder, without recursion, because folders may be nested deeper than Python's stack."""

    def __init__(self, root: Path, home: Path | None) -> None:
        self.result = WalkResult()
        self._empty: list[str] = []
        self._root = str(root)
        self._resolved = os.path.realpath(root)
        self._home_names = _names_of_home(self._resolved, home)

    def run(self) -> WalkResult:
        stack: list[_Folder] = []
        with self._collecting_problems():
            stack.append(_Folder("", (), _git_rules_above(Path(self._resolved))))
        while stack:
            folder = stack.pop()
            with self._collecting_problems():
                stack.extend(self._enter(folder))
        if self._empty:
            self.result.submodules = _find_submodules(Path(self._resolved), self._empty)
        return self.result

    @contextlib.contextmanager
    def _collecting_problems(self) -> Iterator[None]:
        """Record a `BundleError` and continue, so that one command reports all problems."""
        try:
            yield
        except BundleError as error:
            self.result.problems.append(error)

    def _enter(self, folder: _Folder) -> Iterator[_Folder]:
        """Decide about the children of a folder; yield the folders to enter.

        If the folder's ignore files cannot be read, the walk decides about none of its children.
        """
        try:
            with os.scandir(self._root + "/" + folder.name) as found:
                children = list(found)
        except OSError as error:
            raise unreadable_error(folder.name or self._root, error) from error
        names = {child.name for child in children}
        decision = _decide_by_children(folder, names)
        if decision.reason is not None:
            has_exceptions = any(file.opens(folder.name[:-1]) for file in folder.own)
            self._exclude(folder.name, decision, None, has_exceptions=has_exceptions)
            if not has_exceptions:
                return
            folder = folder._replace(is_closed=True)
        folder = self._with_own_rules(folder, names)
        if not children and folder.name and not folder.is_closed:
            self._empty.append(folder.name)
        for child in children:
            below = None
            with self._collecting_problems():
                below = self._visit(folder, child)
            if below is not None:
                yield below

    def _with_own_rules(self, folder: _Folder, names: set[str]) -> _Folder:
        own = folder.own
        git = folder.git
        for base in {_GIT_IGNORE, OWN_IGNORE} & names:
            name = folder.name + base
            path = f"{self._root}/{name}"
            if not os.path.isfile(path):  # noqa: PTH113 (see _git_rules_above)
                continue
            rules = read_ignore_file(Path(path), printable_name(name), folder=folder.name)
            if base == OWN_IGNORE:
                own = (rules, *own)
            else:
                git = (rules, *git)
        return folder._replace(own=own, git=git)

    def _visit(self, folder: _Folder, child: os.DirEntry[str]) -> _Folder | None:
        name = folder.name + child.name
        status = _stat(child)
        is_folder = status is not None and stat.S_ISDIR(status.st_mode)
        size = 0 if is_folder or status is None else status.st_size
        decision = self._decide(folder, name, child.name, size, is_folder=is_folder)
        is_opened = is_folder and any(file.opens(name) for file in folder.own)
        kind = scanner.kind_of_folder(child.name) if is_folder else None
        if kind is not None and decision.reason is None and not decision.is_named:
            if not is_opened:
                self.result.refused.append(SecretMatch(f"{name}/", None, kind))
            decision = _Decision(kind) if is_opened else _Decision("", is_final=True)
        if decision.reason is not None:
            has_exceptions = is_opened and not decision.is_final
            shown = f"{name}/" if is_folder else name
            size_shown = None if is_folder else size
            self._exclude(shown, decision, size_shown, has_exceptions=has_exceptions)
            return folder._replace(name=f"{name}/", is_closed=True) if has_exceptions else None
        if not is_folder:
            self._include(folder, child, name, is_named=decision.is_named)
            return None
        if child.is_symlink():
            self._check_folder_link(name)
            return None
        is_named = folder.is_named or decision.is_named
        return folder._replace(
            name=f"{name}/", is_named=is_named, is_named_itself=decision.is_named, is_closed=False
        )

    def _decide(  # noqa: PLR0911 (one return per rule)
        self, folder: _Folder, name: str, base: str, size: int, *, is_folder: bool
    ) -> _Decision:
        """Apply the rules, the strongest first."""
        if base == _GIT_FOLDER:
            return _Decision("version control", is_final=True)
        if base == _HOME_FOLDER or name in self._home_names:
            return _Decision("runs of cloudtrain", is_final=True)
        own = _find_rule(folder.own, name, is_folder=is_folder)
        if own is not None and not own.is_negated:
            return _Decision(str(own), is_final=True)
        if own is not None and own.is_specific:
            return _Decision(None, is_named=True)
        if folder.is_closed:
            return _Decision("")
        reason = cache_reason(base, is_folder=is_folder)
        if reason is not None:
            return _Decision(reason)
        if folder.is_named:
            return _Decision(None)
        git = _find_rule(folder.git, name, is_folder=is_folder) if own is None else None
        if git is not None and not git.is_negated:
            return _Decision(str(git))
        reason = None if is_folder else result_reason(base, size)
        return _Decision(reason, is_by_default=True)

    def _exclude(
        self, name: str, decision: _Decision, size: int | None, *, has_exceptions: bool
    ) -> None:
        reason = decision.reason
        if not reason:
            return
        if has_exceptions:
            reason += f" (except for what {OWN_IGNORE} names in it)"
        self.result.excluded.append(
            ExcludedPath(printable_name(name), reason, size, decision.is_by_default)
        )

    def _include(
        self, folder: _Folder, child: os.DirEntry[str], name: str, *, is_named: bool
    ) -> None:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            hint = f"rename it, or name it in {OWN_IGNORE}"
            raise BundleError(f"the name {printable_name(name)} is not UTF-8", hint) from error
        kinds = [scanner.kind_by_name(name)]
        target = None
        if child.is_symlink():
            # The content is that of the target, so its name and folders count, too.
            target = self._check_link(name)
            kinds.append(scanner.kind_by_name(target))
            kinds += map(scanner.kind_of_folder, target.split("/")[:-1])
            above = [file for file in folder.own if target.startswith(file.folder)]
            rule = _find_rule(above, target, is_folder=False)
            is_named = is_named or (rule is not None and rule.is_negated and rule.is_specific)
        try:
            status = child.stat()
        except OSError as error:
            raise unreadable_error(name, error) from error
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(
                f"{printable_name(name)} is neither file nor folder", f"name it in {OWN_IGNORE}"
            )
        kind = next((kind for kind in kinds if kind is not None), None)
        if kind is not None and not is_named:
            self.result.refused.append(SecretMatch(name, None, kind))
        why = NAMED if is_named or folder.is_named else CODE
        self.result.files.append(SourceFile(name, child.path, status, why, is_named, target))

    def _check_link(self, name: str) -> str:
        """Return the target of a symbolic link, relative to the code folder.

        Raises:
            BundleError: The target is outside of the code folder, does not exist, or is always excluded.
        """
        path = f"{self._root}/{name}"
        target = os.path.realpath(path)
        hint = (
            f"replace it by a file, or name it in {OWN_IGNORE} if the code does not need it; a link to a file outside works "
            "where code.directory is a folder that contains both"
        )
        if target != self._resolved and not target.startswith(self._resolved.rstrip("/") + "/"):
            message = f"{printable_name(name)} is a link to {printable_name(target)}, outside of the code folder"
            raise BundleError(message, hint)
        inside = target[len(self._resolved.rstrip("/")) + 1 :]
        parts = inside.split("/")
        prefixes = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if _GIT_FOLDER in parts or _HOME_FOLDER in parts or prefixes & self._home_names:
            message = f"{printable_name(name)} is a link to {printable_name(inside)}, which is always excluded"
            raise BundleError(message, hint)
        try:
            os.stat(path)  # noqa: PTH116 (a string, as everywhere in the walk)
        except OSError as error:
            what = f"points to {printable_name(inside)}: {error.strerror}"
            if error.errno == errno.ELOOP:
                what = "points to itself"
            raise BundleError(f"{printable_name(name)} is a link that {what}", hint) from error
        return inside

    def _check_folder_link(self, name: str) -> None:
        """Exclude a symbolic link to the folder of runs.

        Raises:
            BundleError: The link points to any other folder.
        """
        target = os.path.realpath(f"{self._root}/{name}")
        inside = target[len(self._resolved.rstrip("/")) + 1 :]
        if target.startswith(self._resolved) and inside in self._home_names:
            self.result.excluded.append(
                ExcludedPath(printable_name(f"{name}/"), "runs of cloudtrain", None)
            )
            return
        self._check_link(name)
        raise BundleError(
            f"{printable_name(name)} is a link to a folder", f"copy it, or name it in {OWN_IGNORE}"
        )


def _find_submodules(root: Path, empty: list[str]) -> list[str]:
    """Return the empty folders that are submodules: by `.gitmodules`, or without an entry there by git's index."""
    listed = set(missing_submodules(root)).intersection(empty)
    others = [name for name in empty if name not in listed]
    return sorted([*listed, *find_gitlinks(root, others)])


def _names_of_home(root: str, home: Path | None) -> frozenset[str]:
    """Return the paths below the code folder that belong to the folder of runs, which may be the code folder itself."""
    if home is None:
        return frozenset()
    inside = os.path.relpath(os.path.realpath(home), root)
    if inside == ".":
        return frozenset({"runs", BUNDLES_FOLDER})
    if inside.startswith(".."):
        return frozenset()
    return frozenset({inside})


def _git_rules_above(root: Path) -> tuple[IgnoreFile, ...]:
    """Return the `.gitignore` files between the code folder and the root of its repository, the deepest first."""
    above = (root, *root.parents)
    # os.path returns False for a folder that must not be read; a Path would raise.
    depth = next(
        (depth for depth, folder in enumerate(above) if os.path.exists(folder / _GIT_FOLDER)),  # noqa: PTH110
        0,
    )
    return tuple(
        read_ignore_file(
            folder / _GIT_IGNORE,
            os.path.relpath(folder / _GIT_IGNORE, root),
            above=f"{root.relative_to(folder).as_posix()}/",
        )
        for folder in above[1 : depth + 1]
        if os.path.isfile(folder / _GIT_IGNORE)  # noqa: PTH113
    )


def _decide_by_children(folder: _Folder, names: set[str]) -> _Decision:
    """Decide about a folder by the names of its children. The job names the code folder itself, so it is included."""
    if not folder.name or folder.is_closed:
        return _Decision(None)
    reason = record_reason(folder.name) or environment_reason(names)
    if reason is not None and not folder.is_named_itself:
        return _Decision(reason)
    reason = None
    if not folder.is_named:
        base = folder.name[:-1].rpartition("/")[2]
        reason = result_folder_reason(base, names)
    return _Decision(reason, is_by_default=True)


def _stat(child: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return child.stat()
    except OSError:
        # A broken link or a link to itself; `_check_link` reports it if it would be included.
        return None


def _find_rule(files: Iterable[IgnoreFile], name: str, *, is_folder: bool) -> Rule | None:
    return next(
        (rule for file in files if (rule := file.find(name, is_folder=is_folder)) is not None), None
    )
