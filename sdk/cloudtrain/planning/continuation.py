"""What a run would continue from: the same training, another's, or one that is at its end already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    Manifest,
    is_training_complete,
    step_of_folder_name,
)
from cloudtrain_runtime.contract.training_identity import describe_differences, is_same_training

AUTO = "auto"


@dataclass(frozen=True)
class Continuation:
    """What is known of the checkpoint to continue from.

    Attributes:
        manifest: Its manifest, or None where there is none to continue from.
        stranger: The newest of another training, where there are only such.
        differences: How the checkpoint's run differs from this one; empty for no difference.
        warning: That nothing is left to train, or an empty text.
        doubt: That the checkpoint does not name its training, or an empty text.
    """

    manifest: Manifest | None = None
    stranger: Manifest | None = None
    differences: str = ""
    warning: str = ""
    doubt: str = ""


def find_continuation(config: RunConfig, manifests: Iterable[Manifest]) -> Continuation:
    """Choose what a run continues from, by the rule of the runtime.

    Args:
        config: Of the run, which has no checkpoints of its own yet.
        manifests: Of the complete checkpoints in the place, the newest first. No more are taken than needed.
    """
    stranger: Manifest | None = None
    for manifest in manifests:
        if config.checkpoint.resume != AUTO or is_same_training(manifest.training, config.training):
            return Continuation(
                manifest, None, _differences(config, manifest), _warning(config, manifest), _doubt(config, manifest)
            )
        stranger = stranger or manifest
    if stranger is None:
        return Continuation()
    return Continuation(stranger=stranger, differences=_differences(config, stranger))


def manifests_in(folder: Path, run: str = "") -> Iterator[Manifest]:
    """Yield the manifests of a folder's complete checkpoints, the newest first.

    Args:
        folder: A folder of checkpoints, or one checkpoint.
        run: Only those of this run; an empty text for any.
    """
    is_one = step_of_folder_name(folder.name) is not None
    candidates = (
        [folder] if is_one else [path for path in _children(folder) if step_of_folder_name(path.name) is not None]
    )
    found = [manifest for path in candidates if (manifest := _read(path)) is not None and run in ("", manifest.run)]
    yield from sorted(found, key=lambda manifest: (manifest.step, manifest.time), reverse=True)


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # the run reports what it cannot read


def _read(folder: Path) -> Manifest | None:
    try:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    is_complete = (
        DAMAGED_FILE not in sizes
        and manifest.step == step_of_folder_name(folder.name)
        and not manifest.file_mismatches(sizes)
    )
    return manifest if is_complete else None


def _differences(config: RunConfig, manifest: Manifest) -> str:
    parts = []
    if manifest.training and config.training:
        parts.append(describe_differences(manifest.training, config.training))
    if manifest.code and config.code and manifest.code != config.code:
        parts.append(f"code is {manifest.code[:12]} there and {config.code[:12]} here")
    return ", ".join(part for part in parts if part)


def _warning(config: RunConfig, manifest: Manifest) -> str:
    train = config.train
    if train is not None and is_training_complete(manifest.state, epochs=train.epochs, steps=train.steps):
        return (
            f"nothing is left to train: step {manifest.step} of run {manifest.run} is at the end already; raise "
            "train.steps or train.epochs, or start anew with checkpoint.resume=never and another checkpoint.uri"
        )
    return ""


def _doubt(config: RunConfig, manifest: Manifest) -> str:
    if config.checkpoint.resume == AUTO and config.training and not manifest.training:
        return (
            f"step {manifest.step} of run {manifest.run} does not name its training (cloudtrain 0.1 saved it): it is "
            "taken to be this one's"
        )
    return ""
