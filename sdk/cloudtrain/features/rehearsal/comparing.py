"""Comparison of the final states of runs, in a process of the runtime."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from subprocess import CompletedProcess
from typing import Any

from cloudtrain.features.rehearsal.runs import NotShownError, first_line
from cloudtrain_runtime.contract.strict_json import decode_floats, load_json

_MODULE = "cloudtrain_runtime.checkpoint.inspection"
MARGIN = 2.0
"""A resumed run may differ from an uninterrupted one by this many times as much as two uninterrupted runs do."""


@dataclass(frozen=True)
class Difference:
    """How a state differs from that of the reference run; see `cloudtrain_runtime.checkpoint.comparison`."""

    entries: int
    different: int
    missing: int
    names: Sequence[str]
    largest: float
    relative: float
    state: Sequence[str]
    random: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether both states are equal bit for bit."""
        return not (self.different or self.missing or self.state or self.random)

    @property
    def sentence(self) -> str:
        """The difference in words."""
        parts = []
        if self.missing:
            parts.append(f"{self.missing} of {self.entries} entries are only in one of them")
        if self.different:
            parts.append(
                f"{self.different} of {self.entries} entries differ, by {self.relative:.1e} of their size at most"
            )
        if self.random:
            parts.append(f"{self.random} states of random generators differ")
        if self.state:
            parts.append(f"{', '.join(self.state)} in the manifest differ")
        if not parts:
            return "equal bit for bit"
        named = f" ({', '.join(self.names)})" if self.names else ""
        return "; ".join(parts) + named


def compare(
    run: Callable[..., CompletedProcess[str]],
    environ: Mapping[str, str],
    uris: Sequence[str],
    timeout: float,
) -> list[Difference]:
    """Return how the checkpoints at `uris[1:]` differ from the first one.

    Args:
        run: Runs a program: `Workspace.run`.
        environ: Environment of the program, with credentials where checkpoints are in S3.
        uris: One checkpoint each.
        timeout: Longest time in seconds.

    Raises:
        NotShownError: A checkpoint cannot be read.
    """
    # -P: modules in the working folder must not be imported.
    done = run(
        [sys.executable, "-P", "-m", _MODULE, "compare", *uris],
        cwd=None,
        env=environ,
        timeout=timeout,
    )
    answer = _parse(done.stdout)
    if answer.get("event") != "result":
        reason = answer.get("message") or first_line(done.stderr[-2000:])
        raise NotShownError(f"the checkpoints cannot be compared: {reason}")
    return [Difference(**decode_floats(each)) for each in answer["differences"]]


def _parse(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            answer = load_json(line)
        except ValueError:
            # A library has printed this line.
            continue
        if isinstance(answer, dict) and "event" in answer:
            return answer
    return {}
