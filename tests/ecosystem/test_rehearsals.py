"""Jobs with a planted fault: a rehearsal fails at the check that each one names. Jobs without one have no failed check.

A rehearsal starts and interrupts several runs, so `make test` does not include these: `make test-rehearsal` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.jobs import EXAMPLES, Cli

from cloudtrain_runtime.contract import GRACE_VARIABLE

CORPUS = Path(__file__).parents[1] / "rehearsal" / "corpus"
FAULTS = {path.parent.name: path.parent for path in sorted(CORPUS.glob("*/expected.yaml"))}
BOUNDED = ("--json", "--minutes", "4.5")  # the fixture waits for five minutes
WITHOUT_CHECKPOINTS = ("script-launch", "script-sagemaker", "script-spawn")
"""Examples of scripts that save their model at the end only."""
NEED_MORE = ("finetune-lora", "finetune-task")
"""Examples that need weights of another run, or further packages."""
SOUND = [path.parent.name for path in sorted(EXAMPLES.glob("*/job.yaml")) if path.parent.name not in NEED_MORE]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_fails_its_check(cli: Cli, name: str) -> None:
    folder = FAULTS[name]
    expected = yaml.safe_load((folder / "expected.yaml").read_text())
    environ = {GRACE_VARIABLE: str(expected["grace_seconds"])} if "grace_seconds" in expected else {}
    done = cli("rehearse", folder / "job.yaml", *BOUNDED, environ={"PIP_NO_INDEX": "1", **environ})
    failed = {check["name"] for check in done.json["checks"] if check["result"] == "failed"}
    assert expected["fails"] in failed, done.out
    assert (done.code, done.json["verdict"]) == (4, "failed")


@pytest.mark.parametrize("name", SOUND)
def test_an_example_fails_only_what_it_lacks(cli: Cli, name: str) -> None:
    done = cli("rehearse", EXAMPLES / name / "job.yaml", *BOUNDED)
    failed = {check["name"] for check in done.json["checks"] if check["result"] == "failed"}
    expected = {"saves", "resumes"} if name in WITHOUT_CHECKPOINTS else set()
    assert failed == expected, done.out
    assert done.code == (4 if expected else 0)


def test_a_small_gpu_here_is_no_failure(cli: Cli, job: Callable[..., Path]) -> None:
    """The Task raises the message of a GPU of 4 GiB, as no GPU is needed for this test."""
    path = job(
        "name: small\ncode: {task: 'small:Small'}\ncluster: {instance_type: ml.p4d.24xlarge}\ntrain: {steps: 8}\n",
        small_py="""
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Small(Task):
    def model(self):
        return nn.Linear(3, 1)
    def datasets(self):
        return {"train": TensorDataset(torch.zeros(64, 3))}
    def loss(self, model, batch):
        if context().world_size > 1:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 4.00 GiB"
            )
        return model(batch[0]).square().mean()
""",
    )
    done = cli("rehearse", path, *BOUNDED)
    (trains,) = [check for check in done.json["checks"] if check["name"] == "trains"]
    assert (done.code, trains["result"]) == (0, "unknown"), done.out
    assert "a GPU here of 4.3 GB is too small" in trains["detail"]
