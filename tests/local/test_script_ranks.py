"""At run time, warnings report scripts whose ranks train separately, never save or never report progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli, until

import cloudtrain
from cloudtrain.runs.status import State

pytestmark = pytest.mark.processes

JOB = """\
name: ranks
code: {script: train.py}
cluster: {instance_type: ml.g5.xlarge, instances: 2, processes_per_instance: 1}
limits: {hang: 10s}
"""
ALONE = "2 independent copies"
UNSAVED = "no checkpoint"
UNWATCHED = "a hang would not be noticed"
JOINS = {
    "group": "dist.init_process_group('gloo')\ndist.all_reduce(torch.ones(1))\n"
    "dist.destroy_process_group()\n",
    "mesh": "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2,))\n"
    "dist.broadcast(torch.ones(1), 0)\ndist.destroy_process_group()\n",
}
SAVES = (
    "import os, torch, torch.distributed as dist\n"
    "open(os.environ['CLOUDTRAIN_ML_ROOT'] + '/checkpoints/a.pt', 'w').close()\n"
)
WAITS = """\
import pathlib, time
while not pathlib.Path("PLACE").exists():
    time.sleep(0.05)
"""


def _warnings(cli: Cli, path: Path) -> str:
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 0, done.err
    warnings = cli("status", done.json["run"], "--json").json["warnings"]
    assert set(warnings) <= set(done.json["warnings"])
    return "\n".join(warnings)


@pytest.mark.parametrize(
    "script",
    [
        "import torch\n",
        "import torch.distributed as dist\ndist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)",
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n",
    ],
    ids=["no-group", "groups-of-one", "unused-group"],
)
def test_ranks_that_train_alone_are_reported(
    cli: Cli, job: Callable[..., Path], script: str
) -> None:
    found = _warnings(cli, job(JOB, train_py=script))
    assert found.count(ALONE) == found.count(UNSAVED) == found.count(UNWATCHED) == 1
    assert ("no data has moved in" in found) == ("barrier" in script)


@pytest.mark.parametrize("how", JOINS)
def test_ranks_that_join_get_no_warning(cli: Cli, job: Callable[..., Path], how: str) -> None:
    found = _warnings(cli, job(JOB, train_py=SAVES + JOINS[how]))
    assert ALONE not in found
    assert UNSAVED not in found
    assert UNWATCHED in found


def test_accelerate_joins_ranks_on_cpus(cli: Cli, job: Callable[..., Path]) -> None:
    """Without cpu=True, and without `accelerate launch`, Accelerate would let each rank train alone."""
    pytest.importorskip("accelerate")
    script = """\
import torch
from accelerate import Accelerator
accelerator = Accelerator()
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, loader = accelerator.prepare(torch.nn.Linear(4, 1), loader)
assert (accelerator.num_processes, len(loader)) == (2, 8)
"""
    assert ALONE not in _warnings(cli, job(JOB, train_py=script))


def test_a_script_that_starts_its_ranks_gets_no_warning(cli: Cli, job: Callable[..., Path]) -> None:
    script = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'torch.distributed.run', '--help'])\n"
    assert ALONE not in _warnings(cli, job(JOB, train_py=script))


def test_status_warns_while_such_a_script_runs(job: Callable[..., Path], tmp_path: Path) -> None:
    path = job(JOB, train_py=WAITS.replace("PLACE", str(tmp_path / "go")))
    run = cloudtrain.submit(path, local=True)
    try:
        status = until(
            lambda: (
                (status := run.status()).progress.host_ranks.keys() >= {"algo-1", "algo-2"}
                and status
            )
        )
        assert status.state is State.RUNNING
        found = "\n".join(status.to_json()["warnings"])
        assert found.count(ALONE) == found.count(UNSAVED) == found.count(UNWATCHED) == 1
    finally:
        (tmp_path / "go").touch()
    assert run.wait(300).exit_code == 0


@pytest.mark.parametrize("is_saved", [False, True], ids=["not-due", "saved"])
def test_a_script_with_the_three_calls_has_no_warning(
    job: Callable[..., Path], *, is_saved: bool
) -> None:
    script = """\
import os, torch, torch.distributed as dist
from cloudtrain_runtime import checkpoint
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
checkpoint.load(model=model)
checkpoint.save(1, model=model, force=FORCE)
open(os.environ["SM_MODEL_DIR"] + "/model", "w").close()
dist.destroy_process_group()
"""
    run = cloudtrain.submit(job(JOB, train_py=script.replace("FORCE", str(is_saved))), local=True)
    assert run.wait(300).exit_code == 0
    status = run.status()
    assert status.to_json()["warnings"] == []
    found = {host: event["saved"] for host, event in status.progress.host_ranks.items()}
    assert found == {"algo-1": is_saved, "algo-2": is_saved}
