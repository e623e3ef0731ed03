"""What a rehearsal changes in a run: it ends after some steps, waits at one of them, and records its samples.

A rehearsal sets the variables; without them, nothing here has an effect. The schedule of the training is unchanged:
its end comes early, as if training were over, with a last checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract.constants import (
    REHEARSAL_HOLD_VARIABLE,
    REHEARSAL_LAST_VARIABLE,
    REHEARSAL_SAMPLES_VARIABLE,
)
from cloudtrain_runtime.contract.strict_json import dump_json
from cloudtrain_runtime.process.environment import ml_tree

_HOLD_SECONDS = 120.0
"""How long a rank waits for what is to happen to it. Then it continues."""
_POLL_SECONDS = 0.01


class Rehearsal:
    """What a rehearsal wants of this rank.

    Args:
        environ: The environment of the rank.
        rank: Index among all ranks.

    Attributes:
        is_on: Whether this run is part of a rehearsal.
    """

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self._last = int(environ.get(REHEARSAL_LAST_VARIABLE) or 0)
        self._hold = int(environ.get(REHEARSAL_HOLD_VARIABLE) or 0)
        self._records = bool(environ.get(REHEARSAL_SAMPLES_VARIABLE))
        self._folder = ml_tree(environ).rehearsal
        self._rank = rank
        self._samples: list[str] = []
        self.is_on = bool(self._last or self._hold or self._records)
        if self.is_on:
            self._folder.mkdir(parents=True, exist_ok=True)

    def is_over(self, step: int) -> bool:
        """Return whether training ends after this step."""
        return 0 < self._last <= step

    def at_step(self, step: int, is_stopping: Callable[[], bool]) -> None:
        """Record a step that has been taken, and wait if this is the step to wait at.

        A rank waits once, also if it is started again: until a stop notice, until it is killed, or for 120 s.

        Args:
            step: Optimizer steps done.
            is_stopping: Returns whether there is a stop notice.
        """
        if not self.is_on:
            return
        self._write(step)
        held = self._folder / f"held-{self._rank}"
        if step != self._hold or held.exists():
            return
        part = Path(f"{held}.part")
        part.write_text(str(os.getpid()), encoding="utf-8")
        part.replace(held)
        deadline = time.monotonic() + _HOLD_SECONDS
        while not is_stopping() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def watching(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Return the steps of a feeder, whose samples are noted when they are used, if samples are recorded."""
        if not self._records:
            return steps
        return (replace(step, batches=self._noted(step)) for step in steps)

    def _noted(self, step: Any) -> Iterator[Any]:
        for micro, batch in step:
            self._samples += digests(batch, micro.count)
            yield batch

    def _write(self, step: int) -> None:
        """Write a line for the step. It is complete before the next step begins, also if this process is killed."""
        line = {"step": step, "pid": os.getpid(), "samples": self._samples}
        with (self._folder / f"steps-{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(dump_json(line) + "\n")
        self._samples = []


def digests(batch: Any, count: int) -> list[str]:
    """Return a digest of each sample of a batch: 16 hexadecimal digits of its row in every tensor.

    A batch without rows, such as text or nested tensors, has one digest.

    Args:
        batch: Tensors in any nesting of lists, tuples and dicts.
        count: Its samples that count; the rest is a placeholder.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    if count == 0:
        return []
    leaves = [
        leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves(batch)
    ]
    tensors = [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
    rows = {len(each) if each.dim() else -1 for each in tensors}
    if len(tensors) == len(leaves) and len(rows) == 1 and min(rows) >= count:
        return [_digest([_bytes(each[row]) for each in tensors]) for row in range(count)]
    parts = [
        _bytes(each) if isinstance(each, torch.Tensor) else repr(each).encode() for each in leaves
    ]
    return [_digest(parts)]


def _bytes(tensor: Any) -> bytes:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized:
        return repr(tensor).encode()
    if not tensor.numel():
        return b""
    # View as bytes: NumPy has no bfloat16.
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _digest(parts: list[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]
