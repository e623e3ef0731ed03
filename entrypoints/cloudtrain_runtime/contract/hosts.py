"""The order of a job's hosts, and the CPUs of one."""

from __future__ import annotations

import os


def sort_hosts(hosts: list[str]) -> list[str]:
    """Return hosts in SageMaker's order: as text, so `algo-10` comes before `algo-2`. The first is the master."""
    return sorted(hosts)


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    # macOS has no such function.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
