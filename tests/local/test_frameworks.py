"""Scripts of the examples that are killed, restarted, stopped and resumed give the results of an uninterrupted run."""

import importlib.util
import json
import shutil
import tarfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from support.jobs import (
    EXAMPLES,
    Cli,
    processes_of,
    until,
)

pytestmark = pytest.mark.processes

# Runs train.py and records the inputs of the model and the loss on each rank. At step KILL_AT it waits for a checkpoint
# and kills one rank, once. At step STOP_AT it waits for the stop notice.
PROBE = """
import glob, json, os, runpy, signal, time, zlib
from pathlib import Path
import torch
from cloudtrain_runtime import context
from cloudtrain_runtime.process.environment import ml_tree

place = context()
kill_at, stop_at = int(os.environ["KILL_AT"]), int(os.environ["STOP_AT"])
# torchrun's restart count is not used, because it does not grow when a host restarts after losing another host.
start = len(glob.glob(f"{os.environ['RECORDS']}/[0-9]*-{place.rank}"))
killed = Path(os.environ["RECORDS"], "killed")
records = open(f"{os.environ['RECORDS']}/{start}-{place.rank}", "a", buffering=1)
plain = torch.nn.functional.cross_entropy
rows = []

def record_rows(module, inputs):
    if isinstance(module, torch.nn.Linear) and module.in_features == 64:
        rows[:] = [zlib.crc32(row.numpy().tobytes()) for row in inputs[0].detach()]

def cross_entropy(scores, labels):
    if (place.step, place.rank) == (kill_at, 1) and not killed.exists():
        wait_for(lambda: glob.glob(os.environ["SAVED"] + "/step-*/manifest.json"))
        killed.write_text(str(start))
        os.kill(os.getpid(), signal.SIGKILL)
    if place.step == stop_at:
        Path(os.environ["RECORDS"], f"waits-{place.rank}").touch()
        wait_for(ml_tree(os.environ).stop_notice.exists)
    if stop_at >= 0:
        time.sleep(0.1)  # with slow steps, ranks exchange the stop notice at each step
    loss = plain(scores, labels)
    records.write(json.dumps([place.step, rows, loss.item()]) + "\\n")
    return loss

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

torch.nn.functional.cross_entropy = cross_entropy
torch.nn.modules.module.register_module_forward_pre_hook(record_rows)
runpy.run_path("train.py", run_name="__main__")
"""

# Hosts and ranks per host. A framework's own restart needs no second host.
SHAPES = {"script-ddp": (2, 1), "script-lightning": (1, 2), "script-accelerate": (1, 2)}
EPOCHS = 2
SAMPLES_PER_STEP = 256
STEPS_PER_EPOCH = 8  # 1,797 samples; the last step has 5, so ranks have different numbers
NEVER = -1


@dataclass(frozen=True)
class Step:
    """Inputs and losses of all ranks for one step."""

    rows: list[int]
    losses: list[float]


def read(folder: Path, start: int, world_size: int) -> dict[int, Step]:
    """Return the steps of one start that all ranks have recorded."""
    ranks = [
        {step: (rows, loss) for step, rows, loss in map(json.loads, path.read_text().splitlines())}
        for path in sorted(folder.glob(f"{start}-*"))
    ]
    complete = set.intersection(*map(set, ranks)) if len(ranks) == world_size else set()
    return {
        step: Step(
            [row for rank in ranks for row in rank[step][0]], [rank[step][1] for rank in ranks]
        )
        for step in sorted(complete)
    }


def read_starts(
    folder: Path, world_size: int, first: int = 0, last: int | None = None
) -> dict[int, Step]:
    """Return the steps of several starts. On a slow machine torchrun may miss a host and start all ranks again."""
    starts = sorted({int(path.name.partition("-")[0]) for path in folder.glob("[0-9]*-*")})
    chosen = [start for start in starts if first <= start and (last is None or start <= last)]
    return {
        step: found for start in chosen for step, found in read(folder, start, world_size).items()
    }


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name: str = request.param
    module = {"script-lightning": "lightning", "script-accelerate": "accelerate"}.get(name, "torch")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"NOT TESTED: {name} needs {module}: pip install '.[frameworks]'")
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder)
    (folder / "probe.py").write_text(PROBE)
    return folder / "job.yaml"


def settings(
    records: Path,
    shape: tuple[int, int],
    *,
    kill_at: int = NEVER,
    stop_at: int = NEVER,
    **others: str,
) -> list[str]:
    records.mkdir()
    hosts, ranks = shape
    fields = {
        "code.script": "probe.py",
        "code.args.epochs": EPOCHS,
        "code.args.batch-size": SAMPLES_PER_STEP // (hosts * ranks),
        "code.env.RECORDS": records,
        "code.env.KILL_AT": kill_at,
        "code.env.STOP_AT": stop_at,
        "code.env.SAVED": records.with_name(f"{records.name}-saved"),
        "checkpoint.uri": records.with_name(f"{records.name}-saved"),
        "checkpoint.every": "2 steps",
        "cluster.processes_per_instance": ranks,
        **others,
    }
    return [
        "--local",
        "--instances",
        str(hosts),
        "--json",
        *(f"--set={name}={value}" for name, value in fields.items()),
    ]


def weights(status: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    with tarfile.open(status["artifacts"]["model"]) as archive:
        return torch.load(archive.extractfile("model.pt"), weights_only=True)


@pytest.mark.parametrize("example", SHAPES, indirect=True)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    cli: Cli, example: Path, tmp_path: Path
) -> None:
    uninterrupted, first, second = (
        tmp_path / name for name in ("uninterrupted", "first", "second")
    )
    shape = SHAPES[example.parent.name]
    world_size = shape[0] * shape[1]
    done = cli("submit", example, "--follow", *settings(uninterrupted, shape))
    assert done.code == 0, done.err
    expected = read_starts(uninterrupted, world_size)
    assert sorted(expected) == list(range(EPOCHS * STEPS_PER_EPOCH)), cli(
        "logs", done.json["run"]
    ).out
    assert [len(expected[step].rows) for step in (0, STEPS_PER_EPOCH - 1)] == [256, 5]
    assert done.json["last_checkpoint"]["step"] == EPOCHS * STEPS_PER_EPOCH

    # In the middle of the first epoch a worker is killed. In the middle of the second epoch the run is stopped.
    killed_at, waits_at = 5, 11
    retry = {"limits.retries": "1"}
    run = cli(
        "submit", example, *settings(first, shape, kill_at=killed_at, stop_at=waits_at, **retry)
    ).json["run"]
    until(
        lambda: (
            len(list(first.glob("waits-*"))) == world_size
            or cli("status", run, "--json").json["exit_code"]
        )
    )
    stopped = cli("stop", run, "--json")
    assert (stopped.json["state"], stopped.json["exit_code"]) == ("STOPPED", 5), cli(
        "logs", run
    ).out
    assert processes_of(run) == []
    killed_start = int((first / "killed").read_text())
    before = read_starts(first, world_size, last=killed_start)
    after = read_starts(first, world_size, killed_start + 1)
    assert killed_at - 1 in before
    assert killed_at not in before
    assert 0 < min(after) < killed_at
    assert min(after) % 2 == 0
    left_at = max(after) + 1
    assert stopped.json["last_checkpoint"]["step"] == left_at
    assert left_at == waits_at + 2  # ranks send the stop notice in one step and read it in the next
    entry = cli("checkpoints", "verify", run, "--step", str(left_at), "--json").json["checkpoints"][
        0
    ]
    assert (entry["state"], entry["world_size"]) == ("complete", world_size), entry

    rest = cli(
        "submit", example, "--follow", *settings(second, shape, **{"checkpoint.resume": run})
    )
    assert rest.code == 0, rest.err
    resumed = read_starts(second, world_size)
    assert sorted(resumed) == list(range(left_at, EPOCHS * STEPS_PER_EPOCH)), cli(
        "logs", rest.json["run"]
    ).out

    every = Counter(zlib.crc32(row.tobytes()) for row in load_digits().data.astype("float32") / 16)
    used = before | after | resumed
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        assert Counter(row for step in steps for row in used[step].rows) == every
    for step, reference in expected.items():
        assert used[step].rows == reference.rows
        assert used[step].losses == reference.losses, "bit by bit"
    for name, value in weights(done.json).items():
        assert torch.equal(weights(rest.json)[name], value)
