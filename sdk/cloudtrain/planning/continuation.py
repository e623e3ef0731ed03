"""The checkpoint that a run would continue from, by the same rule as in the runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain_runtime.contract import RunConfig
from cloudtrain_runtime.contract.training_identity import describe_differences, is_same_training

if TYPE_CHECKING:
    from cloudtrain_runtime.contract.manifest import Manifest

AUTO = "auto"
NOTHING_LEFT = "nothing is left to train"
"""Start of the warning about a checkpoint that is the end of its training."""


@dataclass(frozen=True)
class Continuation:
    """The checkpoint that a run would continue from.

    Attributes:
        manifest: Its manifest, or None when there is no checkpoint of this training.
        other_training: Manifest of the newest checkpoint, when all of them are of other trainings.
        differences: How the checkpoint's run differs from this one; empty for no difference.
        warnings: That nothing is left to train, or that the checkpoint does not name its training.
    """

    manifest: Manifest | None = None
    other_training: Manifest | None = None
    differences: str = ""
    warnings: tuple[str, ...] = ()


def find_continuation(config: RunConfig, manifests: Iterable[Manifest]) -> Continuation:
    """Return the checkpoint that a run continues from, by the same rule as in the runtime.

    Args:
        config: Configuration of the run, which has no checkpoints yet.
        manifests: Manifests of the complete checkpoints, newest first. They are read as far as needed.
    """
    other_training: Manifest | None = None
    for manifest in manifests:
        if config.checkpoint.resume != AUTO or is_same_training(manifest.training, config.training):
            return Continuation(
                manifest,
                differences=_differences(config, manifest),
                warnings=tuple(_warnings(config, manifest)),
            )
        other_training = other_training or manifest
    if other_training is None:
        return Continuation()
    return Continuation(
        other_training=other_training, differences=_differences(config, other_training)
    )


def _differences(config: RunConfig, manifest: Manifest) -> str:
    parts = []
    if manifest.training and config.training:
        parts.append(describe_differences(manifest.training, config.training))
    if manifest.code and config.code and manifest.code != config.code:
        parts.append(f"code is {manifest.code[:12]} there and {config.code[:12]} here")
    return ", ".join(part for part in parts if part)


def _warnings(config: RunConfig, manifest: Manifest) -> Iterator[str]:
    from cloudtrain_runtime.contract.manifest import is_training_complete

    train = config.train
    saved = f"step {manifest.step} of run {manifest.run}"
    if train is not None and is_training_complete(
        manifest.state, epochs=train.epochs, steps=train.steps
    ):
        yield (
            f"{NOTHING_LEFT}: {saved} is the last step; increase train.steps or train.epochs, or start again "
            "with checkpoint.resume=never and another checkpoint.uri"
        )
    if config.checkpoint.resume == AUTO and config.training and not manifest.training:
        yield f"{saved} does not name its training (cloudtrain 0.1 saved it): assuming that it is this one"
