"""In a job of the sandbox, `/opt/ml` is the folder of the instance, as in a local run."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

JOB = """\
name: paths
code: {script: train.py, args: {out: /opt/ml/model}, env: {RESULTS: /opt/ml/model}}
cluster: {instance_type: ml.g5.xlarge, instances: 1, processes_per_instance: 1}
"""
SCRIPT = """\
import os, sys
from pathlib import Path

Path(sys.argv[sys.argv.index("--out") + 1], "a.txt").write_text("a")
Path(os.environ["RESULTS"], "b.txt").write_text("b")
"""


def test_arguments_and_variables_are_mapped(
    sandbox: Served, cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    path = job(JOB, train_py=SCRIPT)
    done = cli("submit", path, "--skip-check", "--follow", "--json", environ=environment)
    assert done.code == 0, done.err
    bucket, key = sandbox.describe(done.json["run"])["ModelArtifacts"]["S3ModelArtifacts"][
        5:
    ].split("/", 1)
    sandbox.client("s3").download_file(bucket, key, str(tmp_path / "model.tar.gz"))
    with tarfile.open(tmp_path / "model.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["a.txt", "b.txt"]
