"""Local runs whose code imports packages of `code.include`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.code_folders import write_tree
from support.jobs import Cli

pytestmark = pytest.mark.processes

JOB = """\
name: demo
code: {{directory: code, include: [libs/shared_lib], env: {{PYTHONPATH: more}}, {entry}}}
cluster: {{instance_type: ml.m5.large, processes_per_instance: 1}}
"""
SHARED = "import os\nWHERE = os.path.relpath(__file__)\n"
TRAIN = (
    "import multiprocessing\n"
    "import shared_lib, extra\n"
    "def work(): print('worker:', shared_lib.WHERE, flush=True)\n"
    "if __name__ == '__main__':\n"
    "    print('seen:', shared_lib.WHERE, extra.__name__, flush=True)\n"
    "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
    "    process.start(); process.join(); raise SystemExit(process.exitcode)\n"
)
TASK = """\
import torch
from shared_lib import WHERE
from cloudtrain_runtime import Task

class Small(Task):
    def model(self):
        print('seen:', WHERE, flush=True)
        return torch.nn.Linear(1, 1)

    def datasets(self):
        return {'train': torch.utils.data.TensorDataset(torch.ones(4, 1))}

    def loss(self, model, batch):
        return model(batch[0]).sum()
"""


@pytest.mark.parametrize(
    "entry",
    [
        "script: train.py",
        "module: package.train",
        "module: shared_lib.train",
        "command: [python, train.py]",
        'task: "tasks:Small"',
        'task: "shared_lib.tasks:Small"',
    ],
)
def test_every_entry_imports_an_included_package(cli: Cli, tmp_path: Path, entry: str) -> None:
    folder = write_tree(
        tmp_path / "job", code__train_py=TRAIN, code__tasks_py=TASK, code__more__extra_py=""
    )
    write_tree(folder, code__package__train_py=TRAIN)
    write_tree(folder / "libs" / "shared_lib", train_py=TRAIN, tasks_py=TASK)
    (folder / "libs" / "shared_lib" / "__init__.py").write_text(SHARED)
    train = "train: {epochs: 1, batch_size: 2}\n" if "task:" in entry else ""
    (folder / "job.yaml").write_text(JOB.format(entry=entry) + train)
    done = cli("submit", folder / "job.yaml", "--local", "--follow", "--json")
    assert done.code == 0, done.err
    assert "seen: cloudtrain_include/shared_lib/__init__.py" in done.err
    if "task:" not in entry:
        assert "worker: cloudtrain_include/shared_lib/__init__.py" in done.err
