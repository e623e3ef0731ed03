"""Scripts that end while a save is in progress: real ranks under the runtime's worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from cloudtrain.backends.container.machine import free_port
from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.storage import open_storage
from cloudtrain_runtime.contract import CheckpointConfig, MlTree, RunConfig

ENTRYPOINTS = Path(__file__).parents[2] / "entrypoints"
SCRIPT = """
import os, threading, torch, torch.distributed as dist
from torch import nn
from cloudtrain_runtime import checkpoint
from cloudtrain_runtime.checkpoint import storage

if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
model = nn.Sequential(nn.Linear({width}, {width}), nn.BatchNorm1d({width}), nn.BatchNorm1d({width}))
wrapped = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
checkpoint.load(model=wrapped, optimizer=optimizer)
wrapped(torch.randn(8, {width})).sum().backward()
optimizer.step()
delay, create = threading.Event(), storage.FolderStorage.create
storage.FolderStorage.create = lambda self, *names: delay.wait({seconds}) or create(self, *names)
checkpoint.save(1, model=wrapped, optimizer=optimizer)
{end}
"""


def start(
    folder: Path,
    uri: str,
    ranks: int,
    end: str = "",
    *,
    width: int = 4,
    seconds: float = 1.0,
    rate: float = 0.1,
) -> str:
    """Run the script to its end; return what it printed."""
    tree = MlTree(folder)
    for each in (tree.run_config.parent, tree.code, tree.root / "output"):
        each.mkdir(parents=True)
    (tree.code / "train.py").write_text(
        SCRIPT.format(width=width, end=end, seconds=seconds, rate=rate)
    )
    checkpoint = CheckpointConfig(uri, None, 1, 3, "auto")
    config = RunConfig("demo", None, "train.py", [], None, ranks, "", 0, None, checkpoint)
    tree.run_config.write_text(config.to_json())
    port = free_port()
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ENTRYPOINTS), os.environ["PYTHONPATH"]]),
        "CLOUDTRAIN_ML_ROOT": str(folder),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "cloudtrain_runtime.worker"],
            cwd=tree.code,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, texts
    return "".join(texts)


def saved_steps(uri: str) -> list[int]:
    return [record.step for record in list_checkpoints(open_storage(uri)) if record.is_complete]


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_a_save_in_progress_completes_when_the_script_ends(end: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    text = start(tmp_path / "ml", uri, 2, end)
    assert saved_steps(uri) == [1], text


def test_a_multipart_save_completes_when_the_script_ends(
    aws: dict[str, str], tmp_path: Path
) -> None:
    """The thread pool that uploads the parts must not be shut down before the save has completed."""
    text = start(tmp_path / "ml", "s3://cloudtrain-test/c", 1, width=3000)
    assert saved_steps("s3://cloudtrain-test/c") == [1], text


def test_a_forced_save_waits_for_the_save_of_the_same_step(tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    end = "checkpoint.save(1, model=wrapped, optimizer=optimizer, force=True); os._exit(0)"
    text = start(tmp_path / "ml", uri, 1, end)
    assert saved_steps(uri) == [1], text


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_saved_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    """After a step each rank has its own batch statistics. DDP continues with those of rank 0."""
    end = "if dist.get_rank() == 0: torch.save(model.state_dict(), 'rank0.pt')"
    start(tmp_path / "ml", str(tmp_path / "c"), 2, end, seconds=0.0)
    expected = torch.load(tmp_path / "ml" / "code" / "rank0.pt", weights_only=True)
    loaded = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    load(loaded, storage_reader=FileSystemReader(tmp_path / "c" / "step-00000001"))
    assert all(torch.equal(loaded["model"][name], value) for name, value in expected.items())


def test_weights_that_differ_are_warned_of_at_a_save(tmp_path: Path) -> None:
    """One rank changes a bias that DDP averages; the saves after it warn once."""
    end = """
with torch.no_grad():
    model[0].bias += dist.get_rank()
checkpoint.save(2, model=wrapped, optimizer=optimizer, force=True)
checkpoint.save(3, model=wrapped, optimizer=optimizer, force=True)
"""
    text = start(tmp_path / "ml", str(tmp_path / "c"), 2, end, seconds=0.0)
    assert text.count("the weights of the ranks are not equal") == 1
    assert "are not equal at step 2: 0.bias. The checkpoint has those of rank 0." in text


def test_a_rate_that_load_replaces_is_named(tmp_path: Path) -> None:
    uri = (tmp_path / "saved").as_uri()
    first = start(tmp_path / "first", uri, 1, seconds=0.0)
    again = start(tmp_path / "again", uri, 1, seconds=0.0)
    assert "warning: optimizer" not in first + again
    second = start(tmp_path / "second", uri, 1, seconds=0.0, rate=0.02)
    assert (
        "warning: optimizer: lr was 0.1 and is 0.02 in the script: the checkpoint's value is used"
        in second
    )
