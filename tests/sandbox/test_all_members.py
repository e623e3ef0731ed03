"""Jobs with file systems, unpacked models, training plans and members of `request` run in the sandbox."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from support.jobs import Cli
from support.sandboxes import Served, request

pytestmark = [pytest.mark.processes, pytest.mark.aws]

PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/mine"
LUSTRE = "fs-0123456789abcdef0"
SCRIPT = """\
import os, pathlib, sys
tokens = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])
print("tokens", sorted(path.name for path in tokens.iterdir()), flush=True)
scratch = pathlib.Path(os.environ["SM_CHANNEL_SCRATCH"])
if os.environ["RANK"] == "0":
    (scratch / "written").write_text("by the job")
    model = pathlib.Path(os.environ["SM_MODEL_DIR"])
    (model / "deep").mkdir()
    (model / "deep" / "model.pt").write_text("weights")
"""
JOB = f"""\
name: members
code: {{script: train.py}}
cluster:
  instance_type: ml.p4d.24xlarge
  training_plan: {PLAN}
  processes_per_instance: 1
  remote_debug: true
  health_check: true
  network: {{subnets: [subnet-1], security_groups: [sg-1]}}
data:
  train: {{fsx: {LUSTRE}, path: /abcd/tokens}}
  scratch: {{efs: fs-89abcdef, mount: rw}}
output: {{uri: "s3://cloudtrain-sandbox/models", compress: false}}
notify: {{sns: "arn:aws:sns:us-west-2:123456789012:training"}}
request:
  ExperimentConfig: {{ExperimentName: members}}
"""


@pytest.mark.parametrize("transport", ["boto3", "estimator"])
def test_a_job_with_every_new_member_runs(
    sandbox: Served, cli: Cli, job: Any, transport: str
) -> None:
    tokens = sandbox.home / "file-systems" / LUSTRE / "abcd" / "tokens"
    scratch = sandbox.home / "file-systems" / "fs-89abcdef"
    for folder in (tokens, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    (tokens / "part-0").write_text("0")
    (scratch / "written").unlink(missing_ok=True)
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": transport}
    path = job(JOB, train_py=SCRIPT)
    done = cli("submit", path, "--skip-check", "--follow", "--json", environ=environment)
    assert done.code == 0, done.err
    run = done.json["run"]
    described = sandbox.describe(run)
    assert "tokens ['part-0']" in "\n".join(sandbox.lines(run))
    assert (scratch / "written").read_text() == "by the job"
    assert (
        described["ModelArtifacts"]["S3ModelArtifacts"]
        == f"s3://cloudtrain-sandbox/models/{run}/output/model/"
    )
    assert sandbox.keys(f"models/{run}/output/model/") == [
        f"models/{run}/output/model/deep/model.pt"
    ]
    assert done.json["artifacts"]["model"] == described["ModelArtifacts"]["S3ModelArtifacts"]
    assert sandbox.keys("models/requests/") == [], (
        "the submit lock stays with cloudtrain's own files"
    )
    assert any(run in key or "requests/" in key for key in sandbox.keys("cloudtrain/requests/"))
    folder = path.parent / f"downloaded-{transport}"
    loaded = cli(
        "download", run, "--to", str(folder), "--what", "model", "--json", environ=environment
    )
    assert [each["path"] for each in loaded.json["files"]] == ["model/deep/model.pt"]
    assert (folder / "model" / "deep" / "model.pt").read_text() == "weights"
    assert done.json["cost_usd"] == 0, "the training plan is paid in advance"
    assert described["ExperimentConfig"] == {"ExperimentName": "members"}
    assert described["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    assert described["InfraCheckConfig"] == {"EnableInfraCheck": True}
    assert described["ResourceConfig"]["TrainingPlanArn"] == PLAN


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/none", "has no folder /none: create .*file-systems/fs-11111111/none"),
        ("/../../..", "has no folder"),
    ],
)
def test_a_missing_folder_is_rejected(sandbox: Served, folder: str, message: str) -> None:
    (sandbox.home / "file-systems" / "fs-11111111").mkdir(parents=True, exist_ok=True)
    mount = {"FileSystemId": "fs-11111111", "FileSystemType": "EFS", "FileSystemAccessMode": "ro"}
    source = {"FileSystemDataSource": {**mount, "DirectoryPath": folder}}
    fields: dict[str, Any] = {"InputDataConfig": [{"ChannelName": "train", "DataSource": source}]}
    client = sandbox.client("sagemaker")
    with pytest.raises(
        ClientError,
        match="VpcConfig must be specified for the FileSystemDataSource of channel train",
    ):
        client.create_training_job(**request(sandbox, "unmounted", "true", **fields))
    fields["VpcConfig"] = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    with pytest.raises(ClientError, match=message):
        client.create_training_job(**request(sandbox, "unmounted", "true", **fields))


def test_a_local_run_stores_the_model_unpacked(cli: Cli, job: Any) -> None:
    script = "import os, pathlib\npathlib.Path(os.environ['SM_MODEL_DIR'], 'model.pt').write_text('weights')\n"
    text = "name: unpacked\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge, processes_per_instance: 1}\n"
    done = cli(
        "submit",
        job(text + "output: {compress: false}\n", train_py=script),
        "--local",
        "--follow",
        "--json",
    )
    assert done.code == 0, done.err
    model = Path(done.json["artifacts"]["model"])
    assert model.name == "model"
    assert model.parent.name == "output"
    assert (model / "model.pt").read_text() == "weights"
    assert not list(Path(done.json["artifacts"]["folder"]).rglob("model.tar.gz"))
    request_of = json.loads((Path(done.json["artifacts"]["folder"]) / "request.json").read_text())
    assert request_of["OutputDataConfig"]["CompressionType"] == "NONE"
