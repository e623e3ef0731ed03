"""Local runs that fail: the reason, the remaining processes, and resuming after the failure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import Cli, processes_of, until
from support.local_runs import LOG_EVERY_STEP, losses_by_step

from cloudtrain_runtime.contract import MlTree, parse_event
from cloudtrain_runtime.process.heartbeat import read_heartbeats

pytestmark = pytest.mark.processes

Small = Callable[..., Path]
TWO_RANKS = "--set=cluster.processes_per_instance=2"


def test_a_killed_worker_is_the_reason_and_a_run_can_resume(cli: Cli, small: Small) -> None:
    path = small(seconds=0.1)
    shape = (
        "--instances",
        "2",
        "--set",
        "cluster.processes_per_instance=2",
        "--set",
        "train.epochs=30",
    )
    run = cli("submit", path, "--local", "--json", *shape).json["run"]
    until(lambda: (cli("status", run, "--json").json["last_checkpoint"] or {}).get("step", 0) >= 4)
    worker = until(
        lambda: _worker(Path(cli("status", run, "--json").json["artifacts"]["folder"]), rank=3)
    )
    worker.kill()
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "FAILED"
    assert status["exit_code"] == 4
    assert status["reason"] == "rank 3 on algo-2 (local rank 1) was killed by SIGKILL"
    assert processes_of(run) == []
    step = status["last_checkpoint"]["step"]
    rest = cli(
        "submit", path, "--local", *shape, "--set", f"checkpoint.resume={run}", "--set", "code.args.seconds=0",
        "--follow", "--json", *LOG_EVERY_STEP,
    )  # fmt: skip
    assert rest.code == 0, rest.err
    assert rest.json["first_step"] == step
    assert min(losses_by_step(cli, rest.json["run"])) == step + 1
    assert f"resumed from step {step}" in rest.err


def _worker(folder: Path, rank: int) -> psutil.Process | None:
    """Return the process of a rank, by the heartbeat files of its run."""
    trees = [MlTree(host / "opt" / "ml") for host in (folder / "hosts").iterdir()]
    pids = [
        beat.pid for tree in trees for beat in read_heartbeats(tree.heartbeats) if beat.rank == rank
    ]
    return psutil.Process(pids[0]) if pids else None


ORPHAN = """
import os, time
from pathlib import Path
import psutil

launcher = next(each for each in psutil.Process().parents() if "cloudtrain_runtime.launch" in each.cmdline())
started = Path(os.environ["STARTED"]) / os.environ["RANK"]
started.write_text(str(launcher.pid))
while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
time.sleep(3)
started.with_suffix(".orphan").touch()
time.sleep(60)
"""


@pytest.mark.promise
def test_no_rank_outlives_the_first_process_of_its_host(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    """The other host would be waited for. In a container the kernel ends all processes with the first one."""
    path = job(
        f"name: orphan\ncode: {{script: orphan.py, env: {{STARTED: {tmp_path}}}}}\n"
        "cluster: {instance_type: ml.m5.large, instances: 2}\n",
        orphan_py=ORPHAN,
    )
    run = cli("submit", path, "--local", "--json").json["run"]
    until(lambda: len([each for each in tmp_path.glob("[01]") if each.read_text()]) == 2)
    psutil.Process(int((tmp_path / "0").read_text())).kill()
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["reason"] == "the container of algo-1 ended with SIGKILL; see its log"
    assert processes_of(run) == []
    assert not (tmp_path / "0.orphan").exists()


ENDS_EARLY = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Early(Task):
    def model(self):
        return nn.Linear(3, 1)

    def datasets(self):
        return {"train": TensorDataset(torch.zeros(40, 3))}

    def loss(self, model, batch):
        if context().step == 3:
            os._exit(0)
        return model(batch[0]).square().mean()
"""


@pytest.mark.parametrize("hang", ["1h", "off"])
def test_a_rank_that_exits_early_with_0_has_failed(
    cli: Cli, job: Callable[..., Path], hang: str
) -> None:
    path = job(
        "name: early\ncode: {task: early:Early}\ncluster: {instance_type: ml.m5.large, processes_per_instance: 2}\n"
        f"train: {{steps: 8, batch_size: 4}}\nlimits: {{hang: {hang}}}\n",
        early_py=ENDS_EARLY,
    )
    status = cli("submit", path, "--local", "--follow", "--json")
    assert (status.code, status.json["state"]) == (4, "FAILED"), status.err
    reason = "(local rank 0) ended with exit code 0 after step 3, before its training had ended (os._exit?)"
    assert status.json["reason"] == f"rank 0 on algo-1 {reason}"


STOCHASTIC_TASK = """
import os, signal, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset
from cloudtrain_runtime import Task, context

class Exact(Task):
    def __init__(self, die_at=None):
        self.die_at = die_at

    def model(self):
        return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))

    def datasets(self):
        inputs = torch.randn(53, 3, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return {"train": Subset(data, range(47)), "validation": Subset(data, range(47, 53))}

    def loss(self, model, batch):
        if model.training and (context().rank, context().step) == (1, self.die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(model(batch[0]), batch[1])
"""


@pytest.mark.promise
def test_two_ranks_resume_exactly(cli: Cli, job: Callable[..., Path]) -> None:
    """The run is killed within an epoch, with an incomplete last step, dropout, batch norm and accumulation."""
    path = job(
        "name: exact\ncode: {task: exact:Exact, env: {CLOUDTRAIN_LOG_EVERY_STEPS: 1}}\n"
        "cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 2}\n"
        "train: {epochs: 3, batch_size: 3, accumulate: 2}\ncheckpoint: {every: 1 steps}\n",
        exact_py=STOCHASTIC_TASK,
    )

    def trace(*overrides: str) -> tuple[dict[str, Any], dict[tuple[str, int], float]]:
        arguments = [part for override in overrides for part in ("--set", override)]
        status = cli("submit", path, "--local", "--follow", "--json", *arguments).json
        run = status["run"]
        events = (parse_event(line["text"]) for line in cli("logs", run, "--json").json["lines"])
        losses = {
            (e["event"], e["step"]): e["loss"]
            for e in events
            if e and e["event"] in ("step", "evaluation")
        }
        return status, losses

    _, uninterrupted = trace()
    killed, _ = trace("code.args.die_at=6")
    again, rest = trace(f"checkpoint.resume={killed['run']}")
    # Each checkpoint is saved during the next step, so the last one can be incomplete.
    assert again["first_step"] in (5, 6)
    assert rest == {
        key: loss for key, loss in uninterrupted.items() if key[1] > again["first_step"]
    }
    assert len(rest) > 6


@pytest.mark.promise
def test_retry_restarts_workers_from_the_last_checkpoint(cli: Cli, small: Small) -> None:
    path = small(fail_at=5, fail_rank=1, only_first_try=True)
    done = cli(
        "submit",
        path,
        "--local",
        TWO_RANKS,
        "--set=limits.retries=2",
        "--follow",
        "--json",
        *LOG_EVERY_STEP,
    )
    assert done.code == 0, done.err
    assert done.json["state"] == "SUCCEEDED"
    assert done.json["first_step"] == 4  # saved every 2 steps; the failure is in the sixth step
    assert "broken on purpose" in done.err


SLOW_COMMIT = """
from cloudtrain_runtime.checkpoint.storage import FolderStorage

commit = FolderStorage.commit

def commit_slowly(*args):
    time.sleep(3)
    return commit(*args)

FolderStorage.commit = commit_slowly
"""


def test_save_in_progress_survives_a_failing_rank(cli: Cli, small: Small) -> None:
    path = small(fail_at=2, fail_rank=1)
    path.with_name("small.py").write_text(path.with_name("small.py").read_text() + SLOW_COMMIT)
    done = cli("submit", path, "--local", TWO_RANKS, "--follow", "--json")
    assert done.code == 4
    assert "rank 1 has failed; the save of step 2 is in progress" in done.err
    assert done.json["reason"].startswith("rank 1 on algo-1 (local rank 1) failed: ValueError")
    assert [
        each["step"] for each in cli("checkpoints", done.json["run"], "--json").json["checkpoints"]
    ] == [2]


def test_no_rank_waits_for_the_save_of_a_killed_rank(cli: Cli, small: Small) -> None:
    """The save has failed, so the other ranks do not wait for it."""
    path = small(fail_at=2, fail_rank=1)
    source = (
        path.with_name("small.py")
        .read_text()
        .replace("raise ValueError(", "os.kill(os.getpid(), 9); print(")
    )
    path.with_name("small.py").write_text(source + SLOW_COMMIT)
    done = cli("submit", path, "--local", TWO_RANKS, "--follow", "--json")
    assert done.code == 4
    assert "was killed by SIGKILL" in done.json["reason"]
    # A rank can start to wait before it detects the failed save. The failure ends its wait, not the time limit.
    assert "is in progress" not in done.err or "no checkpoint of step 2, failed: " in done.err
    assert "waited for no longer" not in done.err


@pytest.mark.promise
def test_an_exception_is_the_reason_with_its_traceback(cli: Cli, small: Small) -> None:
    done = cli(
        "submit", small(fail_at=3, fail_rank=1), "--local", "--instances", "2", "--follow", "--json"
    )
    assert done.code == 4
    assert done.json["state"] == "FAILED"
    reason = done.json["reason"]
    assert reason.startswith(
        "rank 1 on algo-2 (local rank 0) failed: ValueError: the loss of this rank is broken"
    )
    assert "small.py" in reason
    assert len(reason) <= 1024
    failure = (
        Path(done.json["artifacts"]["folder"])
        / "hosts"
        / "algo-2"
        / "opt"
        / "ml"
        / "output"
        / "failure"
    )
    assert failure.read_text() == reason
    assert "Traceback" not in cli("status", done.json["run"]).err
    assert "model" not in done.json["artifacts"]


def test_a_mistake_in_a_task_is_reported_at_its_line(cli: Cli, small: Small) -> None:
    path = small()
    path.with_name("small.py").write_text(
        path.with_name("small.py").read_text().replace("F.mse_loss(", "float(")
    )
    path.with_name("small.py").write_text(
        path.with_name("small.py")
        .read_text()
        .replace("return float(model(batch[0]), batch[1])", "return 0.5")
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4
    assert done.json["reason"] == (
        "rank 0 on algo-1 (local rank 0) failed: small.py:26:5  loss() must return a scalar tensor, the mean over the "
        "batch's samples; it returned a float"
    )
    assert "Traceback" not in done.err


def test_a_mistake_that_only_ranks_can_find_runs_no_step(cli: Cli, small: Small) -> None:
    path = small()
    source = path.with_name("small.py").read_text()
    mixin = "class Mixin:\n    def collate(self): ...\n\n\nclass Small(Mixin, Task):"
    path.with_name("small.py").write_text(source.replace("class Small(Task):", mixin))
    assert cli("plan", path, "--local").code == 0
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4
    assert "  collate(self): expected collate(self, samples)" in done.json["reason"]
    assert done.json["last_step"] is None
    assert "Traceback" not in done.err


def test_a_task_that_ends_its_process_has_failed(cli: Cli, small: Small) -> None:
    """Exit code 0 is a failure, too: the training is incomplete, and other ranks report only a lost connection."""
    path = small(fail_at=3, fail_rank=1)
    source = path.with_name("small.py").read_text()
    path.with_name("small.py").write_text(
        source.replace("raise ValueError(", "raise SystemExit(0 and ")
    )
    done = cli("submit", path, "--local", TWO_RANKS, "--follow", "--json")
    assert done.code == 4
    assert done.json["reason"].startswith(
        "rank 1 on algo-1 (local rank 1) failed: TaskError: the Task ended its process, by sys.exit(0)"
    )


def test_the_exception_of_a_script_is_the_reason(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: broken\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}\n",
        train_py="import sys\nraise RuntimeError('no such luck')\n",
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4
    assert "RuntimeError: no such luck" in done.json["reason"]
    path.with_name("train.py").write_text("import sys\nsys.exit(3)\n")
    assert "exit code 3" in cli("submit", path, "--local", "--follow", "--json").json["reason"]


@pytest.mark.aws
def test_missing_data_in_s3_is_the_reason(cli: Cli, small: Small, aws: dict[str, str]) -> None:
    done = cli(
        "submit",
        small(),
        "--local",
        "--follow",
        "--json",
        "--set",
        "data.train=s3://cloudtrain-test/nothing",
    )
    assert done.code == 4
    assert done.json["reason"] == "channel train: there is nothing at s3://cloudtrain-test/nothing"
