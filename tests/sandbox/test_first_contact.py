"""The example for a new account, in the sandbox: SageMaker's phases, S3's checkpoint and the uploaded report."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from support.jobs import EXAMPLES, Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]


def test_the_first_contact_in_the_sandbox(sandbox: Served, cli: Cli, tmp_path: Path) -> None:
    environment = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    path = EXAMPLES / "first-contact" / "job.yaml"
    options = ("--skip-check", "--follow", "--json", "--set", "code.args.largest-mb=1")
    done = cli("submit", path, *options, environ=environment)
    assert done.code == 0, done.err
    assert done.json["instance_type"] == "ml.g4dn.12xlarge"
    assert done.json["last_checkpoint"]["step"] == 20
    names = [phase["name"] for phase in done.json["phases"]]
    assert (
        names.index("Starting")
        < names.index("Downloading")
        < names.index("Training")
        < names.index("Uploading")
    )
    bucket, _, key = done.json["artifacts"]["model"].removeprefix("s3://").partition("/")
    output = f"{key.rpartition('/')[0]}/output.tar.gz"
    sandbox.client("s3").download_file(bucket, output, str(tmp_path / "output.tar.gz"))
    with tarfile.open(tmp_path / "output.tar.gz") as archive:
        file = archive.extractfile("first-contact.json")
        assert file is not None
        assert json.load(file)["resumed_from_step"] == 10
