"""Stream of samples from many files: each exactly once in an epoch, even if the number of readers changes."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from cloudtrain_runtime.contract.strict_json import load_json
from cloudtrain_runtime.data.global_order import TABLE_LENGTH, GlobalOrder, orders_of_seeds
from cloudtrain_runtime.data.position import ReaderShare
from cloudtrain_runtime.errors import CheckpointError, TaskError
from cloudtrain_runtime.process.environment import ml_tree
from cloudtrain_runtime.process.seeds import IsolatedRandomState, random_number

_LANES = 64
_END: Any = object()

LanePosition = tuple[int, int, int]
"""Position of a lane: samples returned, then the file (in the lane's order) and sample at which its block begins."""

_START: LanePosition = (0, 0, 0)


class FileStream(IterableDataset[Any]):
    """The samples of many files, read one after the other: a folder of shards, a channel in File or FastFile mode.

        def read(path):
            with path.open() as lines:
                yield from map(json.loads, lines)

        FileStream(context().channels["train"], read, shuffle=256)

    Each epoch has its own order of files. Files are assigned to lanes, and lanes to ranks and their loader workers, so
    each file is read once in an epoch; a batch takes samples from all lanes of its reader in turn. A run that is killed
    and resumed uses each sample exactly once, even on another number of ranks. Use many files of about equal length, at
    least one for each rank and worker: a rank that has read all of its files waits for the others.

    Args:
        files: A folder (all files below it except hidden ones), a pattern such as `/data/*.tar`, or a list of files.
        read: Yields the samples of a file, in the same order on every call. The random numbers that it draws from
            torch, Python or NumPy are seeded by the epoch and the position.
        shuffle: Samples of a lane that are shuffled together in memory; below 2 they keep the order of their file.
        lanes: Number of files that all ranks together read at the same time; at least one for each rank and worker.
        sharded: Whether each host has different files. By default the setting of the job's channel that has the files.
    """

    def __init__(
        self,
        files: str | Path | Iterable[str | Path],
        read: Callable[[Path], Iterable[Any]],
        *,
        shuffle: int = 0,
        lanes: int = _LANES,
        sharded: bool | None = None,
    ) -> None:
        if lanes < 1 or shuffle < 0:
            raise TaskError(
                f"FileStream: lanes must be at least 1 and shuffle at least 0; they are {lanes}, {shuffle}"
            )
        self.read = read
        self.block = max(shuffle, 1)
        self.lanes = lanes
        self.root, self.names = _listed(files)
        self.sharded = _is_sharded(self.root) if sharded is None else sharded
        if not self.names:
            why = ""
            if self.sharded:
                why = " (a channel with sharded: true needs at least one file for each instance)"
            raise TaskError(f"FileStream: there are no files in {files}{why}")

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in the order of a single process in epoch 0 with seed 0."""
        opened = FileSource(self, ReaderShare(0, 1)).open(0, 0, 0, 1)
        while samples := opened.take(1):
            yield from samples

    def path(self, index: int) -> Path:
        """Return one of the files."""
        return self.root / self.names[index]

    @property
    def fingerprint(self) -> int:
        """A checksum of the list of files."""
        return zlib.crc32("\0".join(self.names).encode())


def _listed(files: str | Path | Iterable[str | Path]) -> tuple[Path, list[str]]:
    """Return a folder and the sorted files below it, which do not depend on the location of the folder."""
    if isinstance(files, (str, Path)):
        folder = Path(files)
        if folder.is_dir():
            return folder, sorted(_below(folder))
        import glob

        found = [Path(name) for name in glob.glob(str(files), recursive=True)]  # noqa: PTH207 (a pattern may be absolute)
        paths = [path for path in found if path.is_file()]
    else:
        paths = [Path(path) for path in files]
    if not paths:
        return Path(), []
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    return root, sorted(path.absolute().relative_to(root).as_posix() for path in paths)


def _below(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        at = Path(parent).relative_to(folder)
        yield from ((at / name).as_posix() for name in names if not name.startswith("."))


def _is_sharded(root: Path) -> bool:
    """Whether a folder is in a channel that SageMaker shards over the instances."""
    tree = ml_tree(os.environ)
    config = tree.config / "inputdataconfig.json"
    if not config.is_file():
        return False
    channels = load_json(config.read_text())
    return any(
        channels[name].get("S3DistributionType") == "ShardedByS3Key"
        for name in channels
        if root.absolute().is_relative_to((tree.data / name).absolute())
    )


class FileSource:
    """The files of a FileStream that one rank reads, and the positions of its lanes.

    Loader workers get copies when an epoch starts.

    Args:
        host: Index of this host's list of files, if each host has its own.
        hosts: Number of such lists.

    Attributes:
        global_size: Samples of a global batch.
    """

    global_size = 0

    def __init__(
        self, stream: FileStream, share: ReaderShare, host: int = 0, hosts: int = 1
    ) -> None:
        self._stream = stream
        self._share = share
        self._host = host
        self._hosts = hosts
        self.restart()

    @property
    def most_workers(self) -> int:
        """Most reader processes of a rank."""
        # A lane has one reader at most.
        return max(1, self._lanes // self._share.size)

    @property
    def note(self) -> str | None:
        """A note for the user, or None."""
        if self._lanes >= self._share.size:
            return None
        what = "lanes"
        cure = "give FileStream more lanes"
        if len(self._stream.names) <= self._stream.lanes:
            what = "files"
            cure = "store the data as more files"
        return f"warning: {self._lanes} {what} for {self._share.size} ranks: some ranks have no data and only wait; {cure}"

    def restart(self) -> None:
        """Move to the start of an epoch."""
        self._lanes = min(self._stream.lanes, len(self._stream.names))
        self._block = self._stream.block
        self._marks: dict[int, LanePosition] = {}

    def open(self, seed: int, epoch: int, role: int, roles: int) -> _OpenLanes:
        """Return the remaining samples of an epoch for one of this rank's readers."""
        stream = self._stream
        rank = self._share.rank
        size = self._share.size
        order = GlobalOrder(len(stream.names), random_number(seed, self._host) >> 1, epoch)
        lanes = []
        for lane in range(self._lanes):
            # Lanes go to the roles in turn, and those of one role to the ranks in turn.
            if lane % roles != role or lane // roles % size != rank:
                continue
            lane_seed = random_number(seed, self._host, lane) >> 1
            lanes.append(
                _Lane(
                    stream=stream,
                    number=lane,
                    files=order.at(torch.arange(lane, len(stream.names), self._lanes)).tolist(),
                    seed=(lane_seed, epoch),
                    block=self._block,
                    mark=self._marks.get(lane, _START),
                )
            )
        # Each block has random states of its own, and a single sample those of its batch.
        is_isolated = self._block > 1
        return _OpenLanes(lanes, stream, (self._host, rank, role), is_isolated=is_isolated)

    def advance(self, marks: Mapping[int, LanePosition]) -> None:
        """Record the position after a batch that has been used."""
        self._marks.update(marks)

    def own_state(self) -> Any:
        """Return this rank's part of the position."""
        return (
            self._host,
            self._stream.fingerprint,
            len(self._stream.names),
            self._lanes,
            self._marks,
        )

    def global_state(self, states: list[Any]) -> dict[str, Any]:
        """Return the position of all ranks as JSON values, from the `own_state` of each data rank."""
        sources: list[dict[str, Any]] = [{} for _ in range(self._hosts)]
        for host, fingerprint, files, lanes, marks in states:
            if not sources[host]:
                sources[host] = {
                    "files": files,
                    "names": fingerprint,
                    "lanes": [list(_START) for _ in range(lanes)],
                }
            lanes_so_far = sources[host]["lanes"]
            for lane, mark in marks.items():
                # For a lane that another rank reads since the resume, this rank has an older
                # position.
                lanes_so_far[lane] = max(lanes_so_far[lane], list(mark))
        return {"kind": "files", "block": self._block, "sources": sources}

    def resume(self, state: Mapping[str, Any], samples: int, size: int) -> list[str]:  # noqa: ARG002 (of other sources)
        """Move to a saved position in the middle of an epoch; return notes for the user.

        `state` is the result of `global_state` of a run with `size` shares, after `samples` samples of all ranks. A
        CheckpointError says that the saved run read other data.
        """
        if state.get("kind") != "files":
            raise CheckpointError(
                _OTHER.format("was saved in the middle of an epoch of no FileStream")
            )
        if len(state["sources"]) != self._hosts:
            counts = f"{len(state['sources'])} instances, and there are {self._hosts} now"
            raise CheckpointError(
                _OTHER.format(f"was saved when the channel's files were divided among {counts}")
            )
        own = state["sources"][self._host]
        if own["names"] != self._stream.fingerprint:
            files = f"{own['files']:,} files and has {len(self._stream.names):,}"
            raise CheckpointError(
                _OTHER.format(f"was saved when {self._stream.root} had other files ({files})")
            )
        self._block = state["block"]
        self._lanes = len(own["lanes"])
        self._marks = {
            lane: (given, file, skip) for lane, (given, file, skip) in enumerate(own["lanes"])
        }
        return []


_OTHER = (
    "the checkpoint {}: the remaining samples are unknown. Resume with the same data and instances, from a "
    "checkpoint at the end of an epoch, or start a new run with checkpoint.resume: never"
)


class _OpenLanes:
    """A reader's lanes. The next sample is from the lane with the fewest so far, which makes a resume bit-exact.

    Attributes:
        is_isolated: Whether `take` does not affect the random states.
    """

    def __init__(
        self,
        lanes: list[_Lane],
        stream: FileStream,
        place: tuple[int, ...],
        *,
        is_isolated: bool,
    ) -> None:
        self.is_isolated = is_isolated
        self._place = place
        self._given = sum(lane.given for lane in lanes)
        self._stream = stream
        # The lanes of the last samples.
        self._used: dict[int, _Lane] = {}
        self._samples = self._in_turn(lanes)

    def key(self) -> tuple[int, ...]:
        """Return a key that is unique to the next batch of the epoch."""
        return *self._place, self._given

    def take(self, count: int) -> list[Any]:
        """Return `count` samples, fewer at the end."""
        self._used.clear()
        samples = list(islice(self._samples, count))
        self._given += len(samples)
        return samples

    def _in_turn(self, lanes: list[_Lane]) -> Iterator[Any]:
        """Yield the samples. In each turn, the lanes with the fewest so far give one each."""
        used = self._used
        while lanes:
            fewest = min(lane.given for lane in lanes)
            ended: list[_Lane] = []
            for lane in lanes:
                if lane.given > fewest:
                    continue
                sample = next(lane.samples, _END)
                if sample is _END:
                    ended.append(lane)
                    continue
                lane.given += 1
                used[lane.number] = lane
                yield sample
            if ended:
                lanes = [lane for lane in lanes if lane not in ended]

    def marks(self) -> dict[int, LanePosition]:
        """Return the position after the last samples."""
        return {number: lane.mark for number, lane in self._used.items()}

    def any_sample(self) -> list[Any]:
        """Return a list of any one sample of the source, empty if it has none."""
        for index in range(len(self._stream.names)):
            for sample in self._stream.read(self._stream.path(index)):
                return [sample]
        return []


class _Lane:
    """A sequence of files, read in shuffled blocks.

    Attributes:
        number: Index among all lanes.
        given: Samples used so far; whoever takes one from `samples` counts it here.
        samples: The remaining samples.
    """

    def __init__(
        self,
        stream: FileStream,
        number: int,
        files: list[int],
        seed: tuple[int, int],
        block: int,
        mark: LanePosition,
    ) -> None:
        self.number = number
        self._stream = stream
        self._files = files
        self._size = block
        self._seed = seed
        self.given, self._file, self._skip = mark
        # Where the present block begins in the files, and where it ends in the lane.
        self._begin = (self._file, self._skip)
        self._end = self.given
        self.samples = self._in_files() if block == 1 else self._in_blocks()

    @property
    def mark(self) -> LanePosition:
        """The position after the samples so far."""
        if self._size == 1 or self.given == self._end:
            return self.given, self._file, self._skip
        return self.given, *self._begin

    def _in_files(self) -> Iterator[Any]:
        """Yield the samples in the order of their files."""
        while self._file < len(self._files):
            for used, sample in enumerate(self._open_file(), self._skip + 1):
                self._skip = used
                yield sample
            self._file += 1
            self._skip = 0

    def _in_blocks(self) -> Iterator[Any]:
        """Yield the samples in shuffled blocks. A resume may begin within a block."""
        seed, epoch = self._seed
        in_files = self._in_files()
        orders = self._block_orders()
        used = self.given % self._size
        while True:
            first = self.given - used
            self._begin = (self._file, self._skip)
            with IsolatedRandomState(random_number(seed, epoch, first) >> 1):
                block = list(islice(in_files, self._size))
            self._end = first + len(block)
            if not block:
                return
            if len(block) == self._size:
                order = next(orders)
            else:
                (order,) = orders_of_seeds(len(block), [seed + first], epoch)
            for index in order[used:]:
                sample = block[index]
                # The user of the sample may free it.
                block[index] = None
                yield sample
            used = 0

    def _block_orders(self) -> Iterator[list[int]]:
        """Yield the orders of the lane's full blocks. Those of several blocks are computed at once."""
        seed, epoch = self._seed
        ahead = max(1, TABLE_LENGTH // self._size)
        first = self.given - self.given % self._size
        while True:
            firsts = range(first, first + ahead * self._size, self._size)
            yield from orders_of_seeds(self._size, [seed + each for each in firsts], epoch)
            first = firsts.stop

    def _open_file(self) -> Iterator[Any]:
        """Open a file and skip its used samples.

        The random numbers that `read` draws first depend on the file and the epoch only, also after a resume.
        """
        path = self._stream.path(self._files[self._file])
        with IsolatedRandomState(random_number(*self._seed, -1, self._file) >> 1):
            samples: Any = self._stream.read(path)
            if not isinstance(samples, Iterable):
                kind = type(samples).__name__
                raise TaskError(
                    f"FileStream: read must yield or return the samples of {path}; it returned a {kind}"
                )
            opened = iter(samples)
            if self._skip:
                deque(islice(opened, self._skip), maxlen=0)
                return opened
            first = list(islice(opened, 1))
        return chain(first, opened)
