"""Jobs with secrets in the sandbox: containers read them from its Secrets Manager with their own credentials."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

VALUE = "correct-horse/battery+staple"
JOB = """\
name: secret
code:
  script: train.py
  env: {WANDB_API_KEY: {secret: team/wandb, key: api_key}}
cluster: {instance_type: ml.p4d.24xlarge, instances: 2, distribution: DISTRIBUTION}
"""
SCRIPT = """
import os, pathlib
key = os.environ["WANDB_API_KEY"]
print("the key is", key)
if os.environ["RANK"] == "0":
    (pathlib.Path(os.environ["SM_MODEL_DIR"]) / "key.txt").write_text(key)
"""


@pytest.mark.parametrize("distribution", ["torch_distributed", "smdistributed"])
def test_ranks_get_the_secret_with_either_launcher(
    sandbox: Served, cli: Cli, job: Callable[..., Path], tmp_path: Path, distribution: str
) -> None:
    manager = sandbox.client("secretsmanager")
    if not manager.list_secrets()["SecretList"]:
        manager.create_secret(Name="team/wandb", SecretString=json.dumps({"api_key": VALUE}))
    # Variables of the submitter's shell have no effect on a run in the cloud.
    environment = {
        **os.environ,
        **sandbox.environment,
        "CLOUDTRAIN_TRANSPORT": "boto3",
        "WANDB_API_KEY": "of the shell",
    }
    path = job(JOB.replace("DISTRIBUTION", distribution), train_py=SCRIPT)
    done = cli("submit", path, "--skip-check", "--follow", "--json", environ=environment)
    assert done.code == 0, done.err
    run = done.json["run"]
    lines = [line for host in ("algo-1", "algo-2") for line in sandbox.lines(run, host)]
    assert len([line for line in lines if "the key is ***" in line]) == 4, lines
    description = sandbox.describe(run)
    assert VALUE not in json.dumps([lines, done.out, done.err, description], default=str)
    assert "WANDB_API_KEY" not in description.get("Environment", {})
    bucket, key = description["ModelArtifacts"]["S3ModelArtifacts"][5:].split("/", 1)
    sandbox.client("s3").download_file(bucket, key, str(tmp_path / "model.tar.gz"))
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        file = archive.extractfile("key.txt")
        assert file is not None
        assert file.read().decode() == VALUE


def test_missing_secret_fails_the_run_before_its_ranks(
    sandbox: Served, cli: Cli, job: Callable[..., Path]
) -> None:
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    path = job(JOB.replace("DISTRIBUTION", "auto"), train_py=SCRIPT)
    gone = ("--set", "code.env.WANDB_API_KEY={secret: gone}")
    done = cli("submit", path, "--skip-check", "--follow", "--json", *gone, environ=environment)
    assert done.code == 4, done.err
    assert "WANDB_API_KEY: the secret gone is not there in us-west-2" in done.json["reason"]
    explained = cli("explain", done.json["run"], "--json", environ=environment).json
    assert explained["class"] == "user_code"
    assert explained["action"].startswith("Fix the reference to gone in code.env of the job")
