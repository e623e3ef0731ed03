"""Where the code comes from: commit, branch and the changes that are not committed.

git is only asked, never told: it takes no locks, writes no index, and runs no hook, file system monitor, filter,
external diff or text conversion that a configuration names.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.bundle import credentials
from cloudtrain.plan import Source

MAX_DIFF_BYTES = 10**6
_TIMEOUT_SECONDS = 10.0
_QUIET = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "GIT_NO_LAZY_FETCH": "1",
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
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules=all")
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "HEAD")


def read_source(directory: Path) -> Source | None:
    """Return where a code folder comes from; None without git, without a repository, or where git refuses.

    Args:
        directory: The code folder, which may lie anywhere in a repository.
    """
    filters = _without_filters(directory)
    status = _git(directory, *filters, *_STATUS, "--", ".")
    if status is None:
        return None
    lines = status.decode("utf-8", "replace").splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch."))
    commit, branch = head.get("branch.oid", ""), head.get("branch.head", "")
    changes = [line for line in lines if not line.startswith("#")]
    has_commit = commit not in ("", "(initial)")
    is_tracked_changed = any(not line.startswith("?") for line in changes)
    return Source(
        commit=commit if has_commit else None,
        branch=branch if branch not in ("", "(detached)") else None,
        dirty=bool(changes),
        diff=_diff(directory, filters) if has_commit and is_tracked_changed else "",
    )


def _without_filters(directory: Path) -> tuple[str, ...]:
    """Return options that switch off the filters which a configuration names: git would start their programs."""
    listed = _git(directory, "config", "--null", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$") or b""
    names = {key.rpartition(".")[0] for key in listed.decode("utf-8", "replace").split("\0") if key}
    off = ("clean=", "process=", "smudge=", "required=false")
    switched = (f"{name}.{value}" for name in sorted(names) if "=" not in name for value in off)
    return tuple(word for option in switched for word in ("-c", option))


def _diff(directory: Path, filters: tuple[str, ...]) -> str:
    """Return the diff of tracked files below a folder, without what looks like a secret, bounded."""
    data = _git(directory, *filters, *_DIFF, "--", ".", most_bytes=MAX_DIFF_BYTES + 1) or b""
    text = b"".join(_without_secrets(data[:MAX_DIFF_BYTES])).decode("utf-8", "replace")
    return text if len(data) <= MAX_DIFF_BYTES else f"{text}\n(cut here: the diff is longer)\n"


def _without_secrets(diff: bytes) -> Iterator[bytes]:
    """Yield the diff file by file; of a file that looks like a secret only its first line."""
    start = b"diff --git "
    for part in diff.split(b"\n" + start):
        head, _, _ = part.partition(b"\n")
        name = head.decode("utf-8", "replace").rstrip('"').rpartition("/")[2]
        lead = b"" if part.startswith(start) or not part else b"\n" + start
        hidden = credentials.by_name(name) is not None or credentials.in_text(part)
        yield lead + (head + b"\n(not recorded: looks like a secret)" if hidden else part)


def _git(directory: Path, *arguments: str, most_bytes: int = -1) -> bytes | None:
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
    return output if process.returncode == 0 else None
