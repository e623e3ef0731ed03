"""Measure how long a rank waits for its data workers when it leaves.

    .venv/bin/python benchmarks/leaving.py [--rounds 3] [--write FILE]

Three loaders of 8 workers each, pinned and persistent, as a Task with three splits has them on a GPU. A stand-in for an
accelerator lets PyTorch pin without one. Seconds from the last step to the end of the process, in processes of their
own: cloudtrain, which closes its loaders; the exit handlers of the installed PyTorch; and those of PyTorch before 2.13,
which wait for one worker after the other for 5 s (written here after its source, with 2 workers for each loader, because
it would take two minutes with 8).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Benchmark, Peer, Session, alternate, table

WORKERS = 8
OLD_WORKERS = 2
CLOSED, HANDLERS, BEFORE = "cloudtrain", "exit handlers", "exit handlers before 2.13"
PROGRAM = """
import atexit, multiprocessing, sys, time
import torch
from torch.utils.data import TensorDataset
from cloudtrain_runtime.data.loader import Loader, close_loaders
from cloudtrain_runtime.process import fast_exit
from cloudtrain_runtime.process.loader_workers import OutliveStopSignal

way, workers, result = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
torch.cuda.set_device = lambda _: None
if hasattr(torch, "accelerator"):
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda *_: None
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
torch.Tensor.pin_memory = lambda self, *_: self

def report():
    with open(result, "w") as file:
        print(time.monotonic() - began, started, file=file)

def wait_for(worker):
    worker.join(timeout=5)
    if worker.is_alive():
        worker.terminate()

fast_exit.register()  # so that it runs last, as in a rank
atexit.register(report)
batches = []
for _ in range(3):
    loader = Loader(TensorDataset(torch.zeros(512, 2)), batch_size=4, num_workers=workers, pin_memory=True,
                    persistent_workers=True, multiprocessing_context="fork", worker_init_fn=OutliveStopSignal())
    batches.append(iter(loader))
    next(batches[-1])
started = len(multiprocessing.active_children())
if way == "before":
    for worker in multiprocessing.active_children():
        atexit.register(wait_for, worker)
began = time.monotonic()
if way == "closed":
    close_loaders()
fast_exit.exit_process(0)
"""

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="PyTorch's exit handlers, of the installed version and as they were before 2.13",
    goal="at most 1 s",
    mechanism="all workers of three loaders were alive at the last step",
    rounds=3,
    packages=("torch",),
)


def measure(session: Session) -> list[str]:
    """Return the table: seconds from the last step to the end."""

    def peer(name: str, way: str, workers: int, goal: str = "") -> Peer:
        def run() -> float:
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "result"
                command = [sys.executable, "-W", "ignore", "-c", PROGRAM, way, str(workers)]
                subprocess.run([*command, str(result)], check=True, capture_output=True)
                seconds, started = result.read_text().split()
            session.require(int(started) == 3 * workers, f"{started} workers were alive")
            return float(seconds)

        return Peer(name, run, goal)

    peers = [
        peer(CLOSED, "closed", WORKERS, "at most 1"),
        peer(HANDLERS, "handlers", WORKERS),
        peer(f"{BEFORE}, {3 * OLD_WORKERS} workers", "before", OLD_WORKERS),
    ]
    found = alternate(peers, session.rounds)
    return table(f"leaving {3 * WORKERS} workers", found, base=HANDLERS)


if __name__ == "__main__":
    BENCHMARK.main(measure)
