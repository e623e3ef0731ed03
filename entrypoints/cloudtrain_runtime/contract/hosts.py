"""The order of a job's hosts."""

from __future__ import annotations


def sort_hosts(hosts: list[str]) -> list[str]:
    """Return hosts in SageMaker's order: as text, so `algo-10` comes before `algo-2`. The first is the master."""
    return sorted(hosts)
