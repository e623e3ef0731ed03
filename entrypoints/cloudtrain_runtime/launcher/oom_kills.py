"""The kernel's count of processes that it has ended for lack of memory: evidence for why a process was killed."""

from __future__ import annotations

from pathlib import Path

_COUNTS = Path("/proc/vmstat")


def count_oom_kills(counts: Path | None = None) -> int | None:
    """Return how many processes this machine's kernel has ended for lack of memory since it started.

    Limits of a container count, too. None: the system does not say.

    Args:
        counts: By default /proc/vmstat, which has `oom_kill` since Linux 4.13.
    """
    try:
        lines = (counts or _COUNTS).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    values = dict(line.split()[:2] for line in lines if " " in line)
    found = values.get("oom_kill", "")
    return int(found) if found.isdecimal() else None


def describe_oom_kills(before: int | None) -> str:
    """Return what the kernel has counted since an earlier count, as the end of a sentence; empty if nothing."""
    after = count_oom_kills()
    if before is None or after is None or after <= before:
        return ""
    number = after - before
    processes = "1 process" if number == 1 else f"{number} processes"
    return f"; the kernel has ended {processes} for lack of memory"
