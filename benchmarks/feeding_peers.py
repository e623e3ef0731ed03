"""Read the samples of feeding.py's files once with another library; print the microseconds of CPU time per step.

    PYTHON benchmarks/feeding_peers.py write FOLDER      writes the samples in the form of each library
    PYTHON benchmarks/feeding_peers.py PEER FOLDER SHUFFLE

PYTHON has torchdata, webdataset and mosaicml-streaming. Each reads what it reads best: torchdata the files of a
FileStream, webdataset tar files with an array per sample, mosaicml-streaming its shards. All are one process, and
shuffle in memory where SHUFFLE is not 0.
"""

from __future__ import annotations

import io
import json
import random
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

BATCH = 32
Pair = tuple[torch.Tensor, torch.Tensor]


def write(folder: Path) -> None:
    """Write the samples of the files in a folder for webdataset and mosaicml-streaming."""
    import numpy as np
    from streaming import MDSWriter

    (folder / "tar").mkdir()
    files = [torch.load(path, weights_only=True) for path in sorted((folder / "pt").glob("*.pt"))]
    for index, samples in enumerate(files):
        with tarfile.open(folder / "tar" / f"part-{index:03d}.tar", "w") as tar:
            for number, sample in enumerate(samples.numpy()):
                content = io.BytesIO()
                np.save(content, sample)
                entry = tarfile.TarInfo(f"{index:03d}-{number:06d}.x.npy")
                entry.size = content.tell()
                content.seek(0)
                tar.addfile(entry, content)
    columns = {"x": f"ndarray:float32:{files[0].shape[1]}"}
    with MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for sample in torch.cat(files).numpy():
            writer.write({"x": sample})


class Files(IterableDataset[Pair]):
    """The samples of the files of a FileStream, one file after the other."""

    def __init__(self, folder: Path, shuffle: int) -> None:
        self.paths = sorted((folder / "pt").glob("*.pt"))
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[Pair]:
        if not self.shuffle:
            yield from self._read()
            return
        held: list[Pair] = []
        for sample in self._read():
            if len(held) < self.shuffle:
                held.append(sample)
                continue
            at = random.randrange(self.shuffle)  # noqa: S311
            yield held[at]
            held[at] = sample
        random.shuffle(held)
        yield from held

    def _read(self) -> Iterator[Pair]:
        for path in self.paths:
            for sample in torch.load(path, weights_only=True):
                yield sample, sample


def stateful_loader(folder: Path, shuffle: int) -> Iterable[Any]:
    """Return the batches of torchdata's DataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Files(folder, shuffle), batch_size=BATCH)


def nodes(folder: Path, shuffle: int) -> Iterable[Any]:
    """Return the batches of torchdata's nodes."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper

    samples = IterableWrapper(Files(folder, shuffle))
    return Loader(Mapper(Batcher(samples, BATCH, drop_last=False), default_collate))


def webdataset(folder: Path, shuffle: int) -> Iterable[Any]:
    """Return the batches of webdataset."""
    import webdataset as wds

    paths = sorted(map(str, (folder / "tar").glob("*.tar")))
    samples = wds.WebDataset(paths, shardshuffle=len(paths) if shuffle else False)
    if shuffle:
        samples = samples.shuffle(shuffle)
    return samples.decode().to_tuple("x.npy").map(_twice).batched(BATCH)


def streaming(folder: Path, shuffle: int) -> Iterable[Any]:
    """Return the batches of mosaicml-streaming."""
    from streaming import StreamingDataset

    class Samples(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            sample = torch.from_numpy(super().__getitem__(at)["x"])
            return sample, sample

    options: dict[str, Any] = {"shuffle": False}
    if shuffle:
        options = {"shuffle": True, "shuffle_block_size": shuffle}
    samples = Samples(local=str(folder / "mds"), batch_size=BATCH, **options)
    return DataLoader(samples, batch_size=BATCH)


def _twice(sample: Any) -> Pair:
    tensor = torch.from_numpy(sample[0])
    return tensor, tensor


PEERS = {
    "torchdata StatefulDataLoader": stateful_loader,
    "torchdata nodes": nodes,
    "webdataset": webdataset,
    "mosaicml-streaming": streaming,
}


def main() -> None:
    """Write the files, or read an epoch."""
    # as in a rank under torchrun
    torch.set_num_threads(1)
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
        return
    name, folder, shuffle = sys.argv[1:]
    batches = PEERS[name](Path(folder), int(shuffle))
    began = time.process_time()
    samples = [len(batch[0]) for batch in batches]
    seconds = time.process_time() - began
    print(json.dumps({"samples": sum(samples), "us": seconds / len(samples) * 1e6}))


if __name__ == "__main__":
    main()
