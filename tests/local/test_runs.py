"""Local runs that succeed, with real launchers, real torchrun and real Gloo."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, Cli, processes_of, until
from support.local_runs import LOG_EVERY_STEP, losses_by_step

import cloudtrain

pytestmark = pytest.mark.processes

Small = Callable[..., Path]


@pytest.mark.promise
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
    documented = {
        "plan.json",
        "request.json",
        "state.json",
        "events.jsonl",
        "logs",
        "hosts",
        "checkpoints",
        "model",
    }
    assert documented <= {path.name for path in folder.iterdir()}
    with tarfile.open(content["artifacts"]["model"]) as archive:
        assert sorted(archive.getnames()) == [
            "analysis.json",
            "analysis.md",
            "metrics.json",
            "model.pt",
        ]
        analysis = json.load(archive.extractfile("analysis.json"))  # type: ignore[arg-type]
    assert analysis["accuracy"] == pytest.approx(content["metrics"]["test/accuracy"], abs=1e-5)
    assert sum(score["support"] for score in analysis["classes"]) == analysis["samples"] == 270
    assert processes_of(content["run"]) == []
    # The executed request equals the planned one.
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
    done = cli(
        "submit", EXAMPLES / example / "job.yaml", "--local", "--follow", "--json", *arguments
    )
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
    elsewhere = {"first-contact", "finetune-task", "finetune-lora"}
    run_here = {"digits", "gpt-stdlib"} | elsewhere | in_test_frameworks | in_test_scripts
    assert {path.parent.name for path in EXAMPLES.glob("*/job.yaml")} == run_here


@pytest.mark.promise
def test_losses_are_equal_for_any_number_of_ranks(cli: Cli, small: Small) -> None:
    """The global batch has 12 samples on 1, 2 and 3 ranks. The last step of an epoch has 10 samples."""
    path = small(double=True)
    traces = []
    for instances, ranks, batch in ((1, 1, 12), (2, 1, 6), (1, 3, 4)):
        shape = [
            f"cluster.instances={instances}",
            f"cluster.processes_per_instance={ranks}",
            f"train.batch_size={batch}",
        ]
        overrides = [part for override in shape for part in ("--set", override)]
        done = cli("submit", path, "--local", "--follow", "--json", *overrides, *LOG_EVERY_STEP)
        assert done.code == 0, done.err
        assert done.json["world_size"] == instances * ranks
        traces.append(losses_by_step(cli, done.json["run"]))
    assert len(traces[0]) == 12
    for trace in traces[1:]:
        assert trace.keys() == traces[0].keys()
        assert list(trace.values()) == pytest.approx(
            list(traces[0].values()), rel=1.5e-5
        )  # events have 6 digits


@pytest.mark.promise
def test_the_container_is_that_of_sagemaker(cli: Cli, job: Callable[..., Path]) -> None:
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
    done = cli(
        "submit", path, "--local", "--follow", "--json", environ={"SECRET_OF_THIS_SHELL": "x"}
    )
    assert done.code == 0, done.err
    found = json.loads(
        next(line for line in done.err.splitlines() if "FOUND " in line).split("FOUND ")[1]
    )
    assert found["argv"] == [
        "--seed",
        "0",
        "--dropout",
        "0.0",
        "--lr",
        "1e-4",
        "--amp",
        "--bf16",
        "False",
    ]
    assert json.loads(found["env"]["SM_USER_ARGS"]) == found["argv"]
    parameters = {"seed": 0, "dropout": 0.0, "lr": 1e-4, "amp": True, "bf16": "False"}
    assert json.loads(found["env"]["SM_HPS"]) == parameters
    assert [found["env"][f"SM_HP_{name}"] for name in ("SEED", "DROPOUT", "BF16")] == [
        "0",
        "0.0",
        "False",
    ]
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


@pytest.mark.promise
@pytest.mark.parametrize("distribution", ["pytorchddp", "smdistributed"])
def test_distributions_of_the_toolkit_run_locally(
    cli: Cli, small: Small, distribution: str
) -> None:
    shape = (
        "--instances",
        "2",
        "--set=cluster.processes_per_instance=2",
        f"--set=cluster.distribution={distribution}",
    )
    done = cli("submit", small(), "--local", "--follow", "--json", *shape)
    assert done.code == 0, done.err
    events = Path(done.json["artifacts"]["folder"], "events.jsonl").read_text()
    (started,) = [
        event for event in map(json.loads, events.splitlines()) if event["event"] == "started"
    ]
    assert (started["world_size"], started["backend"]) == (4, "gloo")
    assert started["hosts"] == 2


def test_two_runs_at_once_do_not_interfere(cli: Cli, small: Small) -> None:
    path = small(seconds=0.05)
    runs = [
        cli("submit", path, "--local", "--instances", "2", "--json").json["run"] for _ in range(2)
    ]
    for run in runs:
        status = until(
            lambda run=run: (s := cli("status", run, "--json").json)["exit_code"] is not None and s
        )
        assert status["state"] == "SUCCEEDED", status


@pytest.mark.promise
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
    assert (
        folder / "hosts" / "algo-2" / "opt" / "ml" / "input" / "data" / "train" / "a.txt"
    ).read_text() == "a"
    more = cli(
        "submit", small(), "--local", "--follow", "--json", *overrides, "--set", "train.epochs=4"
    )
    assert more.code == 0, more.err
    assert more.json["first_step"] == done.json["last_step"]
