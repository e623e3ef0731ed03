"""Starts runs through the container's entry point, without the SDK: needs only PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cloudtrain_runtime.contract import (
    WORKER_SCRIPT,
    CheckpointConfig,
    MlTree,
    RunConfig,
    TrainConfig,
    parse_event,
)

CODE = Path(__file__).parent / "code"
TRIAL = os.environ.get("CLOUDTRAIN_GPU_TRIAL", "")
"""`cpu` runs the tests on the CPU, to try the tests themselves. Anything else needs a GPU."""

DEVICE = "cpu" if TRIAL == "cpu" else "cuda"
GPUS = 0 if TRIAL == "cpu" else torch.cuda.device_count()
TRAIN = TrainConfig(
    epochs=None,
    steps=8,
    batch_size=8,
    accumulate=1,
    precision="fp32",
    compile=False,
    clip_grad_norm=None,
    learning_rate=0.01,
    seed=5,
    evaluate_every_steps=None,
    early_stopping=None,
)
_SECONDS = 600
_WORKER = """\
from cloudtrain_runtime.worker import main

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Finished:
    """A run that has ended.

    Attributes:
        code: Exit code of the launcher.
        log: Output of launcher and ranks.
        folder: The run's `/opt/ml`.
    """

    code: int
    log: str
    folder: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the run's events of a kind, in order."""
        found = (parse_event(line) for line in self.log.splitlines())
        return [event for event in found if event is not None and event["event"] == kind]

    @property
    def losses(self) -> list[float]:
        """The loss of each logged step."""
        return [event["loss"] for event in self.events("step")]

    @property
    def started(self) -> dict[str, Any]:
        """The last `started` event."""
        return self.events("started")[-1]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The exported model."""
        state: dict[str, torch.Tensor] = torch.load(
            self.folder / "model" / "model.pt", weights_only=True
        )
        return state

    def seen(self, rank: int = 0) -> dict[str, Any]:
        """Return what the Task recorded on a rank."""
        found: dict[str, Any] = json.loads(
            (self.folder / "output" / "data" / f"seen-{rank}.json").read_text()
        )
        return found

    @property
    def failure(self) -> str:
        """The text that SageMaker would show as FailureReason; empty without a failure."""
        path = MlTree(self.folder).failure
        return path.read_text() if path.exists() else ""


def train(
    folder: Path,
    train: TrainConfig = TRAIN,
    *,
    ranks: int = 1,
    restarts: int = 0,
    hang_seconds: float | None = 600.0,
    checkpoint_every: int | None = None,
    environ: dict[str, str] | None = None,
    **arguments: Any,
) -> Finished:
    """Train the probe to its end.

    Args:
        folder: Folder of the run; a run in the folder of an earlier one resumes it.
        train: The train section.
        ranks: Number of ranks, all on this machine.
        restarts: How often the workers may be restarted.
        hang_seconds: Limit of a hang.
        checkpoint_every: Steps between checkpoints; None saves at the end only.
        environ: Further environment variables.
        arguments: Arguments of the Task.
    """
    tree = MlTree(folder / "ml")
    for path in (tree.config, tree.run_config.parent):
        path.mkdir(parents=True, exist_ok=True)
    for path in (tree.code, tree.root / "output"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(CODE, tree.code)
    (tree.code / WORKER_SCRIPT).write_text(_WORKER)
    (tree.config / "resourceconfig.json").write_text(
        json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]})
    )
    saving = CheckpointConfig((folder / "checkpoints").as_uri(), None, checkpoint_every, 2, "auto")
    config = RunConfig(
        "gpu-260101-000000-000000",
        "probe:Probe",
        None,
        arguments,
        None,
        ranks,
        "torch_distributed",
        restarts,
        train,
        saving,
        hang_seconds=hang_seconds,
    )
    tree.run_config.write_text(config.to_json())
    return _run(tree, environ or {})


def _run(tree: MlTree, environ: dict[str, str]) -> Finished:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "CLOUDTRAIN_ML_ROOT": str(tree.root),
        "CLOUDTRAIN_HOST_ADDRESSES": json.dumps({"algo-1": "127.0.0.1"}),
        "CLOUDTRAIN_RENDEZVOUS_PORT": str(port),
        "CLOUDTRAIN_GPUS": str(GPUS),
        "CLOUDTRAIN_LOG_EVERY_STEPS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **({"CUDA_VISIBLE_DEVICES": ""} if TRIAL == "cpu" else {}),
        **environ,
    }
    log = tree.root / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cloudtrain_runtime.launch"],
            cwd=tree.code,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    (tree.root / "launcher-pid").write_text(
        str(process.pid)
    )  # for a Task that sends the notice to stop
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # the launcher ends its ranks
        process.wait()
        raise TimeoutError(
            f"the run has not ended after {_SECONDS} s:\n{log.read_text()}"
        ) from None
    return Finished(process.returncode, log.read_text(), tree.root)
