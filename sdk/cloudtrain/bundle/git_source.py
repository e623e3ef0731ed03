"""Where the code comes from: commit, branch and the changes that are not committed.

git is only asked, never told: it takes no locks, writes no index, fetches nothing, and runs no hook, file system
monitor, external diff, text conversion or filter that a configuration names. Without its filter a file that one
rewrites, as Git LFS does, counts as changed when its time is not what git's index remembers.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloudtrain.planning.plan import GitSource
from cloudtrain.secrets import scanner

MAX_DIFF_BYTES = 10**6
_TIMEOUT_SECONDS = 10.0
_QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",  # the same for a git before 2.44: a fetch starts ssh or what a remote names
    "LC_ALL": "C",
}
_SAFE = (
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.quotePath=false"),
    *("-c", "diff.autoRefreshIndex=false"),
)
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_EXTERNAL_DIFF")
"""Set inside hooks: they would answer for another repository."""
_FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|smudge|process|required)$")
_MOST_PATHS = 200
"""Paths that are named to git; with more the words for it would grow too long."""
_NONE_FOUND = 1
"""What git config exits with when no name matches."""
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal", "--ignore-submodules=all")
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "HEAD")


def read_source(directory: Path) -> GitSource | None:
    """Return where a code folder comes from; None without git, without a repository, or where git refuses.

    Args:
        directory: The code folder, which may lie anywhere in a repository.
    """
    quiet = _without_filters(directory)
    status = _git(directory, *quiet, *_STATUS, "--", ".") if quiet is not None else None
    if quiet is None or status is None:
        return None
    records = os.fsdecode(status).split("\0")[:-1]
    head = dict(record[2:].split(" ", 1) for record in records if record.startswith("# branch."))
    commit = head.get("branch.oid", "")
    branch = os.fsencode(head.get("branch.head", "")).decode("utf-8", "replace")  # a plan is printed and kept
    has_commit = commit not in ("", "(initial)")
    changed = tuple(_changed(records))
    return GitSource(
        commit=commit if has_commit else None,
        branch=branch if branch not in ("", "(detached)") else None,
        dirty=any(not record.startswith("#") for record in records),
        diff=_diff(directory, quiet, changed) if has_commit and changed else "",
    )


def _without_filters(directory: Path) -> tuple[str, ...] | None:
    """Return the options with which git starts none of the configured filters; None where that cannot be said.

    An empty command starts nothing (gitattributes(5)), and what is not required may fail to start.
    """
    names = _git(directory, *_FILTERS, accepted=(0, _NONE_FOUND))
    if names is None:
        return None
    drivers = {os.fsdecode(name).partition(".")[2].rpartition(".")[0] for name in names.split(b"\0") if name}
    if any("=" in driver for driver in drivers):
        return None  # git's -c ends a name at the first equals sign, so such a one cannot be overridden
    nothing = ("clean=", "smudge=", "process=", "required=false")
    return tuple(word for driver in sorted(drivers) for end in nothing for word in ("-c", f"filter.{driver}.{end}"))


_FIELDS_BEFORE_PATH = {"1": 8, "2": 9, "u": 10}
"""Of a changed, a renamed and an unmerged file: git-status(1), porcelain format version 2."""


def _changed(records: Iterable[str]) -> Iterator[str]:
    """Yield the paths of tracked files that changed, from the root of the repository."""
    rest = iter(records)
    for record in rest:
        fields = _FIELDS_BEFORE_PATH.get(record[:1])
        if fields is None:
            continue
        yield record.split(" ", fields)[fields]
        if record.startswith("2"):
            yield next(rest)  # what it was called before


def _diff(directory: Path, quiet: tuple[str, ...], changed: tuple[str, ...]) -> str:
    """Return the diff of tracked files below a folder, without what looks like a secret, bounded."""
    # Where its index is stale, as in a copied repository, git would compare every file; status has just done so.
    paths = [f":(top,literal){path}" for path in changed] if len(changed) <= _MOST_PATHS else ["."]
    data = _git(directory, *quiet, *_DIFF, "--", *paths, most_bytes=MAX_DIFF_BYTES + 1) or b""
    text = b"".join(_without_secrets(data[:MAX_DIFF_BYTES])).decode("utf-8", "replace")
    return text if len(data) <= MAX_DIFF_BYTES else f"{text}\n(cut here: the diff is longer)\n"


def _without_secrets(diff: bytes) -> Iterator[bytes]:
    """Yield the diff file by file; of a file that looks like a secret only its first line."""
    start = b"diff --git "
    for part in diff.split(b"\n" + start):
        head, _, _ = part.partition(b"\n")
        name = head.decode("utf-8", "replace").rstrip('"').rpartition(" b/")[2]
        lead = b"" if part.startswith(start) or not part else b"\n" + start
        hidden = _is_secret(name) or scanner.scan_text(part)
        yield lead + (head + b"\n(not recorded: looks like a secret)" if hidden else part)


def _is_secret(name: str) -> bool:
    """Tell whether a name says that a file holds a secret, or may: a diff shows too little of it to tell."""
    folders = name.split("/")[:-1]
    said = (scanner.kind_by_name(name), scanner.suspected_kind(name), *map(scanner.kind_of_folder, folders))
    return any(kind is not None for kind in said)


def _git(directory: Path, *arguments: str, most_bytes: int = -1, accepted: tuple[int, ...] = (0,)) -> bytes | None:
    """Return what git prints, at most so many bytes, or None when it cannot answer."""
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
    return output if process.returncode in accepted else None
