"""Loops of Accelerate that are attached to the run: stopped and resumed in an epoch, they train the same."""

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

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.contract import CheckpointConfig, MlTree

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="NOT TESTED: Accelerate is not installed: pip install 'cloudtrain[frameworks]'",
    ),
]

JOB = """\
name: accelerate
code: {script: train.py}
cluster: {instance_type: ml.p4d.24xlarge}
checkpoint: {every: 10 steps, keep: 2}
"""
PARTS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    '''Samples with noise, which the process that loads them draws from torch's global generator.'''

    def __init__(self, count, noise=0.1):
        self.noise = noise
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        sample = self.inputs[index] + self.noise * torch.randn(8)
        return sample, sample.sum(0, keepdim=True)


def make_net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
"""
SCRIPT = """
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import Noisy, make_net
from recorder import Recorder
from torch.nn import functional as F
from torch.utils.data import DataLoader

from cloudtrain_runtime.integrations.accelerate import attach

workers, seeded = (int(each) for each in sys.argv[1:])
accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(1, device_specific=True)
net = make_net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
generator = torch.Generator().manual_seed(2) if seeded else None
data = Noisy(244, noise=0 if workers else 0.1)  # workers of a resumed epoch draw other numbers
train = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers, generator=generator)
model, optimizer, train, test, schedule = accelerator.prepare(
    net, optimizer, train, DataLoader(data, batch_size=8), schedule
)
recorder = Recorder()
loop = attach(accelerator, model, total_steps=93)
for epoch in loop.epochs(3):
    model.train()
    for inputs, labels in loop.batches(train):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            recorder.record(loop.step, loss)
            accelerator.log({"train_loss": loss.item(), "epoch": epoch}, step=loop.step)
    if loop.is_stopped:
        break
    model.eval()
    with torch.no_grad():
        losses = [F.mse_loss(model(inputs), labels) for inputs, labels in test]
    accelerator.log({"eval_loss": torch.stack(losses).mean().item()})
print("stopped early:", loop.is_stopped, "at", loop.step)
"""


def test_a_loop_resumes_in_the_middle_of_an_epoch(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    path = job(JOB, train_py=SCRIPT, recorder_py=RECORDER, parts_py=PARTS)
    # Data that the training process loads is a part of the tests with one rank.
    arguments = ('--set=code.args=["2", "1"]',)
    runs = interrupt_and_compare(
        cli, path, tmp_path / "records", stop_at=41, reported=41, settings=arguments
    )
    assert list(runs.losses) == list(range(93))
    assert 41 <= runs.stopped_at < 62  # in the middle of the second epoch
    assert runs.running["total_steps"] == runs.done["total_steps"] == 93
    assert {"train/loss", "validation/loss"} <= set(runs.running["metrics"])
    assert runs.resumed["last_step"] == 93
    assert runs.resumed["metrics"] == pytest.approx(runs.done["metrics"])
    kill_and_compare(
        cli, path, tmp_path / "records", runs, kill_at=25, start=20, settings=arguments
    )


ONE_RANK = """
import json
import os
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from cloudtrain_runtime.integrations.accelerate import attach
from cloudtrain_runtime.process.environment import ml_tree

stop_at, kill_at, fail_at, seed, options = json.loads(sys.argv[1])
PARTS_HERE


class Stream(IterableDataset):
    def __iter__(self):
        return ((sample, sample.sum(0, keepdim=True)) for sample in Noisy(40).inputs)


torch.manual_seed(1)
net = make_net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
data = Stream() if options.get("stream") else Noisy(40)
loader = DataLoader(data, batch_size=4, shuffle=not options.get("stream"))
accelerator = Accelerator(gradient_accumulation_steps=options.get("accumulate", 1))
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
torch.manual_seed(seed)
loop = attach(accelerator, model, total_steps=options.get("total"))
for epoch in loop.epochs(4):
    for inputs, labels in loop.batches(loader):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        sys.stdout.write(f"STEP {json.dumps([loop.step, loss.item()])}\\n")
        sys.stdout.flush()
        if loop.step == kill_at:
            os._exit(9)
        if loop.step == fail_at:
            raise ValueError("a banana")
        if loop.step == stop_at:
            ml_tree(os.environ).stop_notice.touch()
        if options.get("leaves") and loop.step % 8 == 7:
            break
    if loop.is_stopped:
        break
    sys.stdout.write(f"STEP {json.dumps([f'evaluation {epoch}', torch.rand(1).item()])}\\n")
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[CommandServer]:
    """Run programs in processes that are forked from one that has imported Accelerate."""
    with serve_programs("accelerate", "cloudtrain_runtime.integrations.accelerate") as server:
        yield server


def start_one_rank(
    programs: CommandServer,
    folder: Path,
    every: int,
    *,
    seed: int = 1,
    options: dict[str, Any],
    **ends: int,
) -> dict[str, float]:
    """Run ONE_RANK as a run; return its last loss of each step, and a number of each evaluation."""
    tree = MlTree(folder)
    for path in (tree.run_config.parent, tree.stop_notice.parent, tree.checkpoints):
        path.mkdir(parents=True, exist_ok=True)
    tree.stop_notice.unlink(missing_ok=True)
    checkpoint = CheckpointConfig(
        uri="", every_seconds=None, every_steps=every, keep=2, resume="auto"
    )
    tree.run_config.write_text(replace(SCRIPT_RUN, checkpoint=checkpoint).to_json())
    names = ("stop_at", "kill_at", "fail_at")
    given = json.dumps([*(ends.get(name, -1) for name in names), seed, options])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = ONE_RANK.replace("PARTS_HERE", PARTS)
    done = programs.run_program(
        program, given, environ={**ranks, "CLOUDTRAIN_ML_ROOT": str(folder)}, cwd=folder
    )
    expected = 9 if "kill_at" in ends else int("fail_at" in ends)
    assert done.code == expected, done.err
    rows = [
        json.loads(line.removeprefix("STEP "))
        for line in done.out.splitlines()
        if line.startswith("STEP ")
    ]
    return {str(name): value for name, value in rows}


@pytest.mark.parametrize(
    ("every", "interruptions", "options"),
    [
        # 10 batches per epoch. In an epoch, at its last step, and in one that no process had begun:
        (100, [{"stop_at": 4}, {"stop_at": 19}, {"stop_at": 26}], {}),
        pytest.param(10, [{"kill_at": 23}], {}, marks=pytest.mark.promise),
        (3, [{"kill_at": 23}, {"stop_at": 28}], {"total": 33}),
        (2, [{"kill_at": 5}], {"accumulate": 4}),
        (3, [{"kill_at": 8}], {"leaves": 1}),
        (4, [{"kill_at": 10}], {"stream": True}),
        (3, [{"fail_at": 7}], {}),
    ],
    ids=["stops", "end of epoch", "total", "accumulation", "break", "stream", "error"],
)
def test_a_loop_resumes_one_rank_at_any_step(
    programs: CommandServer,
    tmp_path: Path,
    every: int,
    interruptions: list[dict[str, int]],
    options: dict[str, Any],
) -> None:
    expected = start_one_rank(programs, tmp_path / "whole", every, options=options)
    found: dict[str, float] = {}
    for seed, ends in enumerate([*interruptions, {}], 1):
        found |= start_one_rank(
            programs, tmp_path / "parts", every, seed=seed, options=options, **ends
        )
    assert found == expected


def test_an_error_in_the_loop_saves_nothing(programs: CommandServer, tmp_path: Path) -> None:
    start_one_rank(programs, tmp_path, 1, options={}, fail_at=7)
    steps = {each.name for each in MlTree(tmp_path).checkpoints.iterdir()}
    assert steps == {"checkpoint-6", "checkpoint-7"}


def test_mistakes_of_a_script_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from torch.utils.data import DataLoader

    from cloudtrain_runtime.integrations.accelerate import attach

    accelerator, plain = Accelerator(cpu=True), DataLoader([1.0, 2.0])
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), plain)
    with pytest.raises(TypeError, match=r"expected an accelerate.Accelerator, got builtins.str"):
        attach("accelerator", model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected the models"):
        attach(accelerator)
    named = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        attach(Accelerator(cpu=True, project_config=named), model)
    loop = attach(accelerator, model, total_steps=3)  # outside of a run
    assert [(epoch, len(list(loop.batches(loader)))) for epoch in loop.epochs()] == [(0, 2), (1, 1)]
    with pytest.raises(TypeError, match="expected a loader that"):
        next(loop.batches(plain))
    tree = MlTree(tmp_path)
    tree.run_config.parent.mkdir(parents=True)
    tree.run_config.write_text(SCRIPT_RUN.to_json())
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path))
    loop = attach(accelerator, model)
    with pytest.raises(ValueError, match="attached already"):
        attach(accelerator, model)
    with pytest.raises(ValueError, match="call attach after prepare"):
        accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.prepare(DataLoader([1.0]))
    next(loop.batches(loader))
    with pytest.raises(ValueError, match="this is the second one"):
        next(loop.batches(loader))
