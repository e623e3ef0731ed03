"""`train.init_from` on a cluster: weights of a finished run, and of objects in S3."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.jobs import Cli
from support.sandboxes import Served

pytestmark = [pytest.mark.processes, pytest.mark.aws]

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"
STILL = (
    "--set",
    "train.learning_rate=1e-30",
    "--set",
    "train.steps=1",
    "--set",
    "checkpoint.uri=null",
)
"""A run whose last weights are those that it started with."""


def test_runs_start_with_weights_in_s3(sandbox: Served, cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "job"  # the user's record of runs must not be in it
    folder.mkdir()
    for name in ("small.py", "job.yaml"):
        shutil.copy(GOLDEN / name, folder)
    environ = {**os.environ, **sandbox.environment, "CLOUDTRAIN_TRANSPORT": "boto3"}
    submit = ("submit", folder / "job.yaml", "--follow", "--json")

    def weights_of(run: str) -> dict[str, torch.Tensor]:
        path = tmp_path / f"{run}.pt"
        exported = cli(
            "checkpoints",
            "export",
            run,
            "--to",
            "torch",
            "--part",
            "model",
            "-o",
            path,
            environ=environ,
        )
        assert exported.code == 0, exported.err
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return loaded

    first = cli(*submit, "--set", "checkpoint.uri=null", environ=environ)
    assert first.code == 0, first.err
    run = first.json["run"]
    expected = weights_of(run)
    archive = sandbox.describe(run)["ModelArtifacts"]["S3ModelArtifacts"]
    assert archive.endswith("/model.tar.gz")
    for source in (run, archive):
        second = cli(*submit, *STILL, "--set", f"train.init_from={source}", environ=environ)
        assert (second.code, second.json["first_step"], second.json["last_step"]) == (0, 0, 1), (
            second.err
        )
        found = weights_of(second.json["run"])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert (
            "the model starts with the weights of s3://"
            in cli("logs", second.json["run"], environ=environ).out
        )

    missing = f"s3://{sandbox.info['bucket']}/base/model.pt"
    refused = cli(*submit, *STILL, "--set", f"train.init_from={missing}", environ=environ)
    assert refused.code == 3
    assert f"there is no object {missing}" in refused.err
    assert f"copy it: aws s3 cp FILE {missing}" in refused.err
