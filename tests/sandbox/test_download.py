"""Downloads of results from S3."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"
JOB = """\
name: keeps
code: {script: train.py, outputs: [out/]}
cluster: {instance_type: ml.m5.large, instances: 1, processes_per_instance: 1}
"""
SCRIPT = """\
import json, os
from pathlib import Path
from cloudtrain_runtime import context

place = context()
Path("out").mkdir(exist_ok=True)
Path("out/a.txt").write_text("a")
for step in (10, 20):  # as an attached trainer does
    saved = place.checkpoint_dir / f"checkpoint-{step}"
    saved.mkdir()
    (saved / "weights.bin").write_text("weights")
    files = [{"path": "weights.bin", "fingerprints": [[7 if step == 10 else 8, 0]]}]
    (saved / "cloudtrain.json").write_text(json.dumps({"run": place.run, "step": step, "files": files}))
Path(os.environ["SM_MODEL_DIR"], "weights.bin").write_text("w")
"""


@pytest.fixture
def environ(sandbox: Served) -> dict[str, str]:
    return {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}


def test_results_of_a_script_are_downloaded(
    cli: Cli, job: Callable[..., Path], environ: dict[str, str], sandbox: Served, tmp_path: Path
) -> None:
    submitted = cli("submit", job(JOB, train_py=SCRIPT), "--follow", "--json", environ=environ)
    assert submitted.code == 0, submitted.err
    run, bucket = submitted.json["run"], sandbox.info["bucket"]
    model = submitted.json["artifacts"]["model"].removeprefix(f"s3://{bucket}/")
    for neighbour in (
        model.replace("/output/", "/output2/"),
        f"{model.rpartition('/output/')[0]}2/output/model.tar.gz",
    ):
        sandbox.client("s3").put_object(Bucket=bucket, Key=neighbour, Body=b"of a neighbour")

    listed = cli("checkpoints", run, "--json", environ=environ).json["checkpoints"]
    assert [(each["step"], each["state"], each["run"]) for each in listed] == [
        (20, "damaged", run),
        (10, "complete", run),
    ]
    done = cli("download", run, "--unpack", "--json", environ=environ, cwd=tmp_path)
    assert done.code == 0, done.err
    assert sorted(each["path"] for each in done.json["files"]) == [
        *("checkpoints/checkpoint-10/cloudtrain.json", "checkpoints/checkpoint-10/weights.bin"),
        *("model.tar.gz", "model/weights.bin", "outputs/out/a.txt"),
    ]
    assert done.json["left_out"]["checkpoint-20"].startswith("damaged: weights.bin has 7 bytes")
    assert "size" not in {each["verified"] for each in done.json["files"]}
    again = cli("download", run, "--unpack", "--json", environ=environ, cwd=tmp_path).json
    assert not any(each["is_new"] for each in again["files"])


def test_checkpoints_of_a_task_are_downloaded(
    cli: Cli, environ: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    for name in ("small.py", "job.yaml"):
        shutil.copy(GOLDEN / name, folder)
    submitted = cli(
        "submit",
        folder / "job.yaml",
        "--set",
        "checkpoint.uri=null",
        "--follow",
        "--json",
        environ=environ,
    )
    assert submitted.code == 0, submitted.err
    options = ("--what", "checkpoints", "--step", "last", "--to", tmp_path / "to", "--json")
    done = cli("download", submitted.json["run"], *options, environ=environ)
    assert done.code == 0, done.err
    shards = [each["verified"] for each in done.json["files"] if each["path"].endswith(".distcp")]
    assert set(shards) == {"manifest"}
    assert done.json["files"][-1]["path"].endswith("/manifest.json"), "it is the last one"
    (verified,) = cli("checkpoints", "verify", tmp_path / "to" / "checkpoints", "--json").json[
        "checkpoints"
    ]
    assert (verified["state"], verified["step"]) == ("complete", 4)
