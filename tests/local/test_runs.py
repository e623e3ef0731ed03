"""Local runs: real launchers, real torchrun, real Gloo."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.jobs import (
    EXAMPLES,
    Cli,
    command,
    processes_of,
    until,
)

import cloudtrain
from cloudtrain_runtime.contract import parse_event

pytestmark = pytest.mark.processes

Small = Callable[..., Path]


def losses(cli: Cli, run: str) -> dict[int, float]:
    events = (parse_event(line["text"]) for line in cli("logs", run, "--json").json["lines"])
    return {event["step"]: event["loss"] for event in events if event and event["event"] == "step"}


EVERY_STEP = ("--set", "code.env.CLOUDTRAIN_LOG_EVERY_STEPS=1")


# ---------------------------------------------------------------- success


def test_the_main_job(cli: Cli, tmp_path: Path) -> None:
    job = EXAMPLES / "digits" / "job.yaml"
    done = cli("submit", job, "--local", "--instances", "2", "--follow", "--json")
    assert done.code == 0, done.err
    content = done.json
    assert content["state"] == "SUCCEEDED"
    assert content["world_size"] == 4
    assert content["metrics"]["test/accuracy"] >= 0.95
    assert content["last_epoch"] == 12
    assert content["last_step"] == content["last_checkpoint"]["step"]
    folder = Path(content["artifacts"]["folder"])
    promised = {"plan.json", "request.json", "state.json", "events.jsonl", "logs", "hosts", "checkpoints", "model"}
    assert promised <= {path.name for path in folder.iterdir()}
    with tarfile.open(content["artifacts"]["model"]) as archive:
        assert sorted(archive.getnames()) == ["analysis.json", "analysis.md", "metrics.json", "model.pt"]
        analysis = json.load(archive.extractfile("analysis.json"))  # type: ignore[arg-type]
    assert analysis["accuracy"] == pytest.approx(content["metrics"]["test/accuracy"], abs=1e-5)
    assert sum(score["support"] for score in analysis["classes"]) == analysis["samples"] == 270
    assert processes_of(content["run"]) == []
    # What was run is what was planned.
    request = json.loads((folder / "request.json").read_text())
    planned = cli("plan", job, "--local", "--instances", "2", "--request").json
    assert _without_run(request) == _without_run(planned)


def _without_run(request: dict[str, Any]) -> str:
    return json.dumps(request, sort_keys=True).replace(request["TrainingJobName"], "RUN")


@pytest.mark.parametrize(
    ("example", "overrides"),
    [
        ("gpt-stdlib", ["train.steps=40", "code.args.files=20", "checkpoint.every=20 steps"]),
        ("script-ddp", []),
    ],
)
def test_the_other_examples(cli: Cli, example: str, overrides: list[str]) -> None:
    arguments = [part for override in overrides for part in ("--set", override)]
    done = cli("submit", EXAMPLES / example / "job.yaml", "--local", "--follow", "--json", *arguments)
    assert done.code == 0, done.err
    with tarfile.open(done.json["artifacts"]["model"]) as archive:
        assert "model.pt" in archive.getnames()
    if example == "gpt-stdlib":
        text = next(line for line in done.err.splitlines() if "unigram entropy" in line)
        entropy = float(text.split("unigram entropy ")[1].split()[0])
        assert done.json["metrics"]["test/loss"] < entropy - 0.25


def test_every_example_is_run_by_a_test() -> None:
    in_test_frameworks = {"script-ddp", "script-lightning", "script-accelerate"}
    in_test_scripts = {"script-launch", "script-sagemaker", "script-spawn"}
    run_here = {"digits", "gpt-stdlib"} | in_test_frameworks | in_test_scripts
    assert {path.parent.name for path in EXAMPLES.glob("*/job.yaml")} == run_here


def test_one_process_and_many_make_the_same_steps(cli: Cli, small: Small) -> None:
    """The same global batch of 12 samples on 1, 2 and 3 ranks; the last step of an epoch has 10."""
    path = small(double=True)
    traces = []
    for instances, ranks, batch in ((1, 1, 12), (2, 1, 6), (1, 3, 4)):
        shape = [
            f"cluster.instances={instances}",
            f"cluster.processes_per_instance={ranks}",
            f"train.batch_size={batch}",
        ]
        overrides = [part for override in shape for part in ("--set", override)]
        done = cli("submit", path, "--local", "--follow", "--json", *overrides, *EVERY_STEP)
        assert done.code == 0, done.err
        assert done.json["world_size"] == instances * ranks
        traces.append(losses(cli, done.json["run"]))
    assert len(traces[0]) == 12
    for trace in traces[1:]:
        assert trace.keys() == traces[0].keys()
        assert list(trace.values()) == pytest.approx(list(traces[0].values()), rel=1.5e-5)  # a unit of 6 digits


def test_the_container_is_the_one_that_sagemaker_has(cli: Cli, job: Callable[..., Path]) -> None:
    script = """
import json, os, sys
here = os.environ
if here["RANK"] == here["PRINT_RANK"]:
    ml = here["CLOUDTRAIN_ML_ROOT"]
    found = {name: here.get(name) for name in sorted(here) if name.startswith("SM_")}
    print("FOUND " + json.dumps({
        "argv": sys.argv[1:], "env": found, "home": here.get("SECRET_OF_THIS_SHELL"), "given": here.get("GIVEN"),
        "resource": json.load(open(f"{ml}/input/config/resourceconfig.json")),
        "inputs": json.load(open(f"{ml}/input/config/inputdataconfig.json")),
        "data": sorted(os.listdir(here["SM_CHANNEL_TRAIN"])), "cwd": os.getcwd(), "name": __name__,
        "world": here["WORLD_SIZE"], "job": here["TRAINING_JOB_NAME"],
    }))
    open(here["SM_MODEL_DIR"] + "/weights", "w").write("w")
    open(here["SM_OUTPUT_DATA_DIR"] + "/report", "w").write("r")
    open(f"{ml}/checkpoints/mine", "w").write("c")
    open(f"{ml}/output/tensorboard/events", "w").write("e")
"""
    path = job(
        "name: probe\ncode:\n  script: probe.py\n  env: {GIVEN: yes, PRINT_RANK: 0}\n"
        '  args: {seed: 0, dropout: 0.0, lr: 1e-4, amp: true, bf16: "False", warmup: null}\n'
        "cluster: {instance_type: ml.p4d.24xlarge, instances: 2, processes_per_instance: 1}\n"
        "data: {train: {uri: numbers, sharded: true}}\ntracking: {tensorboard: true}\n",
        probe_py=script,
    )
    (path.parent / "numbers").mkdir()
    for name in "abc":
        (path.parent / "numbers" / name).write_text(name)
    done = cli("submit", path, "--local", "--follow", "--json", environ={"SECRET_OF_THIS_SHELL": "x"})
    assert done.code == 0, done.err
    found = json.loads(next(line for line in done.err.splitlines() if "FOUND " in line).split("FOUND ")[1])
    assert found["argv"] == ["--seed", "0", "--dropout", "0.0", "--lr", "1e-4", "--amp", "--bf16", "False"]
    assert json.loads(found["env"]["SM_USER_ARGS"]) == found["argv"]
    parameters = {"seed": 0, "dropout": 0.0, "lr": 1e-4, "amp": True, "bf16": "False"}
    assert json.loads(found["env"]["SM_HPS"]) == parameters
    assert [found["env"][f"SM_HP_{name}"] for name in ("SEED", "DROPOUT", "BF16")] == ["0", "0.0", "False"]
    assert found["home"] is None
    assert found["given"] == "yes"
    assert found["name"] == "__main__"
    assert found["world"] == "2"
    assert found["job"] == done.json["run"]
    assert found["resource"]["hosts"] == ["algo-1", "algo-2"]
    assert found["resource"]["current_host"] == "algo-1"
    assert found["inputs"]["train"]["S3DistributionType"] == "ShardedByS3Key"
    assert found["data"] == ["a", "c"]
    assert found["cwd"].endswith("opt/ml/code")
    assert found["env"]["SM_HOSTS"] == '["algo-1", "algo-2"]'
    assert found["env"]["SM_CURRENT_HOST"] == "algo-1"
    folder = Path(done.json["artifacts"]["folder"])
    assert (folder / "model" / "weights").read_text() == "w"
    assert (folder / "checkpoints" / "mine").read_text() == "c"
    assert (folder / "tensorboard-output" / "events").read_text() == "e"
    with tarfile.open(done.json["artifacts"]["output"]) as archive:
        assert archive.getnames() == ["report"]


@pytest.mark.parametrize("distribution", ["pytorchddp", "smdistributed"])
def test_the_toolkits_distributions_run_here_too(cli: Cli, small: Small, distribution: str) -> None:
    shape = ("--instances", "2", "--set=cluster.processes_per_instance=2", f"--set=cluster.distribution={distribution}")
    done = cli("submit", small(), "--local", "--follow", "--json", *shape)
    assert done.code == 0, done.err
    events = Path(done.json["artifacts"]["folder"], "events.jsonl").read_text()
    (started,) = [event for event in map(json.loads, events.splitlines()) if event["event"] == "started"]
    assert (started["world_size"], started["backend"]) == (4, "gloo")
    assert started["hosts"] == 2


def test_two_runs_at_once_do_not_meet(cli: Cli, small: Small) -> None:
    path = small(seconds=0.05)
    runs = [cli("submit", path, "--local", "--instances", "2", "--json").json["run"] for _ in range(2)]
    for run in runs:
        status = until(lambda run=run: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
        assert status["state"] == "SUCCEEDED", status


def test_the_python_sdk(small: Small) -> None:
    run = cloudtrain.submit(cloudtrain.JobSpec.from_yaml(small()), local=True)
    with pytest.raises(TimeoutError, match="it continues"):
        run.wait(timeout_seconds=0.01)
    status = run.wait()
    assert run.state is cloudtrain.State.SUCCEEDED
    assert status.exit_code == 0
    assert run.metrics["test/loss"] < 10
    assert any('"event": "finished"' in line.text for line in run.logs())
    again = cloudtrain.get_run(run.reference)
    assert again.status() == run.status()
    assert [found.run for found in cloudtrain.list_runs()] == [run.id]
    assert cloudtrain.stop(run.reference).state is cloudtrain.State.SUCCEEDED


# ---------------------------------------------------------------- failure


def test_a_killed_worker_is_named_and_the_next_run_goes_on(cli: Cli, small: Small) -> None:
    path = small(seconds=0.1)
    shape = ("--instances", "2", "--set", "cluster.processes_per_instance=2", "--set", "train.epochs=30")
    run = cli("submit", path, "--local", "--json", *shape).json["run"]
    until(lambda: (cli("status", run, "--json").json["last_checkpoint"] or {}).get("step", 0) >= 4)
    worker = until(lambda: _worker(run, rank=3))
    worker.kill()
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "FAILED"
    assert status["exit_code"] == 4
    assert status["reason"] == "rank 3 on algo-2 (local rank 1) was killed by SIGKILL"
    assert processes_of(run) == []
    step = status["last_checkpoint"]["step"]
    rest = cli(
        "submit", path, "--local", *shape, "--set", f"checkpoint.resume={run}", "--set", "code.args.seconds=0",
        "--follow", "--json", *EVERY_STEP,
    )  # fmt: skip
    assert rest.code == 0, rest.err
    assert rest.json["first_step"] == step
    assert min(losses(cli, rest.json["run"])) == step + 1
    assert f"resumed from step {step}" in rest.err


def _worker(run: str, rank: int) -> psutil.Process | None:
    for process in processes_of(run):
        try:
            if process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    return None


EXACT = """
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


def test_two_ranks_resume_exactly(cli: Cli, job: Callable[..., Path]) -> None:
    """Killed in the middle of an epoch that does not divide, with dropout, batch norm and accumulation."""
    path = job(
        "name: exact\ncode: {task: exact:Exact, env: {CLOUDTRAIN_LOG_EVERY_STEPS: 1}}\n"
        "cluster: {instance_type: ml.g5.xlarge, processes_per_instance: 2}\n"
        "train: {epochs: 3, batch_size: 3, accumulate: 2}\ncheckpoint: {every: 1 steps}\n",
        exact_py=EXACT,
    )

    def trace(*overrides: str) -> tuple[dict[str, Any], dict[tuple[str, int], float]]:
        arguments = [part for override in overrides for part in ("--set", override)]
        status = cli("submit", path, "--local", "--follow", "--json", *arguments).json
        run = status["run"]
        events = (parse_event(line["text"]) for line in cli("logs", run, "--json").json["lines"])
        told = {(e["event"], e["step"]): e["loss"] for e in events if e and e["event"] in ("step", "evaluation")}
        return status, told

    _, whole = trace()
    killed, _ = trace("code.args.die_at=6")
    again, rest = trace(f"checkpoint.resume={killed['run']}")
    # Each step is saved beside the next: the last save may have died with the run.
    assert again["first_step"] in (5, 6)
    assert rest == {what: loss for what, loss in whole.items() if what[1] > again["first_step"]}
    assert len(rest) > 6


def test_retry_restarts_workers_from_the_last_checkpoint(cli: Cli, small: Small) -> None:
    path = small(fail_at=5, fail_rank=1, only_first_try=True)
    done = cli(
        "submit", path, "--local", "--instances", "2", "--set", "limits.retries=2", "--follow", "--json", *EVERY_STEP
    )
    assert done.code == 0, done.err
    assert done.json["state"] == "SUCCEEDED"
    assert done.json["first_step"] == 4  # every 2 steps, failed in the sixth, perhaps while saving
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
    done = cli("submit", path, "--local", "--instances", "2", "--follow", "--json")
    assert done.code == 4
    assert "rank 1 has failed; the save of step 2 is in progress" in done.err
    assert done.json["reason"].startswith("rank 1 on algo-2 (local rank 0) failed: ValueError")
    assert [each["step"] for each in cli("checkpoints", done.json["run"], "--json").json["checkpoints"]] == [2]


def test_a_rank_that_is_gone_is_not_waited_for(cli: Cli, small: Small) -> None:
    """The save has failed, so there is nothing that the others could wait for."""
    path = small(fail_at=2, fail_rank=1)
    source = path.with_name("small.py").read_text().replace("raise ValueError(", "os.kill(os.getpid(), 9); print(")
    path.with_name("small.py").write_text(source + SLOW_COMMIT)
    done = cli("submit", path, "--local", "--instances", "2", "--follow", "--json")
    assert done.code == 4
    assert "was killed by SIGKILL" in done.json["reason"]
    # A rank that has seen the failure first begins to wait; the failure of the save ends that, not the time limit.
    assert "is in progress" not in done.err or "no checkpoint of step 2, failed: " in done.err
    assert "waited for no longer" not in done.err


def test_an_exception_is_the_reason_with_its_traceback(cli: Cli, small: Small) -> None:
    done = cli("submit", small(fail_at=3, fail_rank=1), "--local", "--instances", "2", "--follow", "--json")
    assert done.code == 4
    assert done.json["state"] == "FAILED"
    reason = done.json["reason"]
    assert reason.startswith("rank 1 on algo-2 (local rank 0) failed: ValueError: the loss of this rank is broken")
    assert "small.py" in reason
    assert len(reason) <= 1024
    failure = Path(done.json["artifacts"]["folder"]) / "hosts" / "algo-2" / "opt" / "ml" / "output" / "failure"
    assert failure.read_text() == reason
    assert "Traceback" not in cli("status", done.json["run"]).err
    assert "model" not in done.json["artifacts"]


def test_a_tasks_mistake_is_told_without_our_frames(cli: Cli, small: Small) -> None:
    path = small()
    path.with_name("small.py").write_text(path.with_name("small.py").read_text().replace("F.mse_loss(", "float("))
    path.with_name("small.py").write_text(
        path.with_name("small.py").read_text().replace("return float(model(batch[0]), batch[1])", "return 0.5")
    )
    done = cli("submit", path, "--local", "--follow", "--json")
    assert done.code == 4
    assert done.json["reason"] == (
        "rank 0 on algo-1 (local rank 0) failed: small.py:26:5  loss() must return a scalar tensor, the mean over the "
        "batch's samples; it returned a float"
    )
    assert "Traceback" not in done.err


def test_a_task_that_ends_its_process_has_failed(cli: Cli, small: Small) -> None:
    """Even with 0: nothing is trained then, and other ranks would only tell that they have lost this one."""
    path = small(fail_at=3, fail_rank=1)
    source = path.with_name("small.py").read_text()
    path.with_name("small.py").write_text(source.replace("raise ValueError(", "raise SystemExit(0 and "))
    done = cli("submit", path, "--local", "--instances", "2", "--follow", "--json")
    assert done.code == 4
    assert done.json["reason"].startswith(
        "rank 1 on algo-2 (local rank 0) failed: TaskError: the Task ended its process, by sys.exit(0)"
    )


def test_a_script_that_fails_tells_why(cli: Cli, job: Callable[..., Path]) -> None:
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
    done = cli("submit", small(), "--local", "--follow", "--json", "--set", "data.train=s3://cloudtrain-test/nothing")
    assert done.code == 4
    assert done.json["reason"] == "channel train: there is nothing at s3://cloudtrain-test/nothing"


# ---------------------------------------------------------------- S3


@pytest.mark.aws
def test_a_local_run_may_read_and_save_in_s3(cli: Cli, small: Small, aws: dict[str, str]) -> None:
    import boto3

    boto3.client("s3").put_object(Bucket="cloudtrain-test", Key="data/a.txt", Body=b"a")
    there = ["data.train=s3://cloudtrain-test/data", "checkpoint.uri=s3://cloudtrain-test/saved"]
    overrides = [part for override in there for part in ("--set", override)]
    done = cli("submit", small(), "--local", "--instances", "2", "--follow", "--json", *overrides)
    assert done.code == 0, done.err
    assert done.json["last_checkpoint"]["uri"].startswith("s3://cloudtrain-test/saved/step-")
    folder = Path(done.json["artifacts"]["folder"])
    assert (folder / "hosts" / "algo-2" / "opt" / "ml" / "input" / "data" / "train" / "a.txt").read_text() == "a"
    more = cli("submit", small(), "--local", "--follow", "--json", *overrides, "--set", "train.epochs=4")
    assert more.code == 0, more.err
    assert more.json["first_step"] == done.json["last_step"]


# ---------------------------------------------------------------- stop, detach, outlive


def test_stop_saves_and_ends_every_process(cli: Cli, small: Small) -> None:
    path = small(seconds=0.2)
    run = cli("submit", path, "--local", "--instances", "2", "--set", "train.epochs=500", "--json").json["run"]
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 1)
    assert len(processes_of(run)) > 4
    done = cli("stop", run, "--json")
    assert done.code == 0
    assert done.json["state"] == "STOPPED"
    assert done.json["exit_code"] == 5
    assert processes_of(run) == []
    assert '"event": "stopped"' in cli("logs", run, "--raw").out
    assert done.json["last_checkpoint"]["step"] == done.json["last_step"] or done.json["last_checkpoint"]["step"] > 1
    assert cli("stop", run).code == 0  # again: nothing happens


def test_what_ignores_the_notice_is_killed_after_the_grace_time(cli: Cli, job: Callable[..., Path]) -> None:
    path = job(
        "name: stubborn\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}\n",
        train_py="import signal, subprocess, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('up', flush=True)\ntime.sleep(600)\n",
    )
    run = cli("submit", path, "--local", "--json", environ={"CLOUDTRAIN_STOP_GRACE_SECONDS": "2"}).json["run"]
    until(lambda: "up" in cli("logs", run, "--raw").out)
    assert any("sleep" in process.name() for process in processes_of(run))
    done = cli("stop", run, "--json")
    assert done.json["state"] == "STOPPED"
    assert processes_of(run) == []


OVER = """
import json, sys
from pathlib import Path
from cloudtrain.backends.container import JobFolder, run_job
from cloudtrain.backends.container.process_tree import descendants

folder = Path(sys.argv[1])
request = {
    "TrainingJobName": "over-261120-101500-1a2b3c",
    "AlgorithmSpecification": {"ContainerEntrypoint": ["/bin/sh", "-c", "echo up; sleep 600"]},
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 2},
    "StoppingCondition": {"MaxRuntimeInSeconds": 1},
    "OutputDataConfig": {"S3OutputPath": (folder / "out").as_uri()},
}
seen = []
outcome = run_job(
    request,
    JobFolder(folder / "job"),
    gpus=(),
    stop_grace_seconds=5,
    is_stopped=lambda: False,
    on_transition=lambda transition: seen.append(str(transition.state)),
)
print(json.dumps([str(outcome.state), outcome.reason, seen, len(descendants())]))
"""


def test_time_that_is_over_stops_a_run_and_is_the_reason(tmp_path: Path) -> None:
    """In a process of its own: a job ends every descendant of the process that watches it."""
    command = [sys.executable, "-c", OVER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    state, reason, transitions, left = json.loads(done.stdout)
    assert (state, reason.partition(":")[0]) == ("STOPPED", "MaxRuntimeExceeded")
    assert transitions == ["STARTING", "RUNNING", "STOPPING"]
    assert (tmp_path / "job" / "logs" / "algo-2.log").read_text() == "up\n"
    assert left == 0


def test_ctrl_c_leaves_the_run_going_and_says_how_to_come_back(cli: Cli, small: Small) -> None:
    path = small(seconds=0.2)
    following = subprocess.Popen(
        [str(command()), "submit", str(path), "--local", "--follow", "--set", "train.epochs=500"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = until(lambda: next((found["run"] for found in cli("list", "--json").json["runs"]), None))
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 1)
    os.killpg(following.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    out, err = following.communicate(timeout=90)
    assert following.returncode == 130
    assert f"local:{run} continues. To attach again: " in err
    assert f"cloudtrain follow local:{run}\n" in err
    assert "Traceback" not in out + err
    before = cli("status", run, "--json").json
    assert before["state"] == "RUNNING"
    until(lambda: cli("status", run, "--json").json["last_step"] > before["last_step"])
    assert cli("stop", run).code == 0


def test_a_run_outlives_its_terminal(cli: Cli, small: Small) -> None:
    """The session's leader dies and the kernel sends SIGHUP, as when a terminal window is closed."""
    path = small(seconds=0.1)
    script = f"import os, pty, sys\npid, fd = pty.fork()\nif pid == 0:\n os.execv({str(command())!r}, sys.argv[1:])\n"
    script += "import time\nout = b''\nwhile b'training' not in out: out += os.read(fd, 1000)\nos.close(fd)\n"
    subprocess.run(
        ["python", "-c", script, "cloudtrain", "submit", str(path), "--local", "--follow"], check=True, timeout=120
    )
    run = cli("list", "--json").json["runs"][0]["run"]
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "SUCCEEDED"


def test_a_watcher_that_dies_is_told_and_leaves_nothing_running(cli: Cli, small: Small) -> None:
    path = small(seconds=0.2)
    submitted = cli("submit", path, "--local", "--set", "train.epochs=500", "--json").json
    run, folder = submitted["run"], Path(submitted["artifacts"]["folder"])
    until(lambda: (cli("status", run, "--json").json["last_step"] or 0) >= 1)
    os.kill(json.loads((folder / "state.json").read_text())["supervisor"], signal.SIGKILL)
    status = until(lambda: (s := cli("status", run, "--json").json)["exit_code"] is not None and s)
    assert status["state"] == "FAILED"
    assert "the supervisor of this run died" in status["reason"]
    until(lambda: processes_of(run) == [])


def test_followed_logs_of_a_running_job_end_with_it(cli: Cli, small: Small) -> None:
    every = ("--set", "checkpoint.every=1s", "--set", "train.epochs=10")
    run = cli("submit", small(seconds=0.05), "--local", "--instances", "2", *every, "--json").json["run"]
    lines = cli("logs", "-f", "--raw", run).out.splitlines()
    assert lines == sorted(set(lines), key=lines.index)
    assert sum('"event": "finished"' in line for line in lines) == 1
    assert sorted(lines) == sorted(cli("logs", run, "--raw").out.splitlines())
    # Saved by the clock of rank 0, once each time.
    saved = [event["step"] for line in lines if (event := parse_event(line)) and event["event"] == "checkpoint"]
    assert len(saved) >= 3
    assert all(later - sooner > 1 for sooner, later in itertools.pairwise(saved[:-1]))
