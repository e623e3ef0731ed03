"""Measure packing of a large code folder: cloudtrain, the SageMaker SDK, and tar.

    .venv/bin/python benchmarks/packing.py [--files 10000] [--megabytes 500] [--rounds 5] [--write FILE]

Each tool runs in its own process, and the tools alternate. The seconds are those of packing, without the start of
Python. Memory is the peak of the process. Half of the bytes are text, half are random and cannot be compressed.
cloudtrain's seconds include the listing, the digests, the search for secrets, and writing the archive, which is not
compressed. The files are in the page cache.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from measure import SECONDS, Benchmark, Figures, Peer, Session, alternate, run_child, table

_FOLDERS = 100
_WORDS = 4000
SETTLE_SECONDS = 3.0
"""Digests of files that have just changed are not cached."""


def make_tree(root: Path, *, files: int, total_bytes: int) -> None:
    """Write files of words and files of random bytes, alternately, with 0.2 to 1.8 times the mean size."""
    rng = random.Random(0)  # noqa: S311 (the same tree every time)
    words = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(2, 11)))
        for _ in range(_WORDS)
    ]
    for number in range(files):
        size = int(total_bytes / files * (0.2 + 1.6 * rng.random()))
        path = (
            root / f"part_{number % _FOLDERS:03}" / f"{number:06}.{'bin' if number % 2 else 'txt'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (" ".join(rng.choices(words, k=12)) for _ in range(size // 40))
        path.write_bytes(
            rng.randbytes(size) if number % 2 else "\n".join(lines).encode()[:size].ljust(size)
        )


def pack_with_cloudtrain(root: str, home: str) -> Mapping[str, object]:
    """List, digest, check and pack as `submit` does; return the seconds and the archive."""
    from cloudtrain.bundle import collect
    from cloudtrain.bundle.archive import write_bundle

    began = time.perf_counter()
    path = write_bundle(collect(Path(root), home=Path(home)), Path(home) / "bundles").path
    return {SECONDS: time.perf_counter() - began, "archive": str(path)}


def pack_with_sagemaker(root: str, target: str) -> Mapping[str, object]:
    """Pack as `sagemaker.fw_utils.tar_and_upload_dir` does before it uploads; return the seconds and the archive."""
    import sagemaker.fw_utils
    import sagemaker.utils

    began = time.perf_counter()
    files = sagemaker.fw_utils._list_files_to_compress("train.py", root)  # noqa: SLF001 (the SDK's own function)
    path = sagemaker.utils.create_tar_file(files, f"{target}/sourcedir.tar.gz")
    return {SECONDS: time.perf_counter() - began, "archive": path}


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="the SageMaker SDK 2 (`create_tar_file`) and `tar czf`",
    goal="less than the SDK's time and memory",
    mechanism="unchanged code was not packed again, and every other archive was written in its round",
    rounds=5,
    options={"files": (10_000, "files in the folder"), "megabytes": (500, "size of the folder")},
    packages=("sagemaker",),
    children=(pack_with_cloudtrain, pack_with_sagemaker),
)


def measure(session: Session) -> list[str]:
    """Return the table."""
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    files, megabytes = session.options.files, session.options.megabytes
    with tempfile.TemporaryDirectory() as folder:
        root, work = Path(folder, "tree"), Path(folder, "work")
        work.mkdir()
        make_tree(root, files=files, total_bytes=megabytes * 10**6)
        time.sleep(SETTLE_SECONDS)
        kept: list[int] = []

        def pack(argv: list[str], *, again: bool = False) -> Figures:
            done = run_child(argv, os.environ, work)
            result = json.loads(done.output.splitlines()[-1]) if done.output else {}
            archive = Path(result.get("archive", work / "sourcedir.tar.gz"))
            figures = {SECONDS: result.get(SECONDS, done.seconds), "peak": done.peak_bytes}
            figures["archive"] = archive.stat().st_size
            if again:
                kept.append(archive.stat().st_mtime_ns)
                session.require(kept[0] == kept[-1], "unchanged code was packed again")
            else:
                archive.unlink()  # so that the next round must write it
            return figures

        def cloudtrain(home: str) -> list[str]:
            return BENCHMARK.child(pack_with_cloudtrain, root=str(root), home=f"{work}/{home}")

        sagemaker = BENCHMARK.child(pack_with_sagemaker, root=str(root), target=str(work))
        tar = ["tar", "czf", str(work / "sourcedir.tar.gz"), "-C", str(root), "."]
        peers = [
            Peer("cloudtrain, new code", lambda: pack(cloudtrain(f"home-{time.time_ns()}"))),
            Peer("cloudtrain, unchanged code", lambda: pack(cloudtrain("home"), again=True)),
            Peer("SageMaker SDK 2, `create_tar_file`", lambda: pack(sagemaker)),
            Peer("`tar czf`", lambda: pack(tar)),
        ]
        columns = {
            "peak memory": lambda own: f"{own.median('peak') / 1e6:.0f} MB",
            "archive": lambda own: f"{own.median('archive') / 1e6:.0f} MB",
        }
        lines = table("way", alternate(peers, session.rounds), columns=columns)
    return [*lines, "", f"{files:,} files with {megabytes} MB."]


if __name__ == "__main__":
    BENCHMARK.main(measure)
