"""Downloads of the results of local runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import Cli

import cloudtrain

pytestmark = pytest.mark.processes


def test_results_of_a_task_are_downloaded(
    cli: Cli, small: Callable[..., Path], tmp_path: Path
) -> None:
    run = cli("submit", small(), "--local", "--follow", "--json").json["run"]
    done = cli("download", run, "--unpack", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    to = tmp_path / run
    found = {each["path"]: each for each in done.json["files"]}
    assert {"model.tar.gz", "model/model.pt"} <= set(found)
    shards = {
        path: each["verified"] for path, each in found.items() if path.startswith("checkpoints/")
    }
    assert "checkpoints/step-00000036/manifest.json" in shards
    assert {kind for path, kind in shards.items() if path.endswith(".distcp")} == {"manifest"}
    assert done.json["missing"].keys() == {"outputs"}
    assert (
        subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=to, check=False).returncode
        == 0
    )
    verified = cli("checkpoints", "verify", to / "checkpoints", "--json").json["checkpoints"]
    assert [each["state"] for each in verified] == ["complete"] * 3
    again = cli("download", run, "--unpack", "--json", cwd=tmp_path).json
    assert not any(each["is_new"] for each in again["files"])


def test_one_checkpoint_is_downloaded(cli: Cli, small: Callable[..., Path], tmp_path: Path) -> None:
    job, keeps_best = small(), ("--set", "train.export=best", "--set", "checkpoint.keep=2")
    task = job.with_name("small.py")
    task.write_text(task.read_text().replace('"test": part', '"validation": part'))
    run = cli("submit", job, "--local", "--follow", "--json", *keeps_best).json["run"]
    listed = cli("checkpoints", run, "--json").json["checkpoints"]
    best = next(each["name"] for each in listed if each["best"])

    def fetched(step: str) -> set[str]:
        done = cli(
            "download",
            run,
            "--what",
            "checkpoints",
            "--step",
            step,
            "--to",
            tmp_path / step,
            "--json",
        )
        assert done.code == 0, done.err
        return {each["path"].split("/")[1] for each in done.json["files"]}

    assert fetched("best") == {best}
    assert fetched("last") == {listed[0]["name"]}
    assert fetched(str(listed[-1]["step"])) == {listed[-1]["name"]}
    missing = cli("download", run, "--step", "7")
    assert missing.code == 2
    assert f"{run} has no complete checkpoint of step 7" in missing.err
    assert f"complete: {', '.join(str(each['step']) for each in listed)}" in missing.err
    assert cli("download", run, "--step", "next").code == 2
    (tmp_path / "last" / "checkpoints" / listed[0]["name"] / "manifest.json").write_text("{}")
    refused = cli("download", run, "--what", "checkpoints", "--to", tmp_path / "last")
    assert refused.code == 2
    assert "to replace them: --force" in refused.err


def test_a_damaged_shard_is_not_downloaded(
    cli: Cli, small: Callable[..., Path], tmp_path: Path
) -> None:
    run = cli("submit", small(), "--local", "--follow", "--json").json["run"]
    (shard,) = Path(cloudtrain.status(run).artifacts["folder"]).glob(
        "checkpoints/step-00000036/*_0.distcp"
    )
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    done = cli("download", run, "--to", tmp_path / "to")
    assert done.code == 4
    assert f"{shard.name} differs from the manifest of its checkpoint" in done.err
    assert not list((tmp_path / "to").rglob("step-00000036/manifest.json")), (
        "it is not complete there"
    )


SCRIPT = """
import os
from pathlib import Path
from cloudtrain_runtime import context
Path("out").mkdir(exist_ok=True)
Path("out/a.txt").write_text("a")
(context().checkpoint_dir / "last.ckpt").write_text("state")
Path(os.environ["SM_MODEL_DIR"], "weights.bin").write_text("w")
Path(os.environ["SM_OUTPUT_DATA_DIR"], "notes.txt").write_text("n")
"""
JOB = """\
name: keeps
code: {script: train.py, outputs: [out/]}
cluster: {instance_type: ml.g5.xlarge, instances: 1, processes_per_instance: 1}
"""


def test_files_of_a_script_are_downloaded(
    cli: Cli, job: Callable[..., Path], tmp_path: Path
) -> None:
    run = cli("submit", job(JOB, train_py=SCRIPT), "--local", "--follow", "--json").json["run"]
    done = cloudtrain.download(run, tmp_path / "to", unpack=True)
    assert sorted(each.path for each in done.files) == [
        *("checkpoints/last.ckpt", "model.tar.gz", "model/weights.bin"),
        *("output.tar.gz", "output/notes.txt", "outputs/out/a.txt"),
    ]
    shown = cli("download", run, "--to", tmp_path / "to").out
    assert re.search(r"outputs/ +1 +1 B +was there already\n", shown)
    only = cloudtrain.download(run, tmp_path / "only", what=["model"])
    assert [each.path for each in only.files] == ["model.tar.gz"]
    with pytest.raises(
        cloudtrain.UserError, match="has no complete checkpoint with a step"
    ) as caught:
        cloudtrain.download(run, tmp_path / "last", what=["checkpoints"], step="last")
    assert caught.value.hint == "without --step, all files there are downloaded"
