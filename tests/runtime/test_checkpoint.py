"""Checkpoints on a real file system and a real S3 server, in one process."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.manager import CheckpointManager, Resumed
from cloudtrain_runtime.checkpoint.storage import FolderStorage, open_storage, path_of
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract import CheckpointConfig, parse_event
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    Manifest,
    checkpoint_folder_name,
)
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint's own

Pair = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.aws)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("aws")
        return "s3://cloudtrain-test/some/checkpoints"
    return (tmp_path / "some checkpoints").as_uri()


def checkpoints_at(uri: str, place: Context, **changes: Any) -> CheckpointManager:
    config = replace(CheckpointConfig(uri, None, None, 3, "auto"), **changes)
    return CheckpointManager(config, replace(place, code="c0de", request="1d"))


def model_and_optimizer(seed: int = 1) -> Pair:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_a_step((model, optimizer))
    return model, optimizer


def train_a_step(pair: Pair) -> None:
    model, optimizer = pair
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def save(checkpoints: CheckpointManager, step: int, pair: Pair, state: dict[str, Any] | None = None) -> None:
    model, optimizer = pair
    assert checkpoints.save(step, model, [optimizer], state or {}, {"lr": 0.5}, wait=True)


def resumed(checkpoints: CheckpointManager, seed: int = 2) -> tuple[Resumed, Pair]:
    model, optimizer = model_and_optimizer(seed)
    return checkpoints.resume(model, [optimizer]), (model, optimizer)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def steps_at(uri: str) -> list[int]:
    return [record.step for record in list_checkpoints(open_storage(uri)) if record.is_complete]


def damaged_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# ---------------------------------------------------------------- what is saved is loaded


def test_what_is_saved_is_loaded(uri: str, place: Context) -> None:
    checkpoints = checkpoints_at(uri, place)
    assert resumed(checkpoints)[0] == Resumed()
    pair = model_and_optimizer(1)
    torch.manual_seed(99)
    save(checkpoints, 7, pair, {"position": {"step": 7}})
    drawn = torch.rand(3)
    found, (model, optimizer) = resumed(checkpoints_at(uri, place))
    assert (found.step, found.state, found.objects) == (7, {"position": {"step": 7}}, {"lr": 0.5})
    assert (found.uri, found.is_own, found.has_random) == (f"{open_storage(uri).uri}/step-00000007", True, True)
    assert same(model.state_dict(), pair[0].state_dict())
    assert same(optimizer.state_dict(), pair[1].state_dict())
    assert torch.equal(torch.rand(3), drawn)


def test_the_manifest_tells_everything_but_tensors(uri: str, place: Context) -> None:
    save(checkpoints_at(uri, place), 7, model_and_optimizer(), {"epoch": 2})
    storage = open_storage(uri)
    manifest = Manifest.from_json(storage.read("step-00000007", MANIFEST_FILE) or b"")
    assert (manifest.run, manifest.step, manifest.code, manifest.request) == ("demo", 7, "c0de", "1d")
    assert (manifest.world_size, manifest.mesh, manifest.rng["ranks"]) == (1, {"data": 1}, 1)
    assert manifest.state == {"epoch": 2}
    sizes = storage.folders()["step-00000007"]
    assert {name: file.bytes for name, file in manifest.files.items()} == {
        name: size for name, size in sizes.items() if name not in (MANIFEST_FILE, "writer.json")
    }
    assert list(find_damage(storage, "step-00000007", manifest.files)) == []


def test_plain_dcp_reads_it(place: Context, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    model, optimizer = model_and_optimizer()
    save(checkpoints_at(str(tmp_path / "c"), place), 1, (model, optimizer))
    states = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    load(states, storage_reader=FileSystemReader(tmp_path / "c" / "step-00000001"))
    assert same(states["model"], dict(model.state_dict()))


def test_training_goes_on_while_a_checkpoint_is_written(place: Context, tmp_path: Path) -> None:
    """What is saved is the state at that step, however far training has come when it is written."""
    checkpoints = checkpoints_at(str(tmp_path / "c"), place)
    storage = _Held(tmp_path / "c")
    checkpoints._saver.storage = storage  # noqa: SLF001 (the one place where time can be stopped)
    pair = model_and_optimizer()
    before = {name: value.clone() for name, value in pair[0].state_dict().items()}
    assert checkpoints.save(1, pair[0], [pair[1]], {}, {})
    for _ in range(3):
        train_a_step(pair)  # batch norm changes its buffers, the optimizer the rest
    assert not same(dict(pair[0].state_dict()), before)
    assert steps_at(str(tmp_path / "c")) == []
    storage.go.set()
    assert checkpoints.wait_for_save()
    _, (model, _) = resumed(checkpoints_at(str(tmp_path / "c"), place))
    assert same(dict(model.state_dict()), before)


class _Held(FolderStorage):
    """Storage that takes the first byte when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def create(self, folder: str, file: str, bytes_: int = 0) -> Any:
        assert self.go.wait(60)
        return super().create(folder, file, bytes_)


def test_one_at_most_is_under_way_and_what_falls_behind_is_told(
    place: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain_runtime.checkpoint.saving._PREVIOUS_SAVE_SECONDS", 0.01)
    checkpoints = checkpoints_at(str(tmp_path / "c"), place)
    storage = _Held(tmp_path / "c")
    checkpoints._saver.storage = storage  # noqa: SLF001
    model, optimizer = model_and_optimizer()
    assert checkpoints.save(1, model, [optimizer], {}, {})
    for step in (2, 3, 4):
        assert not checkpoints.save(step, model, [optimizer], {}, {})
    storage.go.set()
    assert checkpoints.wait_for_save()
    save(checkpoints, 5, (model, optimizer))
    events = [event for line in capfd.readouterr().out.splitlines() if (event := parse_event(line))]
    missed = [
        (event["step"], event["missed"], event["alarm"]) for event in events if event["event"] == "checkpoint_missed"
    ]
    assert missed == [(2, 1, False), (3, 2, False), (4, 3, True)]
    assert {event["reason"] for event in events if event["event"] == "checkpoint_missed"} <= {"late", "stalled"}
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [1, 5]


def test_a_save_that_fails_is_told_and_the_next_one_is_made(
    place: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = checkpoints_at(str(tmp_path / "c"), place)
    model, optimizer = model_and_optimizer()
    (tmp_path / "c").write_text("a file where the folder should be")
    assert not checkpoints.save(1, model, [optimizer], {}, {}, wait=True)
    train_a_step((model, optimizer))
    (tmp_path / "c").unlink()
    save(checkpoints, 2, (model, optimizer))
    out = capfd.readouterr().out
    (event,) = [
        event for line in out.splitlines() if (event := parse_event(line)) and event["event"] == "checkpoint_missed"
    ]
    assert (event["step"], event["reason"], event["missed"]) == (1, "failed", 1)
    assert "rank 0: NotADirectoryError" in event["detail"] or "rank 0: FileExistsError" in event["detail"]
    assert "training continues" in out


def test_a_run_that_completed_no_due_checkpoint_fails(place: Context, tmp_path: Path) -> None:
    checkpoints = checkpoints_at(str(tmp_path / "c"), place)
    model, optimizer = model_and_optimizer()
    checkpoints.require_completed()  # none was due
    (tmp_path / "c").write_text("a file where the folder should be")
    assert not checkpoints.save(1, model, [optimizer], {}, {}, wait=True)
    with pytest.raises(CheckpointError, match=r"none of this run's checkpoints was completed .* step 1 \(failed\)"):
        checkpoints.require_completed()
    (tmp_path / "c").unlink()
    save(checkpoints, 2, (model, optimizer))
    checkpoints.require_completed()


def test_hosts_do_not_save_to_a_disk_of_their_own(place: Context) -> None:
    hosts = replace(place, hosts=("algo-1", "algo-2"))
    with pytest.raises(CheckpointError, match="a local disk of each host, so 2 hosts cannot save"):
        checkpoints_at("", hosts)


# ---------------------------------------------------------------- what is kept


def test_the_oldest_go_and_the_newest_stays(uri: str, place: Context) -> None:
    checkpoints = checkpoints_at(uri, place, keep=2)
    pair = model_and_optimizer()
    for step in (1, 2, 3, 4):
        save(checkpoints, step, pair)
    assert steps_at(uri) == [3, 4]
    assert list(open_storage(uri).folders()) == ["step-00000003", "step-00000004"]


def test_what_was_never_finished_goes_with_what_was_before_it(uri: str, place: Context) -> None:
    """An attempt that was killed while it saved leaves files; they go once newer checkpoints are whole."""
    storage = open_storage(uri)
    folder = storage.reserve(2, {"run": "demo", "attempt": "0a1b2c3d"})
    with storage.create(folder, "__0_0.distcp") as writer:
        writer.write(b"x" * 1000)
    assert [record.verdict for record in list_checkpoints(storage)] == ["unfinished"]
    checkpoints = checkpoints_at(uri, place, keep=1)
    pair = model_and_optimizer()
    save(checkpoints, 1, pair)
    assert folder in storage.folders()  # newer than what is kept: somebody may still be writing it
    save(checkpoints, 3, pair)
    assert list(storage.folders()) == ["step-00000003"]


def test_another_runs_checkpoints_stay_where_this_run_began_anew(uri: str, place: Context) -> None:
    pair = model_and_optimizer()
    save(checkpoints_at(uri, replace(place, run="other"), keep=1), 5, pair)
    own = checkpoints_at(uri, place, keep=1, resume="never")
    for step in (6, 7):
        save(own, step, pair)
    assert steps_at(uri) == [5, 7]


def test_unreadable_new_checkpoint_deletes_no_old_one(
    place: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = checkpoints_at(str(tmp_path / "c"), place, keep=1)
    pair = model_and_optimizer()
    save(checkpoints, 1, pair)
    checkpoints._saver.storage = _Flipping(tmp_path / "c")  # noqa: SLF001
    assert not checkpoints.save(2, pair[0], [pair[1]], {}, {}, wait=True)
    verdicts = {record.step: record.verdict for record in list_checkpoints(open_storage(str(tmp_path / "c")))}
    assert verdicts == {1: "complete", 2: "damaged"}
    assert '"event": "checkpoint_damaged"' in capfd.readouterr().out


class _Flipping(FolderStorage):
    """A disk that loses a bit of each file of tensors."""

    def commit(self, folder: str, manifest: str) -> str:
        damaged_byte(self.root / folder / "__0_0.distcp")
        return super().commit(folder, manifest)


# ---------------------------------------------------------------- what is damaged


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "gone", "shorter", "longer", "flipped", "metadata"])
def test_damaged_checkpoint_falls_back_to_the_previous_one(
    damage: str, place: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = (tmp_path / "c").as_uri()
    pair = model_and_optimizer()
    for step in (1, 2):
        save(checkpoints_at(uri, place, keep=5), step, pair)
    newest = path_of(uri) / "step-00000002"
    hurt(newest, damage)
    checkpoints = checkpoints_at(uri, place, keep=1)
    found, (model, _) = resumed(checkpoints)
    assert found.step == 1
    assert same(dict(model.state_dict()), dict(pair[0].state_dict()))
    out = capfd.readouterr().out
    assert "step-00000002" in out
    # It stays, and its step can be saved again beside it.
    save(checkpoints, 2, pair)
    again, _ = resumed(checkpoints_at(uri, place))
    assert again.step == 2
    assert again.uri != newest.as_uri()
    assert newest.is_dir()
    save(checkpoints, 3, pair)
    assert newest.is_dir() == (damage != "no manifest")  # what was never finished is no evidence


def hurt(folder: Path, damage: str) -> None:
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    acts: dict[str, Callable[[], Any]] = {
        "no manifest": (folder / MANIFEST_FILE).unlink,
        "torn manifest": lambda: (folder / MANIFEST_FILE).write_text((folder / MANIFEST_FILE).read_text()[:40]),
        "gone": data.unlink,
        "shorter": lambda: data.write_bytes(content[:-1]),
        "longer": lambda: data.write_bytes(content + b"x"),
        "flipped": lambda: damaged_byte(data),
        "metadata": lambda: damaged_byte(folder / ".metadata"),
    }
    acts[damage]()


def test_each_flipped_byte_is_found(place: Context, tmp_path: Path) -> None:
    """Plain DCP and torch.load take nearly all of them in silence."""
    save(checkpoints_at(str(tmp_path / "c"), place), 1, model_and_optimizer())
    folder = tmp_path / "c" / "step-00000001"
    data = folder / "__0_0.distcp"
    storage, whole = FolderStorage(tmp_path / "c"), data.read_bytes()
    manifest = Manifest.from_json((folder / MANIFEST_FILE).read_text())
    for position in range(0, len(whole), max(1, len(whole) // 60)):
        content = bytearray(whole)
        content[position] ^= 0x10
        data.write_bytes(content)
        assert list(find_damage(storage, "step-00000001", manifest.files)), position


@pytest.mark.aws
def test_a_flipped_byte_in_s3_is_found_and_set_aside(aws: dict[str, str], place: Context) -> None:
    import boto3

    uri = "s3://cloudtrain-test/some/checkpoints"
    pair = model_and_optimizer()
    for step in (1, 2):
        save(checkpoints_at(uri, place), step, pair)
    s3, key = boto3.client("s3"), "some/checkpoints/step-00000002/__0_0.distcp"
    content = bytearray(s3.get_object(Bucket="cloudtrain-test", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    s3.put_object(Bucket="cloudtrain-test", Key=key, Body=bytes(content))
    assert resumed(checkpoints_at(uri, place))[0].step == 1
    (record,) = [record for record in list_checkpoints(open_storage(uri)) if record.step == 2]
    assert record.verdict == "damaged"
    assert "has changed since it was written" in record.why
    assert DAMAGED_FILE in record.files


def test_run_with_only_damaged_checkpoints_does_not_restart(place: Context, tmp_path: Path) -> None:
    uri = str(tmp_path / "c")
    save(checkpoints_at(uri, place), 1, model_and_optimizer())
    damaged_byte(tmp_path / "c" / "step-00000001" / "__0_0.distcp")
    for _ in range(2):  # found while reading, then told by its mark
        with pytest.raises(CheckpointError, match=r"every checkpoint at .* is damaged"):
            resumed(checkpoints_at(uri, place))


# ---------------------------------------------------------------- where to go on from


def test_never_starts_anew_but_goes_on_from_its_own(uri: str, place: Context) -> None:
    pair = model_and_optimizer()
    save(checkpoints_at(uri, replace(place, run="other")), 9, pair)
    assert resumed(checkpoints_at(uri, place, resume="never"))[0].uri is None
    save(checkpoints_at(uri, place, resume="never"), 5, pair)
    assert resumed(checkpoints_at(uri, place, resume="never"))[0].step == 5


def test_another_runs_checkpoints_are_read_and_left_alone(uri: str, place: Context, tmp_path: Path) -> None:
    pair = model_and_optimizer()
    earlier = checkpoints_at(uri, replace(place, run="other"))
    for step in (4, 5):
        save(earlier, step, pair)
    second = (tmp_path / "second").as_uri()
    found, _ = resumed(checkpoints_at(second, place, resume=uri))
    assert (found.step, found.is_own) == (5, False)
    assert resumed(checkpoints_at(second, place, resume=f"{uri}/step-00000004"))[0].step == 4  # one may be named
    save(checkpoints_at(second, place, resume=uri, keep=1), 6, pair)
    assert resumed(checkpoints_at(second, place, resume=uri))[0].step == 6  # its own comes first after a restart
    assert steps_at(uri) == [4, 5]


def test_in_a_shared_folder_the_run_that_is_meant_is_found(place: Context, tmp_path: Path) -> None:
    uri, pair = str(tmp_path / "c"), model_and_optimizer()
    save(checkpoints_at(uri, replace(place, run="first")), 3, pair)
    save(checkpoints_at(uri, replace(place, run="second")), 9, pair)
    found, _ = resumed(checkpoints_at(uri, place, resume=uri, resume_run="first"))
    assert found.step == 3


def test_to_resume_from_nothing_is_an_error(place: Context, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint at"):
        resumed(checkpoints_at((tmp_path / "own").as_uri(), place, resume=(tmp_path / "other").as_uri()))


def test_another_models_checkpoint_is_refused_with_the_reason(place: Context, tmp_path: Path) -> None:
    checkpoints = checkpoints_at((tmp_path / "c").as_uri(), place)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    save(checkpoints, 1, (model, torch.optim.AdamW(model.parameters())))
    for other, reason in (
        (
            nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)),
            r"its 0.weight has the shape \[8, 4\], the model's has \[9, 4\]",
        ),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2)), "it has no 2.weight"),
        (nn.Sequential(nn.Linear(4, 8)), "it has 1.weight, the model does not"),
    ):
        with pytest.raises(CheckpointError, match=f"step-00000001 does not fit this model: {reason}"):
            checkpoints.resume(other, [torch.optim.AdamW(other.parameters())])


# ---------------------------------------------------------------- two writers


def test_two_writers_of_one_step_share_no_files(uri: str, place: Context) -> None:
    """A zombie of an earlier attempt that wakes up, in the middle of a newer one's save."""
    storage = open_storage(uri)
    zombie, newer = ({"run": "demo", "attempt": attempt} for attempt in ("aaaaaaaa", "bbbbbbbb"))
    first, second = storage.reserve(4, zombie), storage.reserve(4, newer)
    assert first != second
    for folder, content in ((first, b"zombie"), (second, b"newer")):
        with storage.create(folder, "__0_0.distcp") as writer:
            writer.write(content)
    names = [storage.commit(second, json.dumps({"by": "newer"})), storage.commit(first, json.dumps({"by": "zombie"}))]
    assert min(names) == checkpoint_folder_name(4)
    assert {storage.read(name, "__0_0.distcp") for name in names} == {b"zombie", b"newer"}
    assert [json.loads(storage.read(name, MANIFEST_FILE) or b"")["by"] for name in names] == ["newer", "zombie"]


def test_nothing_is_visible_before_the_manifest(uri: str) -> None:
    storage = open_storage(uri)
    folder = storage.reserve(1, {"run": "demo", "attempt": "aaaaaaaa"})
    with storage.create(folder, "__0_0.distcp") as writer:
        writer.write(b"x" * 10)
    assert steps_at(uri) == []
