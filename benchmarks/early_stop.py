"""Measure for how long a container's start loses SIGTERM: the entry command as PID 1, stopped at random times.

    .venv/bin/python benchmarks/early_stop.py [--starts N] [--write benchmarks/results/early_stop.md]

The kernel drops a signal to PID 1 that has no handler for it. Needs util-linux's `unshare` and permission to create PID
namespaces. Each start unpacks a bundle with this package and a script, and then waits for a secret from an address that
never responds. SIGTERM is sent once; a start that has not ended 5 s later has lost it and is killed.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure import BIN, Benchmark, Session, clean_environ, markdown_table

import cloudtrain_runtime
from cloudtrain.planning.request import CONTAINER_ENTRYPOINT
from cloudtrain_runtime.contract import CheckpointConfig, MlTree, RunConfig, SecretConfig

UNSHARE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
STOPPED = 143
WINDOW_SECONDS = 0.4
LOST_SECONDS = 5.0
RUN = RunConfig(
    run="early-stop",
    task=None,
    script="train.py",
    args=[],
    requirements=None,
    processes_per_instance=1,
    distribution="torch_distributed",
    max_restarts=0,
    train=None,
    checkpoint=CheckpointConfig("", None, None, 1, "never"),
    secrets={"TOKEN": SecretConfig("token")},
)


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="none",
    goal="as few starts as possible that lose the signal",
    mechanism="the signal was sent to PID 1 of a namespace, the entry command's bash or the Python that replaced it",
    rounds=0,
    options={
        "starts": (500, "containers that are started"),
        "megabytes": (10, "random bytes in the bundle"),
        "seed": (15, "of the times of the signals"),
    },
)


@dataclass(frozen=True)
class Start:
    """One start: seconds until the signal, the program that was PID 1 then, and whether the signal was lost."""

    seconds: float
    program: str
    is_lost: bool


def make_tree(folder: Path, megabytes: int) -> MlTree:
    """Write the channels that the entry command reads; the bundle has some megabytes, so that unpacking takes time."""
    tree = MlTree(folder / "opt" / "ml")
    for each in (tree.run_config.parent, tree.data / "code"):
        each.mkdir(parents=True)
    tree.run_config.write_text(RUN.to_json())
    (folder / "data.bin").write_bytes(random.Random(0).randbytes(megabytes * 1_000_000))  # noqa: S311 (content only)
    with tarfile.open(tree.data / "code" / "sourcedir.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(Path(cloudtrain_runtime.__file__).parent, "cloudtrain_runtime")
        archive.add(folder / "data.bin", "data.bin")
    return tree


def start(session: Session, environ: dict[str, str], seconds: float) -> Start:
    """Start a container, send SIGTERM after some seconds, and record whether it ends."""
    process = subprocess.Popen(
        [*UNSHARE, *CONTAINER_ENTRYPOINT],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first, program = 0, "unshare"
    while program == "unshare":  # until PID 1 is bash
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        first = int(children[0]) if children else 0
        program = Path(f"/proc/{first}/comm").read_text().strip() if first else "unshare"
    time.sleep(seconds)
    program = Path(f"/proc/{first}/comm").read_text().strip()
    (numbers,) = (
        each
        for each in Path(f"/proc/{first}/status").read_text().splitlines()
        if each.startswith("NSpid")
    )
    session.require(numbers.split()[-1] == "1", f"{program} is not PID 1: {numbers}")
    os.kill(first, 15)
    try:
        is_lost = process.wait(LOST_SECONDS) != STOPPED
    except subprocess.TimeoutExpired:
        is_lost = True
        process.kill()
        process.wait()
    return Start(seconds, program, is_lost)


def measure(session: Session) -> list[str]:
    """Return a table of the starts by the program that was PID 1, and the estimated duration without a handler."""
    options = session.options
    times = random.Random(options.seed)  # noqa: S311 (times of signals)
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as silent:
        tree = make_tree(Path(name), options.megabytes)
        environ = clean_environ(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
            CLOUDTRAIN_GPUS="0",
            CLOUDTRAIN_ML_ROOT=str(tree.root),
            PATH=f"{BIN}:{os.environ['PATH']}",
        )
        starts = [
            start(session, environ, times.uniform(0, WINDOW_SECONDS)) for _ in range(options.starts)
        ]
    rows = []
    for program in sorted({each.program for each in starts}):
        own = [each for each in starts if each.program == program]
        rows.append((program, len(own), sum(each.is_lost for each in own)))
    lines = markdown_table(("PID 1 when SIGTERM came", "starts", "lost"), rows)
    lost = [each.seconds for each in starts if each.is_lost]
    gap = 1000 * WINDOW_SECONDS * len(lost) / len(starts)
    of = f"{len(lost)} of {len(starts)} lost in the first {WINDOW_SECONDS} s"
    lines += ["", f"{of}: about {gap:.0f} ms without a handler."]
    if lost:
        first, middle, last = (
            1000 * each for each in (min(lost), statistics.median(lost), max(lost))
        )
        lines.append(
            f"Lost signals came {first:.0f} to {last:.0f} ms after the start, median {middle:.0f}."
        )
    return lines


if __name__ == "__main__":
    BENCHMARK.main(measure)
