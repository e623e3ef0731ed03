"""The manifest of a checkpoint: what it holds, and how to tell that it is whole.

A checkpoint is a folder `step-00000500`, or `step-00000500-<attempt>` where another attempt has taken that name. The
manifest is its last file: without one that fits the others, the checkpoint does not exist.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cloudtrain_runtime.contract.strict_json import decode_floats, dump_json, encode_floats

MANIFEST_FILE: Final = "manifest.json"
DAMAGED_FILE: Final = "damaged.json"
"""Stands in a checkpoint that was found damaged, and says why. It is never used again, and never deleted."""

MANIFEST_VERSION: Final = 2
BLOCK_BYTES: Final = 8 * 2**20
"""Files are checked in pieces of this size, so that a rank that reads part of a file checks what it reads."""

BEST_STATE: Final = "best"
"""Entry of `Manifest.state` that names the steps with the best weights so far."""

_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?")


def step_name(step: int, attempt: str = "") -> str:
    """Return the name of a checkpoint's folder: `step-00000500`, or with an attempt `step-00000500-0a1b2c3d`."""
    return f"step-{step:08d}{'-' if attempt else ''}{attempt}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder, or None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def best_steps(state: Mapping[str, Any]) -> list[int]:
    """Return the steps that had the best weights when a state was saved, of those in the same place; the best last."""
    best = state.get(BEST_STATE) or {}
    return [int(mark["step"]) for mark in best.get("marks", ()) if not mark["place"]]


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        bytes: Its size.
        crc32: Checksum of each block of `Manifest.block_bytes`, the last one shorter, as zlib computes it.
    """

    bytes: int
    crc32: tuple[int, ...]


class Checksums:
    """Size and checksums of a file, computed while its bytes pass by."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.bytes = 0
        self._block_bytes = block_bytes
        self._whole: list[int] = []
        self._running = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        while view:
            piece = view[: self._block_bytes - self.bytes % self._block_bytes]
            self._running = zlib.crc32(piece, self._running)
            self.bytes += len(piece)
            if self.bytes % self._block_bytes == 0:
                self._whole.append(self._running)
                self._running = 0
            view = view[len(piece) :]

    def result(self) -> StoredFile:
        """Return what has been counted so far."""
        rest = (self._running,) if self.bytes % self._block_bytes else ()
        return StoredFile(self.bytes, (*self._whole, *rest))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        run: Run that has written it.
        attempt: 8 hex digits of the group of ranks that has written it; a restarted group is another attempt.
        step: Optimizer steps done.
        time: When it was complete, in seconds since 1970.
        world_size: Ranks that have written it.
        mesh: Size of each dimension of parallelism by name, such as `{"data": 4}`.
        rng: Whose random states are in it: `{"ranks": 4, "sources": ["torch", "python"]}`.
        torch: Version of PyTorch.
        code: Digest of the bundle, or an empty string outside of a run.
        request: Identity of the plan, or an empty string outside of a run.
        state: What its writer wants back besides tensors: position in the data, early stopping.
        files: Every other file of the folder by name.
        block_bytes: Size of a block of `StoredFile.crc32`.
    """

    run: str
    attempt: str
    step: int
    time: float
    world_size: int
    mesh: Mapping[str, int]
    rng: Mapping[str, Any]
    torch: str
    code: str
    request: str
    state: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    block_bytes: int = BLOCK_BYTES
    version: int = field(default=MANIFEST_VERSION)

    @property
    def total_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        content = dataclasses.asdict(self)
        content["state"] = encode_floats(content["state"])  # a script's best loss so far may be infinite
        content["files"] = {
            name: {"bytes": file.bytes, "crc32": [f"{crc:08x}" for crc in file.crc32]}
            for name, file in sorted(self.files.items())
        }
        return dump_json({**content, "crc32": _checksum(content)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read `manifest.json`.

        Raises:
            ValueError: the text is not a manifest of this version, or has changed since it was written.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("version") != MANIFEST_VERSION:
            found = content.get("version") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{MANIFEST_FILE} has version {found!r}; expected {MANIFEST_VERSION}")
        if content.pop("crc32", None) != _checksum(content):
            raise ValueError(f"{MANIFEST_FILE} has changed since it was written")
        try:
            files = {
                name: StoredFile(int(file["bytes"]), tuple(int(crc, 16) for crc in file["crc32"]))
                for name, file in content.pop("files").items()
            }
            state = decode_floats(content["state"])
            return cls(**{**content, "step": int(content["step"]), "state": state, "files": files})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{MANIFEST_FILE} is incomplete: {error}") from None

    def misfits(self, sizes: Mapping[str, int]) -> list[str]:
        """Return what is wrong with the files of the folder, one phrase each; nothing for a whole one.

        Args:
            sizes: Sizes in bytes of the files that lie there.
        """
        return [
            f"{name} is missing" if name not in sizes else f"{name} has {sizes[name]} bytes instead of {file.bytes}"
            for name, file in sorted(self.files.items())
            if sizes.get(name) != file.bytes
        ]


def _checksum(content: Mapping[str, Any]) -> str:
    # cloudtrain 0.1 wrote NaN, which a checksum must reproduce.
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"  # noqa: TID251
