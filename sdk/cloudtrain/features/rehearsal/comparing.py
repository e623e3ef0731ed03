"""Comparison of the final states of runs, in a process of the runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloudtrain.features.rehearsal.runs import Ended, NotShownError, RunDriver, first_line
from cloudtrain.features.rehearsal.shared_imports import with_shared_imports
from cloudtrain.features.rehearsal.workspace import Workspace
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


def compare(workspace: Workspace, driver: RunDriver, runs: Sequence[Ended]) -> list[Difference]:
    """Return how the last checkpoints of runs differ from that of the first one.

    Raises:
        NotShownError: A checkpoint is missing or cannot be read, or there was not enough time.
    """
    saved = [each.status.progress.checkpoint for each in runs]
    uris = [each.uri for each in saved if each is not None]
    if len(uris) < len(runs):
        raise NotShownError("a run has no last checkpoint")
    try:
        # -P: modules in the working folder must not be imported.
        command = [sys.executable, "-P", "-m", _MODULE, "compare", *uris]
        done = workspace.run(
            with_shared_imports(command, driver.imports),
            cwd=workspace.folder,
            env=driver.runner.environ(),
            timeout=max(1.0, driver.seconds_left),
        )
    except subprocess.TimeoutExpired:
        text = f"no time was left to compare the checkpoints: {driver.more_time}"
        raise NotShownError(text, is_failure=False) from None
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
