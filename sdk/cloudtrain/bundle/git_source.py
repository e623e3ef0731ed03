"""Git commit, branch and uncommitted changes of a code folder.

git only reads: it takes no locks, writes no index, fetches nothing, and runs no hook, file system monitor, external
diff, text conversion or filter that a configuration names. Without its filter, a file that a filter rewrites, as Git
LFS does, counts as changed if its time differs from the one in git's index.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloudtrain.planning.plan import GitSource
from cloudtrain.secrets import scanner
from cloudtrain_runtime.contract.redaction import redact

MAX_DIFF_BYTES = 10**6
_TIMEOUT_SECONDS = 10.0
_QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_NO_LAZY_FETCH": "1",
    # For git before 2.44, whose fetch starts ssh or the command of a remote.
    "GIT_ALLOW_PROTOCOL": "none",
    "LC_ALL": "C",
}
_SAFE = (
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.quotePath=false"),
    *("-c", "diff.autoRefreshIndex=false"),
)
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_EXTERNAL_DIFF")
"""Variables that git sets inside hooks and that would select another repository."""
_FILTERS = (
    "config",
    "--null",
    "--name-only",
    "--get-regexp",
    r"^filter\..*\.(clean|smudge|process|required)$",
)
_MAX_PATHS = 200
"""Most paths on git's command line, whose length is limited."""
_GITLINK = "160000 "
"""Mode of a submodule in git's index."""
_NONE_FOUND = 1
"""Exit code of git config if no name matches."""
_STATUS = (
    "status",
    "--porcelain=v2",
    "--branch",
    "-z",
    "--untracked-files=normal",
    "--ignore-submodules=all",
)
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "HEAD")


def read_source(directory: Path) -> GitSource | None:
    """Return the git source of a code folder; None without git, without a repository, or if git fails."""
    no_filters = _without_filters(directory)
    if no_filters is None:
        return None
    status = _git(directory, *no_filters, *_STATUS, "--", ".")
    if status is None:
        return None
    records = os.fsdecode(status).split("\0")[:-1]
    head = dict(record[2:].split(" ", 1) for record in records if record.startswith("# branch."))
    commit = head.get("branch.oid", "")
    # A plan is printed and stored, so it must be valid text.
    branch = os.fsencode(head.get("branch.head", "")).decode("utf-8", "replace")
    has_commit = commit not in ("", "(initial)")
    diff = b""
    if has_commit and (changed := tuple(_changed(records))):
        # With a stale index, as in a copied repository, git would compare every file again; status has just done so.
        paths = ["."]
        if len(changed) <= _MAX_PATHS:
            paths = [f":(top,literal){path}" for path in changed]
        arguments = (*no_filters, *_DIFF, "--", *paths)
        # One byte more shows that it is longer.
        diff = _git(directory, *arguments, most_bytes=MAX_DIFF_BYTES + 1) or b""
    text = b"".join(_without_secrets(diff[:MAX_DIFF_BYTES])).decode("utf-8", "replace")
    # A password by its name is harmless in most files, so it does not hide the whole file.
    text = redact(text)
    if len(diff) > MAX_DIFF_BYTES:
        text += "\n(cut here: the diff is longer)\n"
    return GitSource(
        commit=commit if has_commit else None,
        branch=branch if branch not in ("", "(detached)") else None,
        dirty=any(not record.startswith("#") for record in records),
        diff=text,
    )


def tracks_files(folder: Path) -> bool:
    """Return whether git tracks files in a folder; False without git or a repository."""
    if not any((each / ".git").exists() for each in folder.absolute().parents):
        return False
    return bool(_git(folder.parent, "ls-files", "-z", "--", folder.name, most_bytes=1))


def find_gitlinks(directory: Path, folders: Iterable[str]) -> Iterator[str]:
    """Yield those of some folders that git's index records as a commit of another repository.

    Args:
        directory: A folder of a repository, or any other folder.
        folders: Paths below it, each with a slash at its end. Of very many only the first are looked up.
    """
    paths = [f":(literal){name.rstrip('/')}" for name in itertools.islice(folders, _MAX_PATHS)]
    if not paths:
        # Without paths git would list all files.
        return
    listed = _git(directory, "ls-files", "--stage", "-z", "--", *paths)
    for record in os.fsdecode(listed or b"").split("\0"):
        mode, _, path = record.partition("\t")
        if mode.startswith(_GITLINK):
            yield f"{path}/"


def _without_filters(directory: Path) -> tuple[str, ...] | None:
    """Return the options that disable all configured filters; None if that is impossible.

    git starts no program for an empty command (gitattributes(5)), and ignores failures of optional filters.
    """
    names = _git(directory, *_FILTERS, accepted=(0, _NONE_FOUND))
    if names is None:
        return None
    drivers = {
        os.fsdecode(name).partition(".")[2].rpartition(".")[0]
        for name in names.split(b"\0")
        if name
    }
    if any("=" in driver for driver in drivers):
        # git's -c ends a name at the first equals sign, so it cannot override this one.
        return None
    empty = ("clean=", "smudge=", "process=", "required=false")
    return tuple(
        word
        for driver in sorted(drivers)
        for setting in empty
        for word in ("-c", f"filter.{driver}.{setting}")
    )


_FIELDS_BEFORE_PATH = {"1": 8, "2": 9, "u": 10}
"""Fields before the path of a changed, a renamed and an unmerged file (git-status(1), porcelain format version 2)."""


def _changed(records: Iterable[str]) -> Iterator[str]:
    """Yield the paths of tracked files that changed, from the root of the repository."""
    rest = iter(records)
    for record in rest:
        fields = _FIELDS_BEFORE_PATH.get(record[:1])
        if fields is None:
            continue
        yield record.split(" ", fields)[fields]
        if record.startswith("2"):
            # The old name.
            yield next(rest)


def _without_secrets(diff: bytes) -> Iterator[bytes]:
    """Yield the diff file by file; for a file that looks like a secret only its first line.

    The file's name decides, too, because a diff shows too little of the content.
    """
    start = b"diff --git "
    for part in diff.split(b"\n" + start):
        head, _, _ = part.partition(b"\n")
        name = head.decode("utf-8", "replace").rstrip('"').rpartition(" b/")[2]
        kinds = (scanner.kind_by_name(name), scanner.suspected_kind(name))
        folders = map(scanner.kind_of_folder, name.split("/")[:-1])
        # The first part has its own start, which the split has not removed.
        lead = b"" if part.startswith(start) or not part else b"\n" + start
        is_secret_name = any(kind is not None for kind in (*kinds, *folders))
        if is_secret_name or scanner.scan_text(part):
            yield lead + head + b"\n(not recorded: looks like a secret)"
        else:
            yield lead + part


def _git(
    directory: Path, *arguments: str, most_bytes: int = -1, accepted: tuple[int, ...] = (0,)
) -> bytes | None:
    """Return git's output, at most `most_bytes` long, or None if git fails."""
    environ = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    try:
        process = subprocess.Popen(
            ["git", *_SAFE, *arguments],
            cwd=directory,
            env={**environ, **_QUIET},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    with process:
        timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
        timer.start()
        output = process.stdout.read(most_bytes) if process.stdout is not None else b""
        timer.cancel()
        if len(output) == most_bytes:
            process.kill()
            return output
    if process.returncode not in accepted:
        return None
    return output
