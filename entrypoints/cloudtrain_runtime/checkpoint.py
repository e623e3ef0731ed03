"""Checkpoints: everything that a run needs to go on as if it had never stopped.

A folder `step-00000500/` holds torch.distributed.checkpoint's files (model and optimizer, each rank writing its
share), one `rank-00000.pt` per rank (random states), `objects.pt` (schedule and scaler) and `manifest.json`, written
last. Without a manifest that matches the files, a checkpoint does not exist.
"""

from __future__ import annotations

import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cloudtrain_runtime import parallel
from cloudtrain_runtime.context import Context
from cloudtrain_runtime.contract.manifest import Checksums, Manifest, StoredFile
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.events import emit, say
from cloudtrain_runtime.storage import Storage, open_storage

MANIFEST = "manifest.json"
OBJECTS = "objects.pt"
_STEP = re.compile(r"step-(\d{8,})(?:-[0-9a-f]{8})?")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint. `state` is what `Checkpoints.save` was given besides model and optimizer."""

    storage: Storage
    name: str
    step: int
    state: Mapping[str, Any]

    @property
    def uri(self) -> str:
        """Where it lies."""
        return f"{self.storage.uri}/{self.name}"


class Checkpoints:
    """The checkpoints of one run. Every method is called by all ranks together.

    Args:
        uri: Folder or S3 prefix of this run's checkpoints.
        keep: Complete checkpoints to keep.
        place: This rank's place.
    """

    def __init__(self, uri: str, *, keep: int, place: Context) -> None:
        self.storage = open_storage(uri)
        self.keep = keep
        self.place = place

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        objects: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a checkpoint and make it visible in one step; return its uri.

        Args:
            step: Optimizer steps done.
            model: The replicated model.
            optimizer: Its optimizer.
            state: JSON values: data position, early stopping. Stands in the manifest.
            objects: What torch.save can hold: state of schedule and scaler, equal on all ranks.
        """
        began = time.monotonic()
        name = f"step-{step:08d}"
        uri = f"{self.storage.uri}/{name}"
        token = parallel.gather(self._reserve(name) if self.place.is_main else None, self.place)[0]
        if token is None:
            return uri
        workspace = self.storage.workspace(name, token)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        save(
            {"model": model_state, "optimizer": optimizer_state},
            storage_writer=FileSystemWriter(workspace, single_file_per_rank=True, sync_files=True),
        )
        if self.place.is_main:
            torch.save(dict(objects or {}), workspace / OBJECTS)
        _save_random(workspace / f"rank-{self.place.rank:05d}.pt", self.place)
        # Ranks may share the workspace, and another's file may still be growing: each answers for its own.
        own = {path.name: _stored(path) for path in workspace.iterdir() if _belongs_to(self.place.rank, path.name)}
        self.storage.add(workspace, name)
        # The gather is the barrier: after it, every rank's files are durable.
        files: dict[str, StoredFile] = {}
        for sizes in parallel.gather(own, self.place):
            files |= sizes
        if self.place.is_main:
            manifest = Manifest(
                run=self.place.run,
                attempt=secrets.token_hex(4),
                step=step,
                time=time.time(),
                world_size=self.place.world_size,
                mesh={"data": self.place.world_size},
                rng={},
                torch=torch.__version__,
                code="",
                request="",
                state=dict(state),
                files=files,
            )
            self.storage.publish(workspace, name, MANIFEST, manifest.to_json())
            seconds = time.monotonic() - began
            emit("checkpoint", step=step, uri=uri, bytes=manifest.total_bytes, seconds=seconds)
            self._retire(step)
        return uri

    def _reserve(self, name: str) -> str | None:
        """Return a token for the files of a checkpoint, or None when a whole one of this name is there already."""
        if name in self.storage.names():
            if _read(self.storage, name, report=_ignore) is not None:
                return None
            self.storage.set_aside(name, MANIFEST)
        return secrets.token_hex(4)

    def _retire(self, step: int) -> None:
        """Delete the oldest complete checkpoints beyond `keep`; the one just written always stays."""
        complete = [found for found in complete_checkpoints(self.storage, report=_ignore) if found.step <= step]
        for found in complete[: -self.keep]:
            self.storage.delete(found.name, MANIFEST)

    def find(self, resume: str) -> Found | None:
        """Return the newest complete checkpoint to start from, the same on all ranks.

        Args:
            resume: `auto` looks under this run's own uri, `never` nowhere, a uri there first of all under this run's
                own (an attempt that was restarted goes on from its own), then there.

        Raises:
            CheckpointError: `resume` names a place without a complete checkpoint.
        """
        chosen: tuple[str, str] | None = None
        missing = False
        if self.place.is_main:
            own = _newest(self.storage)
            if resume not in ("auto", "never") and own is None:
                own = _newest_at(resume)
                missing = own is None
            # After a restart within this run, `never` must not throw away what this run has done itself.
            if own is not None and not (resume == "never" and self.place.restarts == 0):
                chosen = (own.storage.uri, own.name)
        chosen, missing = parallel.gather((chosen, missing), self.place)[0]
        if missing:
            raise CheckpointError(f"checkpoint.resume: there is no complete checkpoint at {resume}")
        if chosen is None:
            return None
        return _read(open_storage(chosen[0]), chosen[1])

    def load(self, found: Found, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load model, optimizer and random states in place, and return the objects. Works at any world size.

        Raises:
            CheckpointError: it was saved from another model.
        """
        folder = found.storage.fetch(found.name)
        try:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            states: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
            reader = FileSystemReader(folder)
            # torch 2.5 loads what overlaps of a tensor of another shape, in silence.
            misfit = next(_misfits(reader.read_metadata(), model_state), None)
            if misfit is not None:
                raise CheckpointError(f"the checkpoint {found.uri} does not fit this model: {misfit}")
            # Partial, because a parameter that never had a gradient has no state in the optimizer.
            load(states, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            own = folder / f"rank-{self.place.rank:05d}.pt"
            if own.is_file():
                _load_random(own, self.place)
            # A schedule's state may be any object, so this is a pickle, as DCP's own entries are: a checkpoint is to be
            # trusted like the code that it belongs to.
            objects: dict[str, Any] = torch.load(folder / OBJECTS, weights_only=False)
            return objects
        finally:
            found.storage.release(folder)


def _misfits(metadata: Metadata, model_state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the model the checkpoint lacks, has in another shape, or has too much."""
    saved = {
        name.removeprefix("model."): list(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {name: list(value.shape) for name, value in model_state.items() if isinstance(value, torch.Tensor)}
    for name, shape in own.items():
        if name not in saved:
            yield f"it has no {name}"
        elif saved[name] != shape:
            yield f"its {name} has the shape {saved[name]}, the model's has {shape}"
    yield from (f"it has {name}, the model has not" for name in saved if name not in own)


def _stored(path: Path) -> StoredFile:
    checksums = Checksums()
    checksums.update(path.read_bytes())
    return checksums.result()


def _belongs_to(rank: int, name: str) -> bool:
    """Whether a file of a checkpoint is written by this rank (DCP's naming: `__<rank>_<n>.distcp`)."""
    return name in (f"rank-{rank:05d}.pt", *([".metadata", OBJECTS] if rank == 0 else [])) or name.startswith(
        f"__{rank}_"
    )


def _ignore(text: str) -> None:
    del text


def complete_checkpoints(storage: Storage, *, report: Callable[[str], None] = say) -> list[Found]:
    """Return the complete checkpoints, oldest first. Incomplete ones are reported and left alone."""
    found = []
    for name in storage.names():
        if _STEP.fullmatch(name):
            checkpoint = _read(storage, name, report)
            if checkpoint is not None:
                found.append(checkpoint)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _newest(storage: Storage) -> Found | None:
    complete = complete_checkpoints(storage)
    return complete[-1] if complete else None


def _newest_at(uri: str) -> Found | None:
    """Return the newest checkpoint below a uri, or the one that the uri names itself."""
    parent, _, name = uri.rstrip("/").rpartition("/")
    if _STEP.fullmatch(name):
        return _read(open_storage(parent), name)
    return _newest(open_storage(uri))


def _read(storage: Storage, name: str, report: Callable[[str], None] = say) -> Found | None:
    text = storage.read_text(name, MANIFEST)
    if text is None:
        report(f"{storage.uri}/{name} has no {MANIFEST}: it was never finished and is not used")
        return None
    try:
        manifest = Manifest.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        report(f"{storage.uri}/{name} has an unreadable {MANIFEST} ({error}) and is not used")
        return None
    wrong = manifest.misfits(storage.sizes(name))
    if wrong:
        report(f"{storage.uri}/{name} is not whole ({', '.join(wrong)}) and is not used")
        return None
    return Found(storage, name, manifest.step, manifest.state)


# ---------------------------------------------------------------- random states


def _save_random(path: Path, place: Context) -> None:
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "cuda": torch.cuda.get_rng_state(place.device) if place.device.type == "cuda" else None,
        "numpy": None,
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [name, [int(key) for key in keys], *rest]
    torch.save(states, path)


def _load_random(path: Path, place: Context) -> None:
    states = torch.load(path, weights_only=True)
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if states["cuda"] is not None and place.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], place.device)
    if states["numpy"] is not None:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
