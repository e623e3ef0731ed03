"""Checkpoints in the format of torch.distributed.checkpoint (DCP), each rank with its own shards and their checksums.

Plain DCP can read them. The manifest adds checksums, and this module verifies them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cloudtrain_runtime.checkpoint.rank_coordinator import RankCoordinator
from cloudtrain_runtime.checkpoint.safe_metadata import deserialize, read_metadata, serialize
from cloudtrain_runtime.checkpoint.storage import Storage
from cloudtrain_runtime.checkpoint.training_state import States
from cloudtrain_runtime.checkpoint.verified_reader import open_verified
from cloudtrain_runtime.contract.manifest import BLOCK_BYTES, Checksums, Manifest, StoredFile
from cloudtrain_runtime.errors import CheckpointError, DamagedError
from cloudtrain_runtime.process.thread_pool import DaemonThreadPool
from cloudtrain_runtime.s3.objects import ObjectWriter

METADATA_FILE = ".metadata"

_LARGE_BYTES = 1 << 20
"""From this size on, computing a piece's checksum takes much longer than handing it to another thread."""


class CheckpointWriter(FileSystemWriter):
    """Writes this rank's shards of one checkpoint.

    Args:
        note_bytes: Called with the number of bytes written, as they are.

    Attributes:
        files: The files that this rank has written, by name.
    """

    def __init__(self, storage: Storage, folder: str, note_bytes: Callable[[int], None]) -> None:
        # The tensors are on the host already: no copy-ahead is needed. Files are durable when they
        # are closed.
        super().__init__(
            folder, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0
        )
        self.files: dict[str, StoredFile] = {}
        self.fs = _OneFolder(self._create)
        self._storage = storage
        self._folder = folder
        self._note_bytes = note_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; return DCP's write results."""
        with _without_inner_checksums():
            return super().write_data(plan, planner)

    @contextmanager
    def _create(self, name: str) -> Iterator[io.RawIOBase]:
        # The name that DCP would give it in the end.
        name = name.removesuffix(".tmp")
        threads = DaemonThreadPool(1, "checksums")
        with self._storage.create(self._folder, name) as writer:
            stream = _Stream(writer, self._note_bytes, threads)
            try:
                yield stream
            except RuntimeError as error:
                # torch.save cleans up after a failed write, which fails, too, and only reports the
                # second error.
                raise stream.failure or error from None
            finally:
                threads.close()
        self.files[name] = stream.checksums.result()


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint and compares every block with the manifest before it is used.

    Raises:
        DamagedError: on reading, on the rank that found the damage.
        CheckpointError: on reading the metadata, if it names classes that no checkpoint contains.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        super().__init__(folder)
        self.fs = _OneFolder(self._open)
        self._storage = storage
        self._folder = folder
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata, without DCP's own reader, which would run code that the file names."""
        # These are options for per-rank metadata files, which cloudtrain does not write.
        del args, kwargs
        with self.fs.create_stream(METADATA_FILE, "rb") as file:
            data = file.read()
        try:
            metadata = read_metadata(data)
            _check_extents(metadata, self._manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{version_difference(self._manifest)}") from None
        return metadata

    def check(self) -> None:
        """Parse what a load parses: the metadata, and each entry that is not a tensor.

        Raises:
            CheckpointError: a load cannot parse it.
            DamagedError: its bytes are not those that were written.
        """
        metadata = self.read_metadata()
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, BytesStorageMetadata):
                continue
            extent = metadata.storage_data[MetadataIndex(name)]
            with self.fs.create_stream(extent.relative_path, "rb") as file:
                file.seek(extent.offset)
                data = file.read(extent.length)
            try:
                deserialize(data, name)
            except CheckpointError as error:
                raise CheckpointError(f"{error}{version_difference(self._manifest)}") from None

    def _open(self, name: str) -> AbstractContextManager[io.RawIOBase]:
        stored = self._manifest.files.get(name)
        if stored is None:
            raise DamagedError(f"{name} is not in the manifest")
        return open_verified(self._storage, self._folder, name, stored, self._manifest.block_bytes)


def version_difference(manifest: Manifest) -> str:
    """Return the versions of PyTorch that wrote and read a checkpoint, for the end of an error; empty if equal."""
    if not manifest.torch or manifest.torch == torch.__version__:
        return ""
    return f" (saved with PyTorch {manifest.torch}, read with PyTorch {torch.__version__})"


def _check_extents(metadata: Metadata, manifest: Manifest) -> None:
    """Check that the bytes of every entry are within a file of the checkpoint."""
    for name, stored in metadata.state_dict_metadata.items():
        # An entry that is not a tensor is one piece without offsets.
        chunks: list[torch.Size | None] = [None]
        if isinstance(stored, TensorStorageMetadata):
            chunks = [chunk.offsets for chunk in stored.chunks]
        for offsets in chunks:
            extent = metadata.storage_data.get(MetadataIndex(name, offsets))
            if extent is None:
                raise CheckpointError(f"its metadata does not name the bytes of {name}")
            file = manifest.files.get(extent.relative_path)
            left = -1 if file is None else file.bytes - extent.offset
            if extent.offset < 0 or not 0 <= extent.length <= left:
                raise CheckpointError(
                    f"its metadata places {name} outside of the checkpoint's files"
                )


class PlainLoadPlanner(DefaultLoadPlanner):
    """Loads those requested entries that exist, tensors and plain values. Its base class would run code in an entry.

    A parameter that never had a gradient has no state in the optimizer, and a rank that did not exist has no random
    states.
    """

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store an entry that is not a tensor at its path."""
        name = read_item.dest_index.fqn
        *outer, last = self.mappings[name]
        level: Any = self.original_state_dict
        for key in outer:
            level = level[key]
        level[last] = deserialize(value.getvalue(), name)


@dataclass(frozen=True)
class ShardPlan:
    """What this rank writes."""

    # what this rank could write: everything that it holds
    local: SavePlan
    # the part that it writes
    own: SavePlan
    # DCP's metadata of the complete checkpoint, on rank 0 only
    metadata: Metadata | None


class StagingPlanner(DefaultSavePlanner):
    """Divides the state between the ranks, and holds a copy of this rank's share on the host.

    Replicated tensors are divided, too, so the copy is only this rank's part. Its memory is reused for the next
    checkpoint, and the plan while the structure of the state stays the same.
    """

    def __init__(self, ranks: RankCoordinator) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self._ranks = ranks
        self._staged: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self._cached: ShardPlan | None = None

    def divide(self, states: States, unshared: frozenset[str]) -> ShardPlan:
        """Return what this rank writes. A collective operation of all ranks.

        Args:
            states: As `training_state.collect_states` returns them.
            unshared: Names of values that each rank may have its own of. The lowest rank's value is saved.

        Raises:
            SaveError: the plan failed on some rank.
        """
        local = self._ranks.run_on_all(lambda: self._plan_locally(states))
        cached = self._cached
        if cached is not None and not any(self._ranks.all_gather(lambda: local != cached.local)):
            return cached
        plans = self._ranks.gather_on_main(lambda: (local, unshared))
        own, metadata = self._ranks.scatter_from_main(lambda: self._plan_globally(plans))
        self._cached = ShardPlan(local, self.finish_plan(own), metadata)
        return self._cached

    def _plan_locally(self, states: States) -> SavePlan:
        self.set_up_planner(states, None, self._ranks.is_main)
        return self.create_local_plan()

    def _plan_globally(
        self, plans: list[tuple[SavePlan, frozenset[str]]]
    ) -> list[tuple[SavePlan, Metadata | None]]:
        shared, metadata = self.create_global_plan(list(_without_duplicates(plans)))
        shared = FileSystemWriter("").prepare_global_plan(shared)
        return [(plan, None if rank else metadata) for rank, plan in enumerate(shared)]

    def stage(self, plan: SavePlan) -> None:
        """Copy the plan's data to the host. On CUDA the copies are still in progress when this returns."""
        self._staged = {item.index: self._copy(item) for item in plan.items}

    def _copy(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(item)
        if item.type == WriteItemType.BYTE_IO or not isinstance(data, torch.Tensor):
            # The data were created for this plan.
            return data
        source = data.detach()
        # The buffer of the previous save.
        buffer = self._staged.get(item.index)
        if (
            not isinstance(buffer, torch.Tensor)
            or buffer.shape != source.shape
            or buffer.dtype != source.dtype
        ):
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 (as the base has it)
        """Return the data to write for an entry; an entry that is not a tensor must be loadable again."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(serialize(object, write_item.index.fqn))
        return super().transform_object(write_item, object)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the copy."""
        return self._staged[write_item.index]


def _without_duplicates(plans: list[tuple[SavePlan, frozenset[str]]]) -> Iterator[SavePlan]:
    """Yield each rank's plan without the unshared values that a lower rank writes.

    A set of buffers is then saved as one rank has it, and not mixed from several ranks.
    """
    seen: set[str] = set()
    for plan, unshared in plans:
        names = {item.index.fqn for item in plan.items} & unshared
        written = names & seen
        yield replace(plan, items=[item for item in plan.items if item.index.fqn not in written])
        seen |= names


@contextmanager
def _without_inner_checksums() -> Iterator[None]:
    """Make torch.save omit the checksum of each tensor, which is never compared and slower than the manifest's.

    torch 2.6 and newer; it applies to this thread only.
    """
    serialization: Any = torch.serialization
    if not hasattr(serialization, "set_crc32_options"):
        yield
        return
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)


class _Stream(io.RawIOBase):
    """A file being written: counts bytes, computes checksums and forwards the data.

    Args:
        threads: Compute the checksum of a large piece while this thread writes it.
    """

    def __init__(
        self, writer: ObjectWriter, note_bytes: Callable[[int], None], threads: DaemonThreadPool
    ) -> None:
        super().__init__()
        self.checksums = Checksums()
        self._threads = threads
        self.failure: OSError | None = None
        self._writer = writer
        self._note_bytes = note_bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        # A tensor is one piece, which a client may copy entirely, and its progress would be
        # invisible.
        for start in range(0, len(view), BLOCK_BYTES):
            self._write_piece(view[start : start + BLOCK_BYTES])
        return len(view)

    def _write_piece(self, piece: memoryview) -> None:
        if len(piece) < _LARGE_BYTES:
            self.checksums.update(piece)
            self._forward(piece)
            return
        # Both leave the interpreter to other threads while they work.
        summed = self._threads.submit(self.checksums.update, piece)
        try:
            self._forward(piece)
        finally:
            # The caller may change the bytes as soon as this returns.
            summed.result()

    def _forward(self, piece: memoryview) -> None:
        try:
            self._writer.write(piece)
        except OSError as error:
            self.failure = error
            raise
        self._note_bytes(len(piece))

    def tell(self) -> int:
        return self.checksums.bytes


class _OneFolder(FileSystem):
    """DCP's file system interface, for one reserved folder whose files a function opens by name."""

    def __init__(self, open_file: Callable[[str], AbstractContextManager[io.RawIOBase]]) -> None:
        self._open_file = open_file

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        del mode
        with self._open_file(str(path)) as file:
            yield file

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        del path
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing: the folder does not count before its manifest exists."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the folder is reserved already."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: there are no files to remove."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        del path
        return False
