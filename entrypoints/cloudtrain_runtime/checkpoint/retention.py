"""Retention of checkpoints (`checkpoint.keep`): which ones a save deletes. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.contract.manifest import best_steps
from cloudtrain_runtime.contract.saved_checkpoint import DAMAGED, UNREADABLE, oldest_kept


def expired_folders(
    storage: Storage, *, run: str, step: int, keep: int, state: Mapping[str, Any]
) -> list[str]:
    """Return the folders to delete: complete checkpoints beyond those to keep, and older unfinished ones.

    Only folders that this run wrote are returned: another run's checkpoints are that run's to delete. Checkpoints newer
    than `step`, which was just saved with `state`, are ignored. Kept are:

    - damaged and unreadable checkpoints, which may be all that is left of a run;
    - the checkpoint with the best weights, or with the next best when that one could not be saved.
    """
    records = [
        record
        for record in list_checkpoints(storage)
        if record.step <= step and (record.run or "") == run
    ]
    steps = sorted({record.step for record in records if record.is_complete})
    oldest = oldest_kept(steps, keep)
    if oldest is None:
        return []
    best = [each for each in best_steps(state) if each in steps][-1:]
    return [
        record.name
        for record in records
        if record.state not in (DAMAGED, UNREADABLE)
        and record.step < oldest
        and not (record.is_complete and record.step in best)
    ]
