"""Inputs of local and sandbox runs are equal, and contain no files of other prefixes and none outside a channel."""

from __future__ import annotations

import hashlib
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli, until
from support.sandboxes import FINAL, Served, run_here
from support.sizes import tries

from cloudtrain.backends.local.target import LocalTarget
from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.backends.sagemaker.uploads import Uploads
from cloudtrain.catalog import bundled_prices
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.placement import Machine
from cloudtrain.planning.plan import CodeInfo, Plan
from cloudtrain.planning.planner import make_plan
from cloudtrain.planning.targets import Target
from cloudtrain.settings.settings import Settings
from cloudtrain.support.data_files import data_files

JOBS, AT_ONCE = tries(12), 4
CODE = CodeInfo("d" * 64, 1000, 3)
NOW = datetime(2026, 11, 20, 10, 15, 0, tzinfo=UTC)
QUICK = ["/bin/sh", "-c", "exit 0"]
NAMES = ("train", "train2", "train-x", "train.d", "tra", "test")
PARTS = ("a", "b.bin", ".hidden", "deep", "data", "data2", "ü b", "x+y%20", "a&b=c;d", "...")


def tree_of(folder: Path) -> dict[str, str]:
    """Return digests of the files below a folder. Links are followed, except those to a folder that contains them."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for path, name in data_files(folder)
    }


def trees_of(hosts: Path) -> dict[str, dict[str, str]]:
    """Return the trees of the user's channels by host."""
    found = {
        host.name: tree_of(host / "opt" / "ml" / "input" / "data")
        for host in sorted(hosts.iterdir())
    }
    return {
        host: {
            name: digest
            for name, digest in tree.items()
            if not name.startswith(("cloudtrain", "code/"))
        }
        for host, tree in found.items()
    }


def write_random(folder: Path, chance: random.Random, names: tuple[str, ...] = PARTS) -> None:
    """Write a random data folder with files, empty folders, links, links to itself and broken links."""
    folder.mkdir(parents=True)
    for name in ("first", "second", "third"):  # at least one file for each of up to three instances
        (folder / name).write_bytes(chance.randbytes(3))
    for _ in range(chance.randrange(8)):
        path = folder.joinpath(*chance.choices(names, k=chance.choice((1, 1, 2, 3))))
        kind = chance.choice(("file", "file", "file", "empty", "link", "loop", "dead"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                path.write_bytes(chance.randbytes(chance.randrange(1, 40)))
            elif kind == "empty":
                path.mkdir()
            else:
                path.symlink_to(
                    {"link": folder.parent / "linked", "loop": folder, "dead": folder / "none"}[
                        kind
                    ]
                )
        except OSError:  # the name exists already
            continue


def random_job(
    folder: Path, chance: random.Random, bucket: str, number: int, s3: Any
) -> tuple[Path, int]:
    """Write a random job with local data and data in S3; return its path and its number of instances."""
    folder.mkdir()
    (folder / "train.py").write_text("print('never started')\n")
    (folder / "linked").mkdir()
    (folder / "linked" / "shared.txt").write_text(f"{number}")
    data: dict[str, Any] = {}
    for name in chance.sample(NAMES, chance.randrange(1, len(NAMES) + 1)):
        where = chance.choice(("folder", "folder", "file", "s3 folder", "s3 object"))
        sharded = where.endswith("folder") and chance.random() < 0.3
        if where == "folder":
            write_random(folder / name, chance)
            uri = name
        elif where == "file":
            (folder / f"{name}.csv").write_bytes(chance.randbytes(9))
            uri = f"{name}.csv"
        else:
            uri = f"s3://{bucket}/random/{number}/{name}"
            keys = ["one", "two", "sub/three"] if where == "s3 folder" else []
            for key in keys:
                s3.put_object(
                    Bucket=bucket, Key=f"random/{number}/{name}/{key}", Body=chance.randbytes(5)
                )
            if not keys:
                s3.put_object(Bucket=bucket, Key=f"random/{number}/{name}", Body=b"one object")
            s3.put_object(
                Bucket=bucket, Key=f"random/{number}/{name}-old/one", Body=b"of another prefix"
            )
            s3.put_object(Bucket=bucket, Key=f"random/{number}/{name}/", Body=b"")
            uri += chance.choice(("", "/")) if keys else ""
        data[name] = {"uri": uri, "sharded": sharded}
    path = folder / "job.yaml"
    cluster = {
        "instance_type": "ml.m5.large",
        "instances": (instances := chance.choice((1, 1, 2, 3))),
    }
    path.write_text(
        json.dumps(
            {"name": "demo", "code": {"script": "train.py"}, "cluster": cluster, "data": data}
        )
    )
    return path, instances


def planned(path: Path, number: int, target: Target) -> Plan:
    return make_plan(JobSpec.from_yaml(path), CODE, target, now=NOW, suffix=f"{number:06x}")


def quick(plan: Plan) -> dict[str, Any]:
    """Return a plan's request with the user's channels only, and with a container that exits at once."""
    request = json.loads(json.dumps(plan.request))
    request["AlgorithmSpecification"]["ContainerEntrypoint"] = QUICK
    request["InputDataConfig"] = [
        channel
        for channel in request["InputDataConfig"]
        if channel["ChannelName"] in plan.locations.channels
    ]
    return dict(request)


@pytest.mark.processes
def test_local_and_sandbox_runs_see_the_same_files(sandbox: Served, tmp_path: Path) -> None:
    s3, bucket = sandbox.client("s3"), sandbox.info["bucket"]
    settings = Settings(role=sandbox.info["role"], bucket=bucket, region="us-west-2")
    here = LocalTarget(settings, tmp_path / "home", Machine(gpus=0))
    there = SageMakerTarget(settings, bundled_prices())
    local: dict[str, Path] = {}
    sent: list[dict[str, Any]] = []
    for number in range(JOBS):
        path, _ = random_job(tmp_path / str(number), random.Random(number), bucket, number, s3)  # noqa: S311 (seeded)
        plan = planned(path, number, there)
        uploads = Uploads(s3)
        for upload in plan.uploads:
            assert upload.uri.endswith("/")
            uploads.add_folder(Path(upload.path), upload.uri)
        uploads.send()
        sent.append(quick(plan))
        folder = local[plan.run] = tmp_path / "runs" / plan.run
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps(quick(planned(path, number, here))))
    run_here(list(local.values()), sandbox.environment)
    client = sandbox.client("sagemaker")
    for start in range(0, JOBS, AT_ONCE):
        names = [request["TrainingJobName"] for request in sent[start : start + AT_ONCE]]
        for request in sent[start : start + AT_ONCE]:
            client.create_training_job(**request)
        until(
            lambda names=names: all(
                sandbox.describe(name)["TrainingJobStatus"] in FINAL for name in names
            )
        )
    different = {}
    for name, folder in local.items():
        assert json.loads((folder / "outcome.json").read_text()) == ["SUCCEEDED", ""], name
        assert sandbox.describe(name)["TrainingJobStatus"] == "Completed", sandbox.describe(
            name
        ).get("FailureReason")
        theirs = trees_of(sandbox.home / "jobs" / name / "attempt-1" / "hosts")
        ours = trees_of(folder / "hosts")
        assert any(ours.values())
        if ours != theirs:
            different[name] = (ours, theirs)
    assert different == {}


@pytest.mark.parametrize("where", ["local", "sandbox"])
@pytest.mark.parametrize(
    "key",
    ["bad//abs/path", "bad/../../../../../../x", "bad/a/../../../y", "bad/./x", "bad//opt/planted"],
)
def test_no_key_is_written_outside_its_channel(
    sandbox: Served, tmp_path: Path, where: str, key: str
) -> None:
    bucket = sandbox.info["bucket"]
    sandbox.client("s3").put_object(Bucket=bucket, Key=key, Body=b"planted")
    name = f"stray-{where}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    try:
        reason = reason_of(sandbox, tmp_path, where, name, f"s3://{bucket}/bad")
    finally:
        sandbox.client("s3").delete_object(Bucket=bucket, Key=key)
    assert "Data download failed" in reason
    assert repr(key) in reason
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"planted"
    ] == []
    assert not Path("/abs/path").exists()
    assert not Path("/opt/planted").exists()


@pytest.mark.parametrize("where", ["local", "sandbox"])
def test_an_object_and_a_folder_of_one_name_are_rejected(
    sandbox: Served, tmp_path: Path, where: str
) -> None:
    bucket = sandbox.info["bucket"]
    for key in ("both/one", "both/one/two"):
        sandbox.client("s3").put_object(Bucket=bucket, Key=key, Body=b"x")
    reason = reason_of(sandbox, tmp_path, where, f"both-{where}", f"s3://{bucket}/both")
    assert "'both/one/two'; rename one of them" in reason


def reason_of(sandbox: Served, tmp_path: Path, where: str, name: str, uri: str) -> str:
    """Run a job with a channel that cannot be downloaded; return the reason of its failure."""
    from support.sandboxes import request

    channel = {
        "ChannelName": "train",
        "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": uri}},
    }
    document = request(sandbox, name, "true", InputDataConfig=[channel])
    if where == "sandbox":
        sandbox.client("sagemaker").create_training_job(**document)
        return str(sandbox.end_of(name)["FailureReason"])
    folder = tmp_path / name
    folder.mkdir()
    document["OutputDataConfig"]["S3OutputPath"] = (tmp_path / "out").as_uri()
    (folder / "request.json").write_text(json.dumps(document))
    run_here([folder], sandbox.environment)
    state, reason = json.loads((folder / "outcome.json").read_text())
    assert state == "FAILED"
    return str(reason)


@pytest.mark.processes
def test_channels_with_a_common_prefix_are_separate(
    sandbox: Served, cli: Cli, tmp_path: Path
) -> None:
    """With `submit`, files of `train2` are not in `train`, and do not replace its files."""
    script = (
        "import os, pathlib\n"
        "for name in ('train', 'train2'):\n"
        "    root = pathlib.Path(os.environ['SM_CHANNEL_' + name.upper()])\n"
        "    print('SEES', name, sorted(p.name + '=' + p.read_text() for p in root.rglob('*') if p.is_file()))\n"
    )
    (tmp_path / "train.py").write_text(script)
    for name in ("data", "data2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "y.txt").write_text(name)
    job = tmp_path / "job.yaml"
    cluster = {"instance_type": "ml.m5.large", "instances": 1}
    data = {"train": "data", "train2": "data2"}
    job.write_text(
        json.dumps(
            {"name": "apart", "code": {"script": "train.py"}, "cluster": cluster, "data": data}
        )
    )
    sees = ["SEES train ['y.txt=data']", "SEES train2 ['y.txt=data2']"]
    for options, environ in ((("--local",), {}), ((), sandbox.environment)):
        done = cli("submit", job, *options, "--follow", environ=environ)
        assert done.code == 0, done.err
        shown = done.out + done.err
        assert [line for line in sees if line not in shown] == []
