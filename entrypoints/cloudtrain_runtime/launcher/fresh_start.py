"""The notice that a library's trainer begins at step 0 although its folder has a checkpoint.

The trainers of Transformers, TRL and Lightning continue only if the call that trains names a checkpoint. Standard
library only, and as few modules of it as possible: each Python process of a command imports this module, and nothing
happens before a script imports one of these libraries.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable

from cloudtrain_runtime.process.after_import import call_after_import

TYPE_CHECKING = False  # not from typing, whose import takes longer than this module's own
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


class _Library:
    """How a library's trainer is called, and where its checkpoints are.

    Attributes:
        module: Module of the trainer.
        method: What trains.
        argument: Names the checkpoint.
        folders: Returns where a trainer saves.
        pattern: Of a checkpoint there.
    """

    def __init__(
        self,
        *,
        module: str,
        method: str,
        argument: str,
        folders: Callable[[Any], Iterable[str | None]],
        pattern: str,
    ) -> None:
        self.module = module
        self.method = method
        self.argument = argument
        self.folders = folders
        self.pattern = pattern


def _transformers_folders(trainer: Any) -> list[str | None]:
    return [trainer.args.output_dir]


def _lightning_folders(trainer: Any) -> list[str | None]:
    return [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks]


_LIBRARIES = (
    _Library(
        module="transformers.trainer",
        method="train",
        argument="resume_from_checkpoint",
        folders=_transformers_folders,
        pattern="checkpoint-*/trainer_state.json",
    ),
    *(
        _Library(
            module=f"{package}.trainer.trainer",
            method="fit",
            argument="ckpt_path",
            folders=_lightning_folders,
            pattern="*.ckpt",
        )
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
)


def report_fresh_start() -> None:
    """Emit the event `fresh_start` when the first trainer of rank 0 leaves out a checkpoint in its folder."""
    for library in _LIBRARIES:
        call_after_import(library.module, functools.partial(_watch, library=library))


def _watch(module: Any, *, library: _Library) -> None:
    import inspect

    plain: Callable[..., Any] = getattr(module.Trainer, library.method)
    signature = inspect.signature(plain)
    has_begun = False

    @functools.wraps(plain)
    def train(trainer: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal has_begun
        if not has_begun and os.environ.get("RANK", "0") == "0":
            # A notice must not end a training.
            with contextlib.suppress(Exception):
                given = signature.bind(trainer, *arguments, **options).arguments
                _report(trainer, given.get(library.argument), library)
        has_begun = True
        return plain(trainer, *arguments, **options)

    setattr(module.Trainer, library.method, train)


def _report(trainer: Any, given: Any, library: _Library) -> None:
    """Emit the event if a trainer was given no checkpoint, and has one in its folder."""
    if given or getattr(trainer, library.argument, None):
        return
    newest = _newest_checkpoint(library.folders(trainer), library.pattern)
    if newest is None:
        return
    # Each Python process of a command imports this module at its start, and few emit events.
    from cloudtrain_runtime.process.event_log import emit

    emit("fresh_start", checkpoint=str(newest), method=library.method, argument=library.argument)


def _newest_checkpoint(folders: Iterable[str | None], pattern: str) -> Path | None:
    """Return the newest checkpoint in a trainer's folders: a file, or the folder of a file that marks it."""
    from pathlib import Path

    found = [path for folder in folders if folder for path in Path(folder).glob(pattern)]
    if not found:
        return None
    newest = max(found, key=os.path.getmtime)
    return newest.parent if os.sep in pattern else newest
