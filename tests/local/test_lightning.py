"""Lightning's Trainer with one line of cloudtrain: stopped and resumed in an epoch, it trains the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from support.framework_runs import RECORDER, interrupt_and_compare
from support.jobs import Cli

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None,
        reason="NOT TESTED: Lightning is not installed: pip install 'cloudtrain[frameworks]'",
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


@pytest.mark.parametrize(("workers", "seeded"), [(0, 0), (2, 1)])
def test_lightning_resumes_in_the_middle_of_an_epoch(
    cli: Cli, job: Callable[..., Path], tmp_path: Path, workers: int, seeded: int
) -> None:
    path = job(JOB, train_py=SCRIPT, recorder_py=RECORDER)
    arguments = (f'--set=code.args=["{workers}", "{seeded}"]',)
    runs = interrupt_and_compare(cli, path, tmp_path / "records", stop_at=41, settings=arguments)
    assert list(runs.losses) == list(range(90))
    assert 41 <= runs.stopped_at < 60  # in the middle of the second epoch
    assert runs.running["total_steps"] == runs.done["total_steps"] == 90
    assert runs.running["last_step"] == 41
    assert runs.running["seconds_left"] >= 0
    assert {"train/loss", "train/learning_rate", "validation/loss"} <= set(runs.running["metrics"])
    assert runs.resumed["last_step"] == 90
    assert runs.resumed["metrics"] == pytest.approx(runs.done["metrics"])
