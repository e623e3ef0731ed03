"""Checkpoints on a real file system and a real S3 server, in one process."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import process_group
from torch import nn

from cloudtrain_runtime.checkpoint import MANIFEST, Checkpoints, complete_checkpoints
from cloudtrain_runtime.context import Context, read_context
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.storage import copy_prefix, open_storage, path_of

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's own


@pytest.fixture
def place() -> Iterator[Context]:
    found = read_context({})
    with process_group(found):
        yield found


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.aws)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("aws")
        return "s3://cloudtrain-test/some/checkpoints"
    return (tmp_path / "some checkpoints").as_uri()


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_what_is_saved_is_loaded(uri: str, place: Context) -> None:
    checkpoints = Checkpoints(uri, keep=2, place=place)
    assert checkpoints.find("auto") is None
    model, optimizer = model_and_optimizer(1)
    torch.manual_seed(99)
    saved_at = checkpoints.save(7, model, optimizer, {"position": {"step": 7}})
    drawn = torch.rand(3)
    found = checkpoints.find("auto")
    assert found is not None
    assert (found.step, found.uri, found.state) == (7, saved_at, {"position": {"step": 7}})
    other, other_optimizer = model_and_optimizer(2)
    checkpoints.load(found, other, other_optimizer)
    assert same(other.state_dict(), model.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert torch.equal(torch.rand(3), drawn)


def test_the_oldest_go_and_the_newest_stays(uri: str, place: Context) -> None:
    checkpoints = Checkpoints(uri, keep=2, place=place)
    model, optimizer = model_and_optimizer(1)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, model, optimizer, {})
    assert [found.step for found in complete_checkpoints(open_storage(uri))] == [3, 4]
    assert open_storage(uri).names() == ["step-00000003", "step-00000004"]


def test_never_starts_anew_but_goes_on_after_a_restart(uri: str, place: Context) -> None:
    model, optimizer = model_and_optimizer(1)
    Checkpoints(uri, keep=2, place=place).save(5, model, optimizer, {})
    assert Checkpoints(uri, keep=2, place=place).find("never") is None
    again = Checkpoints(uri, keep=2, place=replace(place, restarts=1)).find("never")
    assert again is not None
    assert again.step == 5


def test_another_runs_checkpoints_are_read_and_left_alone(uri: str, place: Context, tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(1)
    first = Checkpoints(uri, keep=1, place=place)
    first.save(5, model, optimizer, {})
    second = Checkpoints((tmp_path / "second").as_uri(), keep=1, place=place)
    found = second.find(uri)
    assert found is not None
    assert found.step == 5
    assert second.find(found.uri) is not None  # one checkpoint may be named, too
    second.save(6, model, optimizer, {})
    newest = second.find(uri)
    assert newest is not None
    assert newest.step == 6  # its own comes first after a restart
    assert [checkpoint.step for checkpoint in complete_checkpoints(first.storage)] == [5]


def test_to_resume_from_nothing_is_an_error(place: Context, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint at"):
        Checkpoints((tmp_path / "own").as_uri(), keep=1, place=place).find((tmp_path / "other").as_uri())


def test_another_models_checkpoint_is_refused_with_the_reason(place: Context, tmp_path: Path) -> None:
    checkpoints = Checkpoints((tmp_path / "c").as_uri(), keep=1, place=place)
    model, optimizer = model_and_optimizer(1)
    checkpoints.save(1, model, optimizer, {})
    found = checkpoints.find("auto")
    assert found is not None
    for other, reason in (
        (
            nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)),
            r"its 0.weight has the shape \[8, 4\], the model's has \[9, 4\]",
        ),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2)), "it has no 2.weight"),
        (nn.Sequential(nn.Linear(4, 8)), "it has 1.weight, the model has not"),
    ):
        with pytest.raises(CheckpointError, match=f"step-00000001 does not fit this model: {reason}"):
            checkpoints.load(found, other, torch.optim.AdamW(other.parameters()))


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "file gone", "file shorter", "file longer"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: str, place: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = (tmp_path / "c").as_uri()
    checkpoints = Checkpoints(uri, keep=5, place=place)
    model, optimizer = model_and_optimizer(1)
    for step in (1, 2):
        checkpoints.save(step, model, optimizer, {})
    newest = path_of(uri) / "step-00000002"
    data = newest / "__0_0.distcp"
    if damage == "no manifest":
        (newest / MANIFEST).unlink()
    elif damage == "torn manifest":
        (newest / MANIFEST).write_text((newest / MANIFEST).read_text()[:40])
    elif damage == "file gone":
        data.unlink()
    else:
        content = data.read_bytes()
        data.write_bytes(content[:-1] if damage == "file shorter" else content + b"x")
    found = checkpoints.find("auto")
    assert found is not None
    assert found.step == 1
    assert "step-00000002" in capfd.readouterr().out
    checkpoints.save(2, model, optimizer, {})
    again = checkpoints.find("auto")
    assert again is not None
    assert again.step == 2


def test_nothing_is_visible_before_the_manifest(uri: str, place: Context, tmp_path: Path) -> None:
    storage = open_storage(uri)
    workspace = storage.workspace("step-00000001", "token")
    (workspace / "__0_0.distcp").write_bytes(b"x" * 10)
    storage.add(workspace, "step-00000001")
    assert complete_checkpoints(open_storage(uri)) == []
    text = json.dumps({"files": {"__0_0.distcp": 10}, "step": 1, "state": {}})
    storage.publish(workspace, "step-00000001", MANIFEST, text)
    assert [found.step for found in complete_checkpoints(open_storage(uri))] == [1]


def test_a_second_writer_of_the_same_step_changes_nothing(place: Context, tmp_path: Path) -> None:
    uri = (tmp_path / "c").as_uri()
    checkpoints = Checkpoints(uri, keep=5, place=place)
    model, optimizer = model_and_optimizer(1)
    checkpoints.save(1, model, optimizer, {"who": "first"})
    before = {path.name: path.read_bytes() for path in (path_of(uri) / "step-00000001").iterdir()}
    checkpoints.save(1, model, optimizer, {"who": "second"})
    assert {path.name: path.read_bytes() for path in (path_of(uri) / "step-00000001").iterdir()} == before
    assert [path.name for path in path_of(uri).iterdir()] == ["step-00000001"]


def test_plain_dcp_reads_it(place: Context, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    checkpoints = Checkpoints((tmp_path / "c").as_uri(), keep=1, place=place)
    model, optimizer = model_and_optimizer(1)
    checkpoints.save(1, model, optimizer, {})
    states = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    load(states, storage_reader=FileSystemReader(tmp_path / "c" / "step-00000001"))
    assert same(states["model"], dict(model.state_dict()))


@pytest.mark.aws
def test_a_prefix_is_copied_as_file_mode_does(aws: dict[str, str], tmp_path: Path) -> None:
    import boto3

    s3 = boto3.client("s3")
    for key in ("data/a.txt", "data/deep/b.txt", "database.txt"):
        s3.put_object(Bucket="cloudtrain-test", Key=key, Body=key.encode())
    assert copy_prefix("s3://cloudtrain-test/data/", tmp_path / "one") == 2
    assert (tmp_path / "one" / "deep" / "b.txt").read_text() == "data/deep/b.txt"
    assert copy_prefix("s3://cloudtrain-test/data/a.txt", tmp_path / "two") == 1
    assert (tmp_path / "two" / "a.txt").read_text() == "data/a.txt"
    shutil.rmtree(tmp_path / "one")
