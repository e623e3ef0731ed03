"""Measure what a tracker costs a training: one that hangs, and one that writes offline files.

    .venv/bin/python benchmarks/tracking.py [--steps 3000] [--rounds 5] [--write FILE]

A Task trains for so many steps in a local run, and logs each of them: without a tracker, with Weights & Biases whose
server accepts connections and never answers, and with its offline files. Seconds are those from step 10 to the last one,
on the clock and of the rank's processor. The rank has one thread, so that another core is free where the machine has one.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from measure import (
    BIN,
    SECONDS,
    Benchmark,
    Figures,
    Peer,
    Session,
    alternate,
    clean_environ,
    table,
)

PLAIN, HANGING, OFFLINE = "no tracker", "a server that hangs", "offline files"
PROCESSOR = "processor seconds"
JOB = """\
name: tracked
code: {task: "tracked:Tracked", env: {CLOUDTRAIN_LOG_EVERY_STEPS: 1, OMP_NUM_THREADS: 1, SPENT: FILE, LAST_STEP: STEPS}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
train: {steps: STEPS, batch_size: 64}
checkpoint: {every: 10m}
"""
TASK = """
import json, os, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

LAST = int(os.environ["LAST_STEP"])

class Tracked(Task):
    def model(self):
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))

    def datasets(self):
        inputs = torch.randn(640, 256, generator=torch.Generator().manual_seed(0))
        return {"train": TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))}

    def loss(self, model, batch):
        step = context().step
        if step == 10:
            self.began = time.perf_counter(), time.process_time()
        if step == LAST - 1:
            ended = time.perf_counter(), time.process_time()
            spent = [end - begin for end, begin in zip(ended, self.began)]
            Path(os.environ["SPENT"]).write_text(json.dumps(spent))
        return F.mse_loss(model(batch[0]), batch[1])
"""
BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="the same training without a tracker",
    goal="at most 1.01 times the seconds without a tracker",
    mechanism="the server that hangs was connected to, or the offline files have the last step",
    rounds=5,
    options={"steps": (3_000, "steps of each training")},
    packages=("torch", "wandb"),
)


def measure(session: Session) -> list[str]:
    """Return the table of seconds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        job = Path(folder) / "job.yaml"
        spent = Path(folder) / "spent.json"
        job.write_text(JOB.replace("STEPS", str(session.options.steps)).replace("FILE", str(spent)))
        job.with_name("tracked.py").write_text(TASK)
        connections: list[Any] = []
        threading.Thread(target=_accept, args=(server, connections), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def plain() -> Figures:
            return _train(job, spent)[0]

        def hanging() -> Figures:
            before = len(connections)
            figures, _ = _train(
                job,
                spent,
                "tracking.wandb.mode=online",
                f"code.env.WANDB_BASE_URL={url}",
                "code.env.WANDB_API_KEY={secret: none}",
                "code.env.WANDB_INIT_TIMEOUT=5",
            )
            session.require(len(connections) > before, "nothing has connected to the server")
            return figures

        def offline() -> Figures:
            figures, run = _train(job, spent, "tracking.wandb.mode=offline")
            (state,) = run.glob("wandb/*.json")
            last = json.loads(state.read_text())["row"]
            session.require(last == session.options.steps, "the offline files lack the last step")
            return figures

        peers = [
            Peer(PLAIN, plain),
            Peer(HANGING, hanging, "1.01"),
            Peer(OFFLINE, offline, "1.01"),
        ]
        found = alternate(peers, session.rounds)
    title = f"{session.options.steps:,} steps, each logged"
    return [
        *table(f"{title}: clock", found, base=PLAIN, digits=3),
        "",
        *table(f"{title}: processor of the rank", found, base=PLAIN, figure=PROCESSOR, digits=3),
    ]


def _accept(server: socket.socket, connections: list[Any]) -> None:
    while True:
        try:
            connections.append(server.accept())
        except OSError:
            return


def _train(job: Path, spent: Path, *changes: str) -> tuple[Figures, Path]:
    """Train to the end; return the seconds of the steps, and the run's folder."""
    home = job.parent / "home"
    shutil.rmtree(home, ignore_errors=True)
    environ = clean_environ(CLOUDTRAIN_HOME=str(home), WANDB_API_KEY="0" * 40)
    options = [f"--set={each}" for each in changes]
    subprocess.run(
        [BIN / "cloudtrain", "submit", job, "--local", "--follow", "--json", *options],
        env=environ,
        check=True,
        capture_output=True,
    )
    (run,) = (home / "runs").glob("tracked-*")
    seconds, processor = json.loads(spent.read_text())
    return {SECONDS: seconds, PROCESSOR: processor}, run


if __name__ == "__main__":
    BENCHMARK.main(measure)
