"""Metacharacters of shells pass unchanged through S3 and the containers of the sandbox."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
import yaml
from support.jobs import Cli
from support.metacharacters import (
    NAME,
    TEXT,
    plant,
    traces,
)
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

SCRIPT = """
import json, os, pathlib, sys
data = [[path.name, path.read_text()] for path in sorted(pathlib.Path(os.environ["SM_CHANNEL_TRAIN"]).rglob("*.csv"))]
report = {"argv": sys.argv[1:], "environ": dict(os.environ), "data": data}
if os.environ.get("RANK", "0") == "0":
    (pathlib.Path(os.environ["SM_MODEL_DIR"]) / "report.json").write_text(json.dumps(report))
"""


def read_report(sandbox: Served, run: str, folder: Path) -> dict[str, object]:
    """Return the report that the script has written into its model folder."""
    bucket, key = sandbox.describe(run)["ModelArtifacts"]["S3ModelArtifacts"][5:].split("/", 1)
    sandbox.client("s3").download_file(bucket, key, str(folder / "model.tar.gz"))
    with tarfile.open(folder / "model.tar.gz") as archive:
        file = archive.extractfile("report.json")
        assert file is not None
        return dict(json.load(file))


@pytest.mark.parametrize("distribution", ["torch_distributed", "smdistributed"])
def test_a_run_gets_every_text_unchanged(
    sandbox: Served, cli: Cli, tmp_path: Path, distribution: str
) -> None:
    base = tmp_path / "job"
    code, data = base / f"code {NAME}", base / f"data {NAME}"
    for folder in (code / NAME, data):
        folder.mkdir(parents=True)
    (code / NAME / f"{NAME}.py").write_text(SCRIPT)
    (data / f"{NAME}.csv").write_text(TEXT)
    args = [NAME, TEXT, *plant(tmp_path).values(), "", "--", "-x", f"--key={TEXT}"]
    env = {"PLANTED": TEXT[:500], "ABSOLUTE": plant(tmp_path)["absolute"], "EMPTY": ""}
    job = {
        "name": "meta",
        "code": {"directory": code.name, "script": f"{NAME}/{NAME}.py", "args": args, "env": env},
        "cluster": {"instance_type": "ml.p4d.24xlarge", "distribution": distribution},
        "data": {"train": data.name},
        "tags": {"legal": "a b_.:/=+-@é"},
    }
    path = base / f"{NAME}.yaml"
    path.write_text(yaml.safe_dump(job, allow_unicode=True), encoding="utf-8")
    prefix = f"cloud $(touch PWNED);'{distribution}"
    environment = {
        **os.environ,
        **sandbox.environment,
        "CLOUDTRAIN_TRANSPORT": "boto3",
        "CLOUDTRAIN_PREFIX": prefix,
    }
    done = cli("submit", path, "--skip-check", "--follow", "--json", environ=environment)
    assert done.code == 0, done.err
    report = read_report(sandbox, done.json["run"], tmp_path)
    assert report["argv"] == args
    environ = report["environ"]
    assert isinstance(environ, dict)
    assert {name: environ[name] for name in env} == env
    assert report["data"] == [[f"{NAME}.csv", TEXT]]
    assert not traces(tmp_path, Path(sandbox.environment.get("CLOUDTRAIN_HOME", tmp_path)))


def test_estimator_hyperparameters_become_literal_arguments(
    sandbox: Served, tmp_path: Path
) -> None:
    """AWS's toolkit starts scripts through a shell up to version 5.1.1; the sandbox's replacement uses none."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        SCRIPT.replace('pathlib.Path(os.environ["SM_CHANNEL_TRAIN"])', "pathlib.Path('x')")
    )
    with tarfile.open(tmp_path / "sourcedir.tar.gz", "w:gz") as archive:
        archive.add(source / "train.py", "train.py")
    bucket = sandbox.info["bucket"]
    sandbox.client("s3").upload_file(
        str(tmp_path / "sourcedir.tar.gz"), bucket, "meta/sourcedir.tar.gz"
    )
    values = {
        "text": TEXT,
        "name": NAME,
        **{f"planted-{name}": text for name, text in plant(tmp_path).items()},
    }
    document = {
        "TrainingJobName": "meta-estimator",
        "RoleArn": sandbox.info["role"],
        "AlgorithmSpecification": {
            "TrainingImage": "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.5.1-cpu-py311",
            "TrainingInputMode": "File",
        },
        "HyperParameters": {
            "sagemaker_program": json.dumps("train.py"),
            "sagemaker_submit_directory": json.dumps(f"s3://{bucket}/meta/sourcedir.tar.gz"),
            **{name: json.dumps(text) for name, text in values.items()},
        },
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/out"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 10},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
    }
    sandbox.client("sagemaker").create_training_job(**document)
    ended = sandbox.end_of("meta-estimator")
    assert ended["TrainingJobStatus"] == "Completed", ended
    report = read_report(sandbox, "meta-estimator", tmp_path)
    assert report["argv"] == [
        word for name in sorted(values) for word in (f"--{name}", values[name])
    ]
    assert not traces(tmp_path)
