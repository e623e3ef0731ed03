"""Workers of local runs, and the processes that start them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, processes_of, until

pytestmark = pytest.mark.processes

JOB = "name: probe\ncode: {script: sub/probe.py, args: [--lr, 0.1]}\ncluster: {instance_type: ml.g5.xlarge, RANKS}\n"


def write(job: Callable[..., Path], script: str, ranks: int) -> Path:
    path = job(JOB.replace("RANKS", f"processes_per_instance: {ranks}"))
    (path.parent / "sub").mkdir(exist_ok=True)
    (path.parent / "sub" / "probe.py").write_text(script)
    return path


LOADERS = """
import multiprocessing, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    '''A class of __main__, which workers of every kind must find.'''
    def __len__(self): return 6
    def __getitem__(self, i): return Sample(i * i)

class Sample:
    def __init__(self, value): self.value = value

def collate(samples): return [sample.value for sample in samples]

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=3, num_workers=1, collate_fn=collate, multiprocessing_context=method)
        print("LOADED", method, list(loader))
"""


def test_classes_of_the_script_reach_its_data_loaders(cli: Cli, job: Callable[..., Path]) -> None:
    done = cli("submit", write(job, LOADERS, ranks=1), "--local", "--follow", "--json")
    assert done.code == 0, done.err
    for method in ("fork", "spawn", "forkserver"):
        assert f"LOADED {method} [[0, 1, 4], [9, 16, 25]]" in done.err


VARIABLES = """
import json, os
print("VARIABLES", os.environ["RANK"], json.dumps(dict(os.environ)), flush=True)
"""
OF_ONE_START = {
    *("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"),
    # torchrun's agent holds the store of its ranks, where it has one.
    "TORCHELASTIC_USE_AGENT_STORE",
}
FOR_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What torchrun tells itself, and its ranks inherit."""


def read_variables(text: str) -> dict[int, dict[str, str]]:
    lines = [line.partition("VARIABLES ")[2] for line in text.splitlines() if "VARIABLES " in line]
    split = (line.partition(" ") for line in lines)
    return {int(rank): json.loads(variables) for rank, _, variables in split}


def test_ranks_of_one_host_have_torchruns_variables(cli: Cli, job: Callable[..., Path]) -> None:
    path = write(job, VARIABLES, ranks=2)
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--local-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(
        [*torchrun, str(path.parent / "sub" / "probe.py")],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    own, other = read_variables(done.err), read_variables(plain.stdout)
    assert sorted(own) == sorted(other) == [0, 1]
    for rank in own:
        names = set(other[rank]) - set(environ) - FOR_TORCHRUN
        assert len(names) > 10
        assert {name: own[rank].get(name) for name in names - OF_ONE_START} == {
            name: other[rank][name] for name in names - OF_ONE_START
        }
        assert set(own[rank]) >= names & OF_ONE_START
    assert own[0]["MASTER_PORT"] == own[1]["MASTER_PORT"]


TASK = """
import sys, time
from torch import nn
from cloudtrain_runtime import Task

class Sleep(Task):
    def model(self): return nn.Linear(1, 1)

    def datasets(self):
        print("up, forked" if "torch._dynamo" in sys.modules else "up, fresh", flush=True)
        time.sleep(600)
        return {"train": [0.0] * 8}

    def loss(self, model, batch): return model(batch).mean()
"""
TASK_JOB = """
name: probe
code: {task: "probe:Sleep"}
cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 2}
train: {steps: 1, batch_size: 1, learning_rate: 0.1}
"""
SCRIPT = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize("kind", ["task", "script"])
@pytest.mark.parametrize("victim", ["launcher.agent", "launch"])
def test_nothing_outlives_the_agent_or_the_launcher(
    cli: Cli, job: Callable[..., Path], victim: str, kind: str
) -> None:
    path = write(job, SCRIPT, ranks=2) if kind == "script" else job(TASK_JOB, probe_py=TASK)
    run = cli("submit", path, "--local", "--json").json["run"]
    sign = "up" if kind == "script" else "up, forked"
    until(lambda: cli("logs", run, "--raw").out.count(sign) == 2)
    found = [p for p in processes_of(run) if f"cloudtrain_runtime.{victim}" in p.cmdline()]
    # A Task's ranks and the server that forks them have the agent's command line.
    (process,) = [p for p in found if p.ppid() not in {other.pid for other in found}]
    process.kill()
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "FAILED"
    assert processes_of(run) == []


@pytest.mark.parametrize(
    ("kind", "wish", "compiled"),
    [("task", "", ["server"]), ("task", "1", []), ("script", "", [])],
)
def test_launcher_compiles_the_runtime_for_a_task(
    cli: Cli, job: Callable[..., Path], kind: str, wish: str, compiled: list[str]
) -> None:
    """A script imports little of the runtime, and its end does not wait for a compiler."""
    path = write(job, "", ranks=1)
    if kind == "task":
        ended = TASK.replace("time.sleep(600)", "sys.exit(3)")
        path = job(TASK_JOB.replace("instance: 2", "instance: 1"), probe_py=ended)
    # The variable that stops Python's own compiler.
    setting = f"code.env.PYTHONDONTWRITEBYTECODE='{wish}'"
    done = cli("submit", path, "--local", "--follow", "--json", "--set", setting)
    folder = Path(done.json["artifacts"]["folder"])
    runtime = folder / "hosts" / "algo-1" / "opt" / "ml" / "code" / "cloudtrain_runtime"
    # No rank imports the server of models, so only the launcher can have compiled it.
    found = [each.name.partition(".")[0] for each in runtime.rglob("serving/**/server.*.pyc")]
    assert found == compiled
