"""Jobs of cloudtrain and of the SageMaker SDK train in the sandbox, and survive interruptions."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES, Cli, until
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

SMALL = """\
name: small
code: {task: "small:Small"}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, processes_per_instance: 1, spot: SPOT}
train: {steps: 30, batch_size: 4, learning_rate: 0.05}
checkpoint: {every: 10 steps}
limits: {runtime: 10m}
"""
TASK = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from cloudtrain_runtime import Task, context

class Small(Task):
    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def datasets(self):
        inputs = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        return {"train": data, "test": data}

    def loss(self, model, batch):
        time.sleep(0.1 if context().step < 20 else 0.5)
        return F.mse_loss(model(batch[0]), batch[1])
"""
PLAIN = """
import argparse, json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
arguments = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open(os.path.join(os.environ["SM_CHANNEL_TRAIN"], "points.json")) as file:
    points = torch.tensor(json.load(file))[dist.get_rank()::dist.get_world_size()]
for epoch in range(arguments.epochs):
    loss = ((model(points[:, :2]) - points[:, 2:]) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(loss := loss.detach())
    if dist.get_rank() == 0:
        print(f"loss={loss.item():.6f}")
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
    print(f"world size {dist.get_world_size()}, hosts {os.environ['SM_HOSTS']}")
dist.barrier()
sys.stdout.flush()
os._exit(0)  # torch 2.13 with Gloo sometimes aborts while the interpreter shuts down
"""


@pytest.mark.promise
def test_submit_to_the_sandbox_trains_a_model_in_s3(cli: Cli, tmp_path: Path) -> None:
    """`submit --sandbox` starts the sandbox, and `sandbox --stop` stops it."""
    done = cli(
        "submit",
        EXAMPLES / "digits" / "job.yaml",
        "--sandbox",
        "--instances",
        "2",
        "--follow",
        "--json",
    )
    info = json.loads((tmp_path / "runs-home" / "sandbox" / "sandbox.json").read_text())
    try:
        assert done.code == 0, done.err
        assert done.json["state"] == "SUCCEEDED"
        assert done.json["backend"] == "sandbox"
        assert done.json["world_size"] == 4
        assert done.json["metrics"]["test/accuracy"] > 0.95
        assert done.json["last_checkpoint"]["uri"].startswith(f"s3://{info['bucket']}/")
        import torch

        state = torch.load(
            _fetch_model(info, done.json["artifacts"]["model"], tmp_path), weights_only=True
        )
        assert any(tensor.numel() > 100 for tensor in state.values())
        run = done.json["run"]
        # Every command finds the run by its id, without variables in the environment.
        assert cli("status", run, "--json").json["state"] == "SUCCEEDED"
        lines = cli("logs", f"sandbox:{run}", "--json").json["lines"]
        assert {line["host"] for line in lines} == {"algo-1", "algo-2"}
        assert any("2 ranks on this instance instead of 8" in line["text"] for line in lines)
        assert [entry["run"] for entry in cli("list", "--local", "--json").json["runs"]] == [run]
    finally:
        ended = cli("sandbox", "--stop", "--json")
    assert ended.json == {"stopped": True}
    assert cli("status", f"sandbox:{run}").code == 2
    assert not (tmp_path / "runs-home" / "sandbox" / "sandbox.json").exists()


def _fetch_model(info: dict[str, Any], uri: str, folder: Path) -> Path:
    import boto3

    s3 = boto3.client(
        "s3",
        endpoint_url=info["endpoint"],
        aws_access_key_id=info["environment"]["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key="x",
        region_name="us-west-2",
    )
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    s3.download_file(bucket, key, str(folder / "model.tar.gz"))
    with tarfile.open(folder / "model.tar.gz") as archive:
        archive.extractall(folder / "model", filter="data")
    return folder / "model" / "model.pt"


def test_a_plain_estimator_trains_and_downloads_its_model(
    sandbox: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The client uses only the SageMaker SDK: estimator, fit and model_data."""
    for name, value in sandbox.environment.items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(PLAIN)
    points = [[x / 4, y / 4, x / 2 - y / 4] for x in range(4) for y in range(4)]
    bucket = sandbox.info["bucket"]
    sandbox.client("s3").put_object(
        Bucket=bucket, Key="plain/points.json", Body=json.dumps(points).encode()
    )
    from support.estimator import boto_session, sdk_session

    session = boto_session()
    with sdk_session(session, session.client("sagemaker"), bucket) as sdk:
        from sagemaker.pytorch import PyTorch

        estimator = PyTorch(
            entry_point="train.py",
            source_dir=str(source),
            role=sandbox.info["role"],
            image_uri="763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.5.1-cpu-py311",
            instance_type="ml.g5.xlarge",
            instance_count=2,
            distribution={"torch_distributed": {"enabled": True}},
            hyperparameters={"epochs": 30},
            metric_definitions=[{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
            output_path=f"s3://{bucket}/plain-out",
            sagemaker_session=sdk,
        )
        estimator.fit({"train": f"s3://{bucket}/plain"}, wait=False)
        job = estimator.latest_training_job.name
        sdk.wait_for_job(job, poll=1)
        sdk.logs_for_job(
            job, wait=True, poll=1
        )  # fit(wait=True) does the same, but polls only every 30 s
        sdk.download_data(
            str(tmp_path), bucket, estimator.model_data.removeprefix(f"s3://{bucket}/")
        )
    shown = capfd.readouterr().out
    assert "Training - Training image download completed. Training in progress." in shown
    assert 'world size 2, hosts ["algo-1", "algo-2"]' in shown  # one GPU per instance, so one rank
    assert "Training seconds:" in shown
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    import torch

    assert torch.load(tmp_path / "model.pt", weights_only=True)["weight"].shape == (1, 2)
    (metric,) = sandbox.describe(job)["FinalMetricDataList"]
    losses = [
        float(line.partition("=")[2]) for line in sandbox.lines(job) if line.startswith("loss=")
    ]
    assert len(losses) == 30
    assert metric["Value"] == pytest.approx(losses[-1])
    assert losses[-1] < losses[0] / 2


def test_failing_estimator_script_reports_like_the_toolkit(sandbox: Served) -> None:
    import io

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        text = b"raise ValueError('no such column')\n"
        entry = tarfile.TarInfo("train.py")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    bucket = sandbox.info["bucket"]
    sandbox.client("s3").put_object(Bucket=bucket, Key="bad/sourcedir.tar.gz", Body=data.getvalue())
    from support.sandboxes import request

    document = request(sandbox, "toolkit-fails", "")
    del document["AlgorithmSpecification"]["ContainerEntrypoint"]
    submit = {
        "sagemaker_program": "train.py",
        "sagemaker_submit_directory": f"s3://{bucket}/bad/sourcedir.tar.gz",
    }
    document["HyperParameters"] = {name: json.dumps(value) for name, value in submit.items()}
    sandbox.client("sagemaker").create_training_job(**document)
    reason = sandbox.end_of("toolkit-fails")["FailureReason"]
    assert reason.startswith(
        'AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage "ValueError: no such'
    )
    assert reason.endswith("exit code: 1")
    called = [line for line in sandbox.lines("toolkit-fails") if "Invoking script" in line]
    assert len(called) == 1
    assert called[0].endswith(" train.py"), called


def test_an_interrupted_run_equals_an_uninterrupted_one(
    sandbox: Served, cli: Cli, job: Any
) -> None:
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    sandbox.set_faults(interrupt_at_step=[20])
    runs = {}
    for kind, spot in (("straight", "false"), ("interrupted", "true")):
        path = job(SMALL.replace("SPOT", spot), small_py=TASK)
        done = cli("submit", path, "--skip-check", "--json", environ=environment)
        assert done.code == 0, done.err
        runs[kind] = done.json["run"]
    ends = {kind: sandbox.end_of(run) for kind, run in runs.items()}
    assert [end["TrainingJobStatus"] for end in ends.values()] == ["Completed", "Completed"]
    passed = [entry["Status"] for entry in ends["interrupted"]["SecondaryStatusTransitions"]]
    assert passed.count("Interrupted") == 1
    assert passed.count("Training") == 2
    status = {
        kind: cli("status", run, "--json", environ=environment).json for kind, run in runs.items()
    }
    assert status["interrupted"]["first_step"] >= 20
    assert status["straight"]["first_step"] == 0
    assert status["interrupted"]["last_step"] == status["straight"]["last_step"] == 30
    assert (
        status["interrupted"]["metrics"]["test/loss"] == status["straight"]["metrics"]["test/loss"]
    )
    until(lambda: sandbox.keys(f"cloudtrain/{runs['interrupted']}/checkpoints/"))
    for kind, run in runs.items():
        ledger = cli("costs", run, "--json", environ=environment).json
        require_exact_sums(ledger, ends[kind], status[kind])
        seconds = {each["kind"]: each["seconds"] for each in ledger["entries"]}
        assert (seconds["restart"] > 0) == (kind == "interrupted")
        assert seconds["training"] > 1


def require_exact_sums(ledger: Any, job: Any, status: Any) -> None:
    """Compare a ledger with what AWS reports of the job: times, billed seconds and cost."""
    entries = ledger["entries"]
    paid = sum(each["seconds"] for each in entries if each["kind"] != "waiting")
    assert round(paid) == job["TrainingTimeInSeconds"]
    assert ledger["billed_seconds"] == job["BillableTimeInSeconds"]
    if not job["EnableManagedSpotTraining"]:
        assert round(ledger["seconds"]) == job["BillableTimeInSeconds"]
    assert ledger["cost_usd"] == status["cost_usd"]
    assert sum(each["usd"] for each in entries) == pytest.approx(ledger["cost_usd"], abs=0.001)
    whole = (job["TrainingEndTime"] - job["CreationTime"]).total_seconds()
    assert paid + ledger["waiting_seconds"] == pytest.approx(whole, abs=1)
