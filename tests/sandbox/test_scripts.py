"""Scripts without cloudtrain train unchanged in the sandbox on 2 x 2 ranks, with data and results in S3."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]


@pytest.mark.parametrize(
    ("name", "distribution"),
    [("script-sagemaker", "torch_distributed"), ("script-launch", "smdistributed")],
)
def test_a_script_runs_unchanged(
    sandbox: Served, cli: Cli, tmp_path: Path, name: str, distribution: str
) -> None:
    path = Path(shutil.copytree(EXAMPLES / name, tmp_path / name)) / "job.yaml"
    fields = {
        "cluster.distribution": distribution,
        "cluster.instance_type": "ml.p4d.24xlarge",  # SMDDP requires it; in the sandbox it has two ranks
        "code.args.epochs": "1",
    }
    settings = [f"--set={field}={value}" for field, value in fields.items()]
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    shape = ("--instances", "2", "--skip-check", "--follow", "--json")
    done = cli("submit", path, *shape, *settings, environ=environment)
    assert done.code == 0, done.err
    lines = [
        line for host in ("algo-1", "algo-2") for line in sandbox.lines(done.json["run"], host)
    ]
    assert any("world size 4: saved" in line for line in lines), lines
    bucket, key = sandbox.describe(done.json["run"])["ModelArtifacts"]["S3ModelArtifacts"][
        5:
    ].split("/", 1)
    sandbox.client("s3").download_file(bucket, key, str(tmp_path / "model.tar.gz"))
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        assert archive.getnames() == ["model.pt"]
    if name == "script-sagemaker":
        prefix = key.removesuffix("model.tar.gz")
        sandbox.client("s3").download_file(
            bucket, f"{prefix}output.tar.gz", str(tmp_path / "output.tar.gz")
        )
        with tarfile.open(tmp_path / "output.tar.gz") as archive:
            file = archive.extractfile("result.json")
            assert file is not None
            assert json.load(file)["world_size"] == 4
