"""What a plan's run would continue from, where its checkpoints are in a folder of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.errors import UserError
from cloudtrain.planning.continuation import AUTO, Continuation, find_continuation
from cloudtrain.planning.plan import Plan
from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract.file_uri import path_of

if TYPE_CHECKING:
    from cloudtrain_runtime.contract.manifest import Manifest


def add_continuation(plan: Plan) -> Plan:
    """Return a plan that names the checkpoint that its run continues from, and the differences to that run."""
    found = _local_continuation(plan)
    decisions = list(plan.decisions)
    warnings = list(plan.warnings)
    if found.manifest is not None:
        differences = f"; {found.differences}" if found.differences else ""
        decisions.append(
            f"continues from step {found.manifest.step} of run {found.manifest.run}{differences}"
        )
    if found.other_training is not None:
        warnings.append(f"submit refuses this: {_describe_other_training(found)}")
    warnings += found.warnings
    return dataclasses.replace(plan, decisions=tuple(decisions), warnings=tuple(warnings))


def reject_other_training(plan: Plan) -> None:
    """Reject a run whose checkpoint folder holds only checkpoints of another training.

    Raises:
        UserError: It does.
    """
    found = _local_continuation(plan)
    if found.other_training is not None:
        hint = (
            f"to continue from them: --set checkpoint.resume={found.other_training.run}; to start anew: another "
            "checkpoint.uri, or --set checkpoint.resume=never"
        )
        raise UserError(_describe_other_training(found), hint)


def _local_continuation(plan: Plan) -> Continuation:
    """Return the checkpoint that a run would continue from, where it is in a folder of this machine."""
    checkpoint = plan.config.checkpoint
    source = checkpoint.uri if checkpoint.resume in (AUTO, "never") else checkpoint.resume
    if checkpoint.resume == "never" or not source.startswith("file:"):
        return Continuation()
    return find_continuation(plan.config, manifests_in(path_of(source), checkpoint.resume_run))


def _describe_other_training(found: Continuation) -> str:
    saved = found.other_training
    whose = f"step {saved.step} of run {saved.run}" if saved is not None else ""
    return (
        f"the checkpoints in checkpoint.uri are another training's ({whose}: {found.differences})"
    )


def manifests_in(folder: Path, run: str = "") -> Iterator[Manifest]:
    """Yield the manifests of a folder's complete checkpoints, newest first.

    Args:
        folder: A folder of checkpoints, or one checkpoint.
        run: Only checkpoints of this run; an empty text for any run.
    """
    from cloudtrain_runtime.contract.checkpoint_folder import complete_manifests, step_of_folder

    is_checkpoint = step_of_folder(folder.name) is not None
    store = _LocalStore(folder.parent, folder.name) if is_checkpoint else _LocalStore(folder)
    yield from (each for each in complete_manifests(store) if run in ("", each.run))


class _LocalStore:
    """A folder of checkpoints on this machine, or one of them. The run reports what cannot be read."""

    def __init__(self, root: Path, only: str = "") -> None:
        self._root = root
        self._only = only

    def folders(self) -> dict[str, dict[str, int]]:
        from cloudtrain_runtime.contract.checkpoint_folder import step_of_folder

        names = [self._only]
        if not self._only:
            try:
                names = [path.name for path in self._root.iterdir()]
            except OSError:
                return {}
        return {name: self._sizes(name) for name in names if step_of_folder(name) is not None}

    def _sizes(self, folder: str) -> dict[str, int]:
        try:
            return {path.name: path.stat().st_size for path in (self._root / folder).iterdir()}
        except OSError:
            return {}

    def read(self, folder: str, name: str) -> bytes | None:
        try:
            return read_regular(self._root / folder / name)
        except OSError:
            return None
