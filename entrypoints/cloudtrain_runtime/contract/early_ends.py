"""Ranks that ended with exit code 0 while others went on: the words that the launcher and the SDK have for them.

The others wait for such a rank in their next collective. With Gloo they fail as if the network were broken, and with
NCCL they hang, so the cause is never in their own messages.
"""

from __future__ import annotations

from collections.abc import Sequence


def describe_early_end(ranks: Sequence[int], host: str, step: int | None) -> str:
    """Return which ranks of a host ended with exit code 0: `rank 1 on algo-1 ended with exit code 0 after step 9`.

    Args:
        ranks: At least one rank.
        host: The host.
        step: The last step that they reported, or None or 0 if they reported none.
    """
    numbers = ", ".join(map(str, ranks))
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {numbers} on {host} {ended_early(step)}"


def ended_early(step: int | None) -> str:
    """Return `ended with exit code 0 after step 9`; a step of 0 or None is unknown."""
    after = f" after step {step}" if step else ""
    return f"ended with exit code 0{after}"
