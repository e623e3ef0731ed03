"""A trainer that begins at step 0 although its folder has a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract.events import parse_event

SCRIPT = """
import os
import sys

from cloudtrain_runtime.launcher.fresh_start import report_fresh_start

report_fresh_start()

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(folder):
    return pl.Trainer(
        max_steps=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)], default_root_dir=folder,
    )


data = torch.utils.data.DataLoader(torch.ones(4, 2))
folder = sys.argv[1]
for path in (None, None, "last"):
    sys.stdout.flush()
    if os.fork() == 0:  # a process of its own, without another import
        for _ in range(2):
            trainer(folder).fit(Line(), data, ckpt_path=path)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
    print("end of a process")
"""


def test_a_fresh_start_over_a_checkpoint_is_reported(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, capture_output=True, text=True
    )
    without_checkpoint, fresh, continued, rest = done.stdout.split("end of a process\n")
    assert rest == ""
    assert _fresh_starts(without_checkpoint) == _fresh_starts(continued) == []
    (event,) = _fresh_starts(fresh)
    saved = Path(event["checkpoint"])
    assert saved.parent == tmp_path
    assert saved.is_file()
    assert (event["method"], event["argument"]) == ("fit", "ckpt_path")


def _fresh_starts(output: str) -> list[dict[str, Any]]:
    found = filter(None, map(parse_event, output.splitlines()))
    return [event for event in found if event["event"] == "fresh_start"]
