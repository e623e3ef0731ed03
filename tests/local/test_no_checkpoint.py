"""Runs that complete none of their due checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

pytestmark = pytest.mark.processes

BLOCKS = '''

from pathlib import Path

_loss = Small.loss

def loss(self, model, batch):
    """Write a file in place of the checkpoint folder."""
    Path(FOLDER).write_text("a file")
    return _loss(self, model, batch)

Small.loss = loss
'''
SCRIPT_JOB = """\
name: script
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge, instances: 1, processes_per_instance: 1}
checkpoint: {every: 2 steps}
"""
SCRIPT = """
import shutil
from pathlib import Path
import torch
from cloudtrain_runtime import checkpoint

model = torch.nn.Linear(3, 1)
start = checkpoint.load(model=model)
shutil.rmtree(FOLDER)
Path(FOLDER).write_text("a file")
for step in range(start.step + 1, 5):
    checkpoint.save(step, model=model)
"""


@pytest.mark.parametrize("kind", ["task", "script"])
def test_a_run_that_completes_no_due_checkpoint_fails(
    cli: Cli, small: Callable[..., Path], job: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "no-folder"
    if kind == "task":
        path = small()
        with path.with_name("small.py").open("a") as file:
            file.write(BLOCKS.replace("FOLDER", repr(str(folder))))
    else:
        path = job(SCRIPT_JOB, train_py=SCRIPT.replace("FOLDER", repr(str(folder))))
    done = cli("submit", path, "--local", "--follow", "--json", "--set", f"checkpoint.uri={folder}")
    assert done.code == 4, done.err
    assert done.json["state"] == "FAILED"
    reason = f"none of this run's checkpoints was completed in {folder.as_uri()}"
    assert reason in done.json["reason"]
    assert reason in cli("status", done.json["run"]).out.replace("\n", " ")
