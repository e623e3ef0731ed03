"""Measure packing of a large code folder: cloudtrain, the SageMaker SDK, and tar.

    .venv/bin/python benchmarks/packing.py [--files 10000] [--megabytes 500] [--turns 5] [--write FILE]

Each tool runs in its own process, and the tools alternate. The seconds are those of packing, without the start of
Python. Memory is the peak of the process. Half of the bytes are text, half are random and cannot be compressed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure import describe_machine, replace_marked

_FOLDERS = 100
_WORDS = 4000
_SETTLE_SECONDS = 3.0
"""Digests of files that have just changed are not cached."""


@dataclass(frozen=True)
class Packed:
    """One measurement of packing."""

    seconds: float
    peak_bytes: int
    archive_bytes: int


def make_tree(root: Path, *, files: int, total_bytes: int) -> None:
    """Write files of words and files of random bytes, alternately, with 0.2 to 1.8 times the mean size."""
    rng = random.Random(0)  # noqa: S311 (the same tree every time)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(2, 11))) for _ in range(_WORDS)]
    for number in range(files):
        size = int(total_bytes / files * (0.2 + 1.6 * rng.random()))
        path = root / f"part_{number % _FOLDERS:03}" / f"{number:06}.{'bin' if number % 2 else 'txt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size) if number % 2 else _text(rng, words, size))


def _text(rng: random.Random, words: list[str], size: int) -> bytes:
    lines = (" ".join(rng.choices(words, k=12)) for _ in range(size // 40))
    return "\n".join(lines).encode()[:size].ljust(size)


def pack_with_cloudtrain(root: Path, home: Path) -> Path:
    """List, digest, check and pack as `submit` does."""
    from cloudtrain.bundle import collect
    from cloudtrain.bundle.archive import write_bundle

    return write_bundle(collect(root, home=home), home / "bundles").path


def pack_with_sagemaker(root: Path, target: Path) -> Path:
    """Pack as `sagemaker.fw_utils.tar_and_upload_dir` does before it uploads."""
    import sagemaker.fw_utils
    import sagemaker.utils

    began = time.perf_counter()
    files = sagemaker.fw_utils._list_files_to_compress("train.py", str(root))  # noqa: SLF001 (the SDK's own function)
    path = Path(sagemaker.utils.create_tar_file(files, str(target / "sourcedir.tar.gz")))
    print(json.dumps({"seconds": time.perf_counter() - began}))
    return path


def child(way: str, root: Path, work: Path) -> None:
    """Pack with one tool, and print seconds and archive."""
    if way == "sagemaker":
        print(json.dumps({"archive": str(pack_with_sagemaker(root, work))}))
        return
    import cloudtrain.bundle  # noqa: F401 (imported before the measurement)

    began = time.perf_counter()
    path = pack_with_cloudtrain(root, work / ("home" if way == "again" else f"home-{time.time_ns()}"))
    print(json.dumps({"seconds": time.perf_counter() - began, "archive": str(path)}))


def run(way: str, root: Path, work: Path) -> Packed:
    """Pack in a child process."""
    output = work / "output"
    argv = [sys.executable, "-W", "ignore", __file__, "--child", way, str(root), str(work)]
    if way == "tar":
        argv = ["tar", "czf", str(work / "sourcedir.tar.gz"), "-C", str(root), "."]
    began = time.perf_counter()
    with output.open("wb") as out:
        process = os.posix_spawnp(argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)])
        _, status, usage = os.wait4(process, 0)
    took = time.perf_counter() - began
    if status != 0:
        sys.exit(f"{way} failed: {output.read_text()}")
    result = {"archive": str(work / "sourcedir.tar.gz")}
    for line in output.read_text().splitlines():
        result |= json.loads(line) if line.startswith("{") else {}
    archive = Path(result["archive"])
    packed = Packed(float(result.get("seconds", took)), usage.ru_maxrss * 1024, archive.stat().st_size)
    if way != "again":
        shutil.rmtree(archive.parents[2]) if way == "first" else archive.unlink()
    return packed


_WAYS = {
    "first": "cloudtrain, new code",
    "again": "cloudtrain, unchanged code",
    "sagemaker": "SageMaker SDK 2, `create_tar_file`",
    "tar": "`tar czf`",
}


def main() -> None:
    """Measure, print, and with --write replace the marked part of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5, help="counted turns of each tool")
    parser.add_argument("--write", type=Path, help="file whose marked part is replaced")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "ROOT", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), Path(options.child[2]))
        return
    os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    found: dict[str, list[Packed]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory() as folder:
        root, work = Path(folder, "tree"), Path(folder, "work")
        work.mkdir()
        make_tree(root, files=options.files, total_bytes=options.megabytes * 10**6)
        time.sleep(_SETTLE_SECONDS)
        for turn in range(options.turns + 1):
            for way in _WAYS:
                packed = run(way, root, work)
                if turn > 0:
                    found[way].append(packed)
    note = (
        f"{options.files:,} files with {options.megabytes} MB. Medians of {options.turns} alternating turns on "
        f"{describe_machine()}; files in the page cache. cloudtrain's seconds include the listing, the digests, "
        "the search for secrets, and writing the archive, which is not compressed."
    )
    text = "\n".join([*_table(found), "", note])
    print(text)
    if options.write is not None:
        replace_marked(options.write, text)


def _table(found: dict[str, list[Packed]]) -> list[str]:
    lines = ["| way | median s | min to max | peak memory | archive |", "|---|---|---|---|---|"]
    for way, name in _WAYS.items():
        seconds = [packed.seconds for packed in found[way]]
        peak = statistics.median(packed.peak_bytes for packed in found[way]) / 1e6
        archive = found[way][-1].archive_bytes / 1e6
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        lines.append(f"| {name} | {statistics.median(seconds):.2f} | {spread} | {peak:.0f} MB | {archive:.0f} MB |")
    return lines


if __name__ == "__main__":
    main()
