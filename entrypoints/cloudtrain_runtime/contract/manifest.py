"""The manifest of a checkpoint: its content, and checksums to verify that it is complete.

A checkpoint is a folder `step-00000500`, or `step-00000500-<attempt>` if another attempt already uses that name. The
manifest is written last: without a manifest that matches the other files, the checkpoint does not exist.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cloudtrain_runtime.contract.format_version import check_not_newer
from cloudtrain_runtime.contract.json_checks import (
    MismatchError,
    ObjectSchema,
    Validator,
    array,
    count,
    integer,
    json_object,
    timestamp,
)
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.saved_checkpoint import size_mismatches
from cloudtrain_runtime.contract.strict_json import (
    decode_floats,
    dump_json,
    encode_floats,
    load_json,
)

MANIFEST_FILE: Final = "manifest.json"
DAMAGED_FILE: Final = "damaged.json"
"""File in a checkpoint that was found damaged, with the reason. Such a checkpoint is never used again nor deleted."""

MANIFEST_VERSION: Final = 2
BLOCK_BYTES: Final = 8 * 2**20
"""Files have a checksum per block of this size, so that a rank can verify the part of a file that it reads."""

BEST_STATE: Final = "best"
"""Entry of `Manifest.state` that names the steps with the best weights so far."""

_NAME = lazy_pattern(r"step-(\d{8,15})(?:-([0-9a-f]{8}))?", re.ASCII)


def checkpoint_folder_name(step: int, attempt: str = "") -> str:
    """Return the name of a checkpoint's folder: `step-00000500`, or with an attempt `step-00000500-0a1b2c3d`."""
    name = f"step-{step:08d}"
    return f"{name}-{attempt}" if attempt else name


def step_of_folder_name(name: str) -> int | None:
    """Return the step of a checkpoint's folder, or None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def best_steps(state: Mapping[str, Any]) -> list[int]:
    """Return the steps with the best weights in the same folder when a state was saved, the best last."""
    best = state.get(BEST_STATE)
    # A script may store anything under that name.
    marks = best.get("marks") if isinstance(best, Mapping) else None
    if not isinstance(marks, list | tuple):
        return []
    found = [mark for mark in marks if isinstance(mark, Mapping)]
    # Those with a place are in the folder of another run.
    own = [mark for mark in found if not mark.get("place")]
    return [mark["step"] for mark in own if isinstance(mark.get("step"), int)]


def is_training_complete(
    state: Mapping[str, Any], *, epochs: int | None, steps: int | None
) -> bool:
    """Return whether a Task's training of this length is complete in a checkpoint's state."""
    data = state.get("data")
    if not isinstance(data, Mapping):
        return False
    length = epochs
    done = data.get("epoch")
    if steps is not None:
        # A number of steps counts before a number of epochs.
        length = steps
        done = data.get("step")
    return length is not None and isinstance(done, int) and done >= length


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint."""

    # its size
    bytes: int
    # checksum of each block of `Manifest.block_bytes`, the last one shorter, as zlib computes it
    crc32: tuple[int, ...]


class Checksums:
    """Computes the size and checksums of a file from a stream of its bytes."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.bytes = 0
        self._block_bytes = block_bytes
        self._complete: list[int] = []
        self._running = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data).cast("B")
        while view:
            piece = view[: self._block_bytes - self.bytes % self._block_bytes]
            self._running = zlib.crc32(piece, self._running)
            self.bytes += len(piece)
            if self.bytes % self._block_bytes == 0:
                self._complete.append(self._running)
                self._running = 0
            view = view[len(piece) :]

    def result(self) -> StoredFile:
        """Return size and checksums of the bytes so far."""
        rest = (self._running,) if self.bytes % self._block_bytes else ()
        return StoredFile(self.bytes, (*self._complete, *rest))


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        run: Run that wrote it.
        attempt: 8 hex digits of the group of ranks that wrote it; a restarted group is another attempt.
        step: Optimizer steps done.
        time: When it was completed, in seconds since 1970.
        world_size: Number of ranks that wrote it.
        mesh: Size of each dimension of parallelism by name, such as `{"data": 4}`.
        rng: The saved random states: `{"ranks": 4, "sources": ["torch", "python"]}`.
        torch: Version of PyTorch.
        code: Digest of the bundle, or an empty string outside of a run.
        request: Identity of the plan, or an empty string outside of a run.
        state: JSON values of the training: position in the data, early stopping.
        files: Every other file of the folder by name.
        block_bytes: Size of a block of `StoredFile.crc32`.
        training: Identity of the training (see training_identity.py); empty if unknown, as in cloudtrain 0.1.
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
    training: Mapping[str, Any] = field(default_factory=dict)
    version: int = field(default=MANIFEST_VERSION)

    @property
    def total_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        content = dataclasses.asdict(self)
        for name in ("state", "training"):
            # A script's best loss so far may be infinite.
            content[name] = encode_floats(content[name])
        content["files"] = {
            name: {"bytes": file.bytes, "crc32": [f"{crc:08x}" for crc in file.crc32]}
            for name, file in sorted(self.files.items())
        }
        return dump_json({**content, "crc32": _checksum(content)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse `manifest.json`. Unknown fields are ignored.

        Raises:
            NewerFormatError: the text has a newer version.
            ValueError: the text is not a manifest of this version, or has changed since it was written.
        """
        try:
            content = load_json(text)
        except ValueError as error:
            raise ValueError(f"{MANIFEST_FILE} is not JSON: {error}") from None
        check_not_newer(MANIFEST_FILE, content, MANIFEST_VERSION)
        version = content.get("version") if isinstance(content, dict) else None
        if version != MANIFEST_VERSION or isinstance(version, bool):
            found = repr(version)[:40] if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"{MANIFEST_FILE} has version {found}; expected {MANIFEST_VERSION}")
        if content.pop("crc32", None) != _checksum(content):
            raise ValueError(f"{MANIFEST_FILE} has changed since it was written")
        try:
            return _read_fields(content)
        except MismatchError as error:
            raise ValueError(f"{MANIFEST_FILE} is not valid: {error}") from None

    def file_mismatches(self, sizes: Mapping[str, int]) -> list[str]:
        """Return one phrase for each file that is missing or differs from its size in bytes in `sizes`."""
        return size_mismatches({name: (file.bytes,) for name, file in self.files.items()}, sizes)


def _checksum(content: Mapping[str, Any]) -> str:
    # cloudtrain 0.1 wrote NaN, which the checksum must reproduce.
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"  # noqa: TID251


_RUN = lazy_pattern(r"[a-zA-Z0-9](?:-*[a-zA-Z0-9])*", re.ASCII)
_LONGEST_RUN = 63
"""A run id is the name of a training job, which SageMaker limits so. Names outside of a run may have any such form."""

_LARGEST_BLOCK = 2**28
_MOST_RANKS = 2**20


def check_run_id(value: Any) -> str:
    """Return the run id in a file of a checkpoint; an empty string means none.

    Raises:
        MismatchError: the value is not a run id.
    """
    if not isinstance(value, str) or len(value) > _LONGEST_RUN:
        raise MismatchError("a run id", value)
    if value and not _RUN.fullmatch(value):
        raise MismatchError("a run id", value)
    return value


def _matching(pattern: str, expected: str) -> Validator:
    compiled = re.compile(pattern, re.ASCII)

    def check(value: Any) -> str:
        if not isinstance(value, str) or compiled.fullmatch(value) is None:
            raise MismatchError(expected, value)
        return value

    return check


def _within(least: int, most: int) -> Validator:
    def check(value: Any) -> int:
        if not least <= integer(value) <= most:
            raise MismatchError(f"an integer from {least} to {most}", value)
        return int(value)

    return check


def _each(name_check: Validator, check: Validator) -> Validator:
    def apply(value: Any) -> dict[str, Any]:
        found = {}
        for name, part in json_object(value).items():
            try:
                found[name_check(name)] = check(part)
            except MismatchError as error:
                raise error.below(ascii(name)[1:41]) from None
        return found

    return apply


def _object(value: Any) -> dict[str, Any]:
    return decode_floats(json_object(value))  # type: ignore[no-any-return]


_LABEL: Final = _matching(r"[!-~ ]{0,200}", "printable ASCII text of at most 200 characters")
_FILE_NAME: Final = _matching(
    r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}", "the name of a file in the folder"
)
_CRC: Final = _matching(r"[0-9a-f]{8}", "8 hex digits")
_STORED: Final = ObjectSchema({"bytes": count, "crc32": array(_CRC)})
_FIELDS: Final[Mapping[str, Validator]] = {
    "run": check_run_id,
    "attempt": _matching(r"[0-9a-f]{8}", "8 hex digits"),
    "step": count,
    "time": timestamp,
    "world_size": _within(1, _MOST_RANKS),
    "mesh": _each(_LABEL, _within(1, _MOST_RANKS)),
    "rng": _object,
    "torch": _LABEL,
    "code": _LABEL,
    "request": _LABEL,
    "state": _object,
    "files": _each(_FILE_NAME, _STORED),
    "block_bytes": _within(1, _LARGEST_BLOCK),
    "training": _object,
}


def _read_fields(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest in a JSON object."""
    found = ObjectSchema(_FIELDS)({"training": {}, **content})
    block_bytes = found["block_bytes"]
    files = {}
    for name, file in found["files"].items():
        blocks = -(-file["bytes"] // block_bytes)
        if len(file["crc32"]) != blocks:
            raise MismatchError(f"{blocks} checksums", file["crc32"], f"files.{name}.crc32")
        checksums = tuple(int(crc, 16) for crc in file["crc32"])
        files[name] = StoredFile(file["bytes"], checksums)
    others = {name: found[name] for name in _FIELDS if name != "files"}
    return Manifest(**others, files=files)
