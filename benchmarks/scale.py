"""Measure how commands grow with what they read: hosts, ranks, log lines, runs and files.

    .venv/bin/python benchmarks/scale.py [--rounds 3] [--write benchmarks/results/scale.md]

Each command runs over a small input and over one that is many times larger. The inputs are the files that a run would
leave, without the training. The growth is the exponent e by which processor time beyond the start of the command grows:
e = 1 is time in proportion to the input, e = 0 no growth. The S3 server's time does not count.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure import BIN, Benchmark, Figures, Peer, Session, alternate, clean_environ, markdown_table

RUN = "scale-261120-101500-0000aa"
SHARD_BYTES = 16_384
MOST_GROWTH = 1.15
"""A larger exponent is a fault: processor time is measured to about a tenth."""


@dataclass(frozen=True)
class Growth:
    """A command over inputs of two sizes.

    Attributes:
        name: What is measured, with the unit of the sizes.
        small: The smaller size.
        large: The larger one.
        make: Makes the input of a size in an empty folder.
        argv: Returns the command over that folder, and what its output contains.
    """

    name: str
    small: int
    large: int
    make: Callable[[Path, int], None]
    argv: Callable[[Path, int], tuple[list[str], str]]


def measure(session: Session) -> list[str]:
    """Return a table with a row per command."""
    rows = []
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-")))
        environ = clean_environ()
        start = min(_seconds(session, [*_cloudtrain(), "--version"], "", environ) for _ in range(3))
        for number, growth in enumerate(growths(session.options.lines)):
            rows.append(_row(session, growth, root / str(number), environ, start))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    headings = ["command, and what grows", "from", "s", "to", "s", "peak MB", "growth"]
    return markdown_table(headings, rows)


def _row(
    session: Session, growth: Growth, folder: Path, environ: dict[str, str], start: float
) -> list[str]:
    peers = []
    for size in (growth.small, growth.large):
        place = folder / str(size)
        place.mkdir(parents=True)
        growth.make(place, size)
        argv, shown = growth.argv(place, size)
        own = {**environ, "CLOUDTRAIN_HOME": str(place)}
        peers.append(Peer(str(size), partial(_figures, session, argv, shown, own)))
    small, large = alternate(peers, session.rounds, warm_up=False)
    shutil.rmtree(folder)
    # What the start of the interpreter takes does not depend on the input.
    seconds = [max(0.01, each.median() - start) for each in (small, large)]
    exponent = math.log(seconds[1] / seconds[0]) / math.log(growth.large / growth.small)
    if exponent > MOST_GROWTH:
        session.faults.append(f"{growth.name} grows with an exponent of {exponent:.2f}")
    return [
        growth.name,
        f"{growth.small:,}",
        f"{small.median():.2f}",
        f"{growth.large:,}",
        f"{large.median():.2f}",
        f"{large.median('megabytes'):,.0f}",
        f"{exponent:.2f}",
    ]


def _figures(session: Session, argv: list[str], shown: str, environ: dict[str, str]) -> Figures:
    with tempfile.TemporaryFile("w+b") as output:
        process = subprocess.Popen(argv, env=environ, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        # It has been waited for.
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    ended = f"{' '.join(argv)} ended with {process.returncode}: {text[-2000:]}"
    session.require(process.returncode == 0 and shown in text, ended)
    return {"seconds": usage.ru_utime + usage.ru_stime, "megabytes": usage.ru_maxrss / 1024}


def _seconds(session: Session, argv: list[str], shown: str, environ: dict[str, str]) -> float:
    return _figures(session, argv, shown, environ)["seconds"]


def growths(lines: int) -> Iterator[Growth]:
    """Yield what is measured."""
    run = f"local:{RUN}"
    yield Growth("`plan`: instances", 4, 512, _write_job, _plan_instances)
    yield Growth("`plan`: files of a channel", 10_000, 100_000, _write_channel, _plan_channel)
    for command in ("status", "explain", "metrics"):
        words = [*_cloudtrain(), command, run]
        yield Growth(f"`{command}`: hosts", 8, 512, _write_hosts, lambda _, __, w=words: (w, ""))
    words = [*_cloudtrain(), "logs", run]
    yield Growth("`logs`: lines", lines // 10, lines, _write_log, lambda _, n: (words, f"line {n}"))
    last = [*words, "--tail", "5"]
    yield Growth(
        "`logs --tail 5`: lines", lines // 10, lines, _write_log, lambda _, n: (last, f"line {n}")
    )
    yield Growth("`list --local`: runs", 100, 1_000, _write_runs, _list_runs)
    yield Growth("`checkpoints`: ranks", 64, 1_024, _make_checkpoint, _list_checkpoint)
    yield Growth("`checkpoints verify`: ranks", 64, 1_024, _make_checkpoint, _verify_checkpoint)


def _cloudtrain() -> list[str]:
    return [str(BIN / "cloudtrain")]


def _write_job(folder: Path, _: int) -> None:
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")
    (code / "job.yaml").write_text(
        "name: scale\ncode: {script: train.py}\n"
        "cluster: {instance_type: ml.p4d.24xlarge}\nlimits: {runtime: 1h}\n"
    )


def _plan_instances(folder: Path, count: int) -> tuple[list[str], str]:
    job = str(folder / "code" / "job.yaml")
    return [*_cloudtrain(), "plan", job, "--instances", str(count)], f"{count} x ml.p4d"


def _write_channel(folder: Path, files: int) -> None:
    _write_job(folder, 0)
    for first in range(0, files, 1_000):
        part = folder / "data" / f"{first:08d}"
        part.mkdir(parents=True)
        for number in range(1_000):
            (part / f"{number:04d}").write_bytes(b"sample")
    with (folder / "code" / "job.yaml").open("a") as job:
        job.write(f"data: {{train: {folder / 'data'}}}\n")


def _plan_channel(folder: Path, files: int) -> tuple[list[str], str]:
    return [*_cloudtrain(), "plan", str(folder / "code" / "job.yaml")], f"{files:,} files"


def _write_hosts(folder: Path, hosts: int) -> None:
    from support.recorded_runs import BEGIN, step_events, write_run

    from cloudtrain_runtime.contract import format_event

    run = write_run(folder, RUN, step_events(1_000))
    for number in range(2, hosts + 1):
        event = format_event("environment", {"host": f"algo-{number}", "time": BEGIN.timestamp()})
        lines = [event, *(f"[rank{number * 8}]: line {line}" for line in range(200))]
        (run / "logs" / f"algo-{number}.log").write_text("\n".join(lines) + "\n")


def _write_log(folder: Path, lines: int) -> None:
    from support.recorded_runs import step_events, write_run

    run = write_run(folder, RUN, step_events(1_000))
    with (run / "logs" / "algo-1.log").open("a") as log:
        for number in range(1, lines + 1):
            log.write(f"[rank{number % 8}]: line {number} loss 0.1234 lr 3.0e-04 812.4 samples/s\n")


def _write_runs(folder: Path, runs: int) -> None:
    from support.recorded_runs import step_events, write_run

    for number in range(runs):
        write_run(folder, f"scale-261120-101500-{number:06x}", step_events(20))


def _list_runs(_: Path, runs: int) -> tuple[list[str], str]:
    return [*_cloudtrain(), "list", "--local", "-n", str(runs)], f"101500-{runs - 1:06x}"


def _make_checkpoint(folder: Path, ranks: int) -> None:
    # A child's peak of memory begins with that of this process, which therefore does not import torch.
    writer = BENCHMARK.child(write_checkpoint, folder=str(folder), ranks=ranks)
    subprocess.run(writer, check=True)


def write_checkpoint(folder: str, ranks: int) -> None:
    """Write a checkpoint of 100 tensors that are divided between the ranks."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from cloudtrain_runtime.contract.manifest import (
        MANIFEST_FILE,
        Manifest,
        StoredFile,
        checkpoint_folder_name,
    )

    saved = Path(folder) / "checkpoints" / checkpoint_folder_name(1)
    saved.mkdir(parents=True)
    files: dict[str, bytes] = {}
    entries: dict[str, Any] = {}
    written = []
    rows = SHARD_BYTES // 4
    for tensor in range(100):
        name = f"model.layers.{tensor}.weight"
        offsets = [torch.Size([rank * rows]) for rank in range(ranks)]
        chunks = [metadata.ChunkStorageMetadata(each, torch.Size([rows])) for each in offsets]
        entries[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.float32), torch.Size([ranks * rows]), chunks
        )
        for rank, offset in enumerate(offsets):
            index = metadata.MetadataIndex(name, offset, rank)
            place = filesystem._StorageInfo(f"__{rank}_0.distcp", 0, SHARD_BYTES)  # noqa: SLF001
            written.append(WriteResult(index, SHARD_BYTES, place))
    files |= {f"__{rank}_0.distcp": bytes(SHARD_BYTES) for rank in range(ranks)}
    filesystem.FileSystemWriter(saved).finish(metadata.Metadata(entries), [written])
    files[".metadata"] = (saved / ".metadata").read_bytes()
    files["writer.json"] = json.dumps({"run": RUN, "attempt": "0" * 8, "step": 1}).encode()
    for file, content in files.items():
        (saved / file).write_bytes(content)
    manifest = Manifest(
        run=RUN,
        attempt="0" * 8,
        step=1,
        time=time.time(),
        world_size=ranks,
        mesh={"data": ranks},
        rng={"ranks": ranks, "sources": ["torch"]},
        torch=torch.__version__,
        code="",
        request="",
        state={},
        files={
            file: StoredFile(len(content), tuple(_checksums(content)))
            for file, content in files.items()
        },
    )
    (saved / MANIFEST_FILE).write_text(manifest.to_json())


def _checksums(content: bytes) -> Iterator[int]:
    from cloudtrain_runtime.contract.manifest import BLOCK_BYTES

    for start in range(0, len(content), BLOCK_BYTES):
        yield zlib.crc32(content[start : start + BLOCK_BYTES])


def _list_checkpoint(folder: Path, _: int) -> tuple[list[str], str]:
    return [*_cloudtrain(), "checkpoints", str(folder / "checkpoints")], "step-00000001"


def _verify_checkpoint(folder: Path, _: int) -> tuple[list[str], str]:
    return [*_cloudtrain(), "checkpoints", "verify", str(folder / "checkpoints")], "step-00000001"


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="nothing; a command is compared with itself over a smaller input",
    goal=f"no growth beyond the input's (an exponent of at most {MOST_GROWTH})",
    mechanism="the command's output named the size of its input",
    rounds=3,
    options={"lines": (1_000_000, "lines of the longer log; the other one has a tenth")},
    packages=("torch", "boto3"),
    children=(write_checkpoint,),
)

if __name__ == "__main__":
    BENCHMARK.main(measure)
