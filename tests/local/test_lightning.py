"""Lightning's Trainer with one line of cloudtrain: stopped and resumed in an epoch, it trains the same."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_server import CommandServer, serve_programs
from support.framework_runs import RECORDER, interrupt_and_compare, kill_and_compare
from support.hosts import SCRIPT_RUN
from support.jobs import Cli

from cloudtrain_runtime.contract import CheckpointConfig, MlTree

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None,
        reason="NOT TESTED: Lightning is not installed: pip install '.[frameworks]'",
    ),
]

JOB = """\
name: lightning
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge}
checkpoint: {every: 10 steps, keep: 2}
"""
SCRIPT = """
import sys

import lightning
import torch
from recorder import Recorder
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime.integrations.lightning import attach

SAMPLES, STEPS_PER_EPOCH = 240, 30


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.recorder = Recorder()

    def training_step(self, batch, index):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.recorder.record(self.trainer.global_step, loss)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * STEPS_PER_EPOCH)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


workers, seeded = (int(each) for each in sys.argv[1:])
lightning.seed_everything(1)
inputs = torch.randn(SAMPLES, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
generator = torch.Generator().manual_seed(2) if seeded else None
loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, generator=generator)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, log_every_n_steps=5,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
callback = attach(trainer)
trainer.fit(Model(), loader, DataLoader(data, batch_size=8))
print("stopped early:", callback.is_stopped, "at", trainer.global_step)
"""


def test_lightning_resumes_in_the_middle_of_an_epoch(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job(JOB, train_py=SCRIPT, recorder_py=RECORDER)
    # Data that the training process loads is a part of the tests with one rank.
    arguments = ('--set=code.args=["2", "1"]',)
    runs = interrupt_and_compare(
        cli, path, tmp_path / "records", stop_at=41, reported=41, settings=arguments
    )
    assert list(runs.losses) == list(range(90))
    assert 41 <= runs.stopped_at < 60  # in the middle of the second epoch
    assert runs.running["total_steps"] == runs.done["total_steps"] == 90
    assert runs.running["last_step"] == 41
    assert runs.running["seconds_left"] >= 0
    assert {"train/loss", "train/learning_rate", "validation/loss"} <= set(runs.running["metrics"])
    assert runs.resumed["last_step"] == 90
    kill_and_compare(
        cli, path, tmp_path / "records", runs, kill_at=25, start=20, settings=arguments
    )
    assert runs.resumed["metrics"] == pytest.approx(runs.done["metrics"])


ONE_RANK = """
import json
import os
import sys

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cloudtrain_runtime.integrations.lightning import attach
from cloudtrain_runtime.process.environment import ml_tree

stop_at, kill_at, seed, arguments = json.loads(sys.argv[1])


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, index):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        sys.stdout.write(f"STEP {json.dumps([self.current_epoch, index, loss.item()])}\\n")  # one piece
        sys.stdout.flush()
        if self.global_step == kill_at:
            os._exit(9)
        if self.global_step == stop_at:
            ml_tree(os.environ).stop_notice.touch()
        self.log("step", float(self.global_step))  # as scripts do to set the axis of a logger
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(seed)
torch.manual_seed(1)
inputs = torch.randn(40, 8)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, logger=False, log_every_n_steps=1, enable_progress_bar=False,
    enable_model_summary=False, **arguments,
    callbacks=[lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=50)],
)
attach(trainer)
trainer.fit(Model(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=20))
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[CommandServer]:
    """Run programs in processes that are forked from one that has imported Lightning."""
    with serve_programs("lightning", "cloudtrain_runtime.integrations.lightning") as server:
        yield server


def start_one_rank(
    programs: CommandServer,
    folder: Path,
    every: int,
    *,
    seed: int,
    arguments: dict[str, Any],
    **ends: int,
) -> dict[str, float]:
    """Run ONE_RANK as a run; return its losses by epoch and batch."""
    tree = MlTree(folder)
    for path in (tree.run_config.parent, tree.stop_notice.parent, tree.checkpoints):
        path.mkdir(parents=True, exist_ok=True)
    tree.stop_notice.unlink(missing_ok=True)
    checkpoint = CheckpointConfig(
        uri="", every_seconds=None, every_steps=every, keep=2, resume="auto"
    )
    tree.run_config.write_text(replace(SCRIPT_RUN, checkpoint=checkpoint).to_json())
    given = json.dumps([ends.get("stop_at", -1), ends.get("kill_at", -1), seed, arguments])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = programs.run_program(
        ONE_RANK, given, environ={**ranks, "CLOUDTRAIN_ML_ROOT": str(folder)}, cwd=folder
    )
    assert done.code == (9 if "kill_at" in ends else 0), done.err
    rows = [
        json.loads(line.removeprefix("STEP "))
        for line in done.out.splitlines()
        if line.startswith("STEP ")
    ]
    return {f"{epoch}.{batch}": loss for epoch, batch, loss in rows}


def test_lightning_is_attached_once_and_by_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning

    from cloudtrain_runtime.integrations.lightning import attach

    with pytest.raises(TypeError, match=r"expected a lightning.Trainer, got builtins.str"):
        attach("trainer")  # type: ignore[arg-type]
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(**options)
    count = len(trainer.callbacks)  # type: ignore[attr-defined]
    assert not attach(trainer).is_stopped
    assert len(trainer.callbacks) == count  # type: ignore[attr-defined] # outside of a run
    tree = MlTree(tmp_path)
    tree.run_config.parent.mkdir(parents=True)
    tree.run_config.write_text(SCRIPT_RUN.to_json())
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path))
    attach(trainer)
    with pytest.raises(ValueError, match="attached already"):
        attach(trainer)


@pytest.mark.parametrize(
    ("every", "interruptions", "arguments"),
    [
        # 10 batches per epoch. At the end of an epoch, then in an epoch that no process had begun:
        (100, [{"stop_at": 19}, {"stop_at": 26}], {"max_epochs": 4, "min_epochs": 4}),
        pytest.param(10, [{"kill_at": 23}], {"max_epochs": 4}, marks=pytest.mark.promise),
        (10, [{"kill_at": 23}], {"max_steps": 33}),
        (
            100,
            [{"stop_at": 4}],
            {"max_epochs": 4, "accumulate_grad_batches": 4, "val_check_interval": 5},
        ),
    ],
    ids=["two stops", "end of epoch", "max steps", "accumulation"],
)
def test_lightning_resumes_one_rank_at_any_step(
    programs: CommandServer,
    tmp_path: Path,
    every: int,
    interruptions: list[dict[str, int]],
    arguments: dict[str, Any],
) -> None:
    expected = start_one_rank(programs, tmp_path / "whole", every, seed=1, arguments=arguments)
    found: dict[str, float] = {}
    for seed, ends in enumerate([*interruptions, {}], 1):
        found |= start_one_rank(
            programs, tmp_path / "parts", every, seed=seed, arguments=arguments, **ends
        )
    assert found == expected
