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
from cloudtrain_runtime.checkpoint.storage import FolderStorage, open_storage
from cloudtrain_runtime.checkpoint.verified_reader import find_damage
from cloudtrain_runtime.contract import CheckpointConfig, parse_event
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.manifest import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    Manifest,
    checkpoint_folder_name,
)
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

Pair = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.aws)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("aws")
        return "s3://cloudtrain-test/some/checkpoints"
    return (tmp_path / "some checkpoints").as_uri()


def checkpoints_at(uri: str, context: Context, **changes: Any) -> CheckpointManager:
    """Return a manager of the checkpoints at a location; `changes` are fields of its CheckpointConfig."""
    config = replace(CheckpointConfig(uri, None, None, 3, "auto"), **changes)
    return CheckpointManager(config, replace(context, code="c0de", request="1d"))


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


def save(
    checkpoints: CheckpointManager, step: int, pair: Pair, state: dict[str, Any] | None = None
) -> None:
    model, optimizer = pair
    assert checkpoints.save(step, model, [optimizer], state or {}, {"lr": 0.5}, wait=True)


def resumed(checkpoints: CheckpointManager, seed: int = 2) -> tuple[Resumed, Pair]:
    model, optimizer = model_and_optimizer(seed)
    return checkpoints.resume(model, [optimizer]), (model, optimizer)


def checkpoints_in(
    storage: FolderStorage, context: Context, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> CheckpointManager:
    """Return a manager that saves to this storage object."""
    monkeypatch.setattr(
        "cloudtrain_runtime.checkpoint.manager.open_storage", lambda location: storage
    )
    return checkpoints_at(str(storage.root), context, **changes)


def same(left: Any, right: Any) -> bool:
    """Return whether two nested states are equal, bit by bit."""
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def steps_at(uri: str) -> list[int]:
    return [record.step for record in list_checkpoints(open_storage(uri)) if record.is_complete]


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_resume_restores_the_saved_state(uri: str, context: Context) -> None:
    checkpoints = checkpoints_at(uri, context)
    assert resumed(checkpoints)[0] == Resumed()
    pair = model_and_optimizer(1)
    torch.manual_seed(99)
    save(checkpoints, 7, pair, {"position": {"step": 7}})
    drawn = torch.rand(3)
    found, (model, optimizer) = resumed(checkpoints_at(uri, context))
    assert (found.step, found.state, found.objects) == (7, {"position": {"step": 7}}, {"lr": 0.5})
    assert (found.uri, found.is_own, found.has_random) == (
        f"{open_storage(uri).uri}/step-00000007",
        True,
        True,
    )
    assert same(model.state_dict(), pair[0].state_dict())
    assert same(optimizer.state_dict(), pair[1].state_dict())
    assert torch.equal(torch.rand(3), drawn)


def test_the_manifest_describes_run_state_and_files(uri: str, context: Context) -> None:
    save(checkpoints_at(uri, context), 7, model_and_optimizer(), {"epoch": 2})
    storage = open_storage(uri)
    manifest = Manifest.from_json(storage.read("step-00000007", MANIFEST_FILE) or b"")
    assert (manifest.run, manifest.step, manifest.code, manifest.request) == (
        "demo",
        7,
        "c0de",
        "1d",
    )
    assert (manifest.world_size, manifest.mesh, manifest.rng["ranks"]) == (1, {"data": 1}, 1)
    assert manifest.state == {"epoch": 2}
    sizes = storage.folders()["step-00000007"]
    assert {name: file.bytes for name, file in manifest.files.items()} == {
        name: size for name, size in sizes.items() if name not in (MANIFEST_FILE, "writer.json")
    }
    assert list(find_damage(storage, "step-00000007", manifest.files)) == []


def test_plain_dcp_reads_a_checkpoint(context: Context, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    model, optimizer = model_and_optimizer()
    save(checkpoints_at(str(tmp_path / "c"), context), 1, (model, optimizer))
    states = {
        "model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    }
    load(states, storage_reader=FileSystemReader(tmp_path / "c" / "step-00000001"))
    assert same(states["model"], dict(model.state_dict()))


def test_later_steps_do_not_change_a_save_in_progress(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint holds the state at its step, even if training continues before the files are written."""
    storage = _BlockedStorage(tmp_path / "c")
    checkpoints = checkpoints_in(storage, context, monkeypatch)
    pair = model_and_optimizer()
    before = {name: value.clone() for name, value in pair[0].state_dict().items()}
    assert checkpoints.save(1, pair[0], [pair[1]], {}, {})
    for _ in range(3):
        train_a_step(pair)  # batch norm changes its buffers, the optimizer changes the parameters
    assert not same(dict(pair[0].state_dict()), before)
    assert steps_at(str(tmp_path / "c")) == []
    storage.unblocked.set()
    assert checkpoints.wait_for_save()
    _, (model, _) = resumed(checkpoints_at(str(tmp_path / "c"), context))
    assert same(dict(model.state_dict()), before)


class _BlockedStorage(FolderStorage):
    """Storage whose writes block until `unblocked` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.unblocked = threading.Event()

    def create(self, folder: str, file: str) -> Any:
        assert self.unblocked.wait(60)
        return super().create(folder, file)


def test_saves_that_a_slow_save_delays_are_missed(
    context: Context,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cloudtrain_runtime.checkpoint.saving._PREVIOUS_SAVE_SECONDS", 0.01)
    storage = _BlockedStorage(tmp_path / "c")
    checkpoints = checkpoints_in(storage, context, monkeypatch)
    model, optimizer = model_and_optimizer()
    assert checkpoints.save(1, model, [optimizer], {}, {})
    for step in (2, 3, 4):
        assert not checkpoints.save(step, model, [optimizer], {}, {})
    storage.unblocked.set()
    assert checkpoints.wait_for_save()
    save(checkpoints, 5, (model, optimizer))
    events = [event for line in capfd.readouterr().out.splitlines() if (event := parse_event(line))]
    missed = [
        (event["step"], event["missed"], event["alarm"])
        for event in events
        if event["event"] == "checkpoint_missed"
    ]
    assert missed == [(2, 1, False), (3, 2, False), (4, 3, True)]
    assert {event["reason"] for event in events if event["event"] == "checkpoint_missed"} <= {
        "late",
        "stalled",
    }
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [1, 5]


def test_a_failed_save_is_reported_and_the_next_succeeds(
    context: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = checkpoints_at(str(tmp_path / "c"), context)
    model, optimizer = model_and_optimizer()
    (tmp_path / "c").write_text("a file where the folder should be")
    assert not checkpoints.save(1, model, [optimizer], {}, {}, wait=True)
    train_a_step((model, optimizer))
    (tmp_path / "c").unlink()
    save(checkpoints, 2, (model, optimizer))
    out = capfd.readouterr().out
    (event,) = [
        event
        for line in out.splitlines()
        if (event := parse_event(line)) and event["event"] == "checkpoint_missed"
    ]
    assert (event["step"], event["reason"], event["missed"]) == (1, "failed", 1)
    assert (
        "rank 0: NotADirectoryError" in event["detail"]
        or "rank 0: FileExistsError" in event["detail"]
    )


def test_a_failure_of_saves_is_reported_once(
    context: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoints = checkpoints_at(str(tmp_path / "c"), context)
    model, optimizer = model_and_optimizer()
    (tmp_path / "c").write_text("a file where the folder should be")
    for step in range(1, 6):
        assert not checkpoints.save(step, model, [optimizer], {}, {}, wait=True)
    (tmp_path / "c").unlink()
    save(checkpoints, 6, (model, optimizer))
    (tmp_path / "c").rename(tmp_path / "moved")
    (tmp_path / "c").write_text("again")
    assert not checkpoints.save(7, model, [optimizer], {}, {}, wait=True)
    out = capfd.readouterr().out.splitlines()
    missed = [
        event
        for line in out
        if (event := parse_event(line)) and event["event"] == "checkpoint_missed"
    ]
    # The first failure, the alarm, and the first failure after a complete checkpoint.
    assert [event["step"] for event in missed if not event["repeated"]] == [1, 3, 7]
    assert [event["missed"] for event in missed] == [1, 2, 3, 4, 5, 1]
    assert not [line for line in out if "no checkpoint" in line]


def test_a_run_that_completed_no_due_checkpoint_fails(context: Context, tmp_path: Path) -> None:
    checkpoints = checkpoints_at(str(tmp_path / "c"), context)
    model, optimizer = model_and_optimizer()
    checkpoints.require_completed()  # no checkpoint was due
    (tmp_path / "c").write_text("a file where the folder should be")
    assert not checkpoints.save(1, model, [optimizer], {}, {}, wait=True)
    with pytest.raises(
        CheckpointError, match=r"none of this run's checkpoints was completed .* step 1 \(failed\)"
    ):
        checkpoints.require_completed()
    (tmp_path / "c").unlink()
    save(checkpoints, 2, (model, optimizer))
    checkpoints.require_completed()


def test_several_hosts_cannot_save_to_their_local_disks(context: Context) -> None:
    hosts = replace(context, hosts=("algo-1", "algo-2"))
    with pytest.raises(CheckpointError, match="a local disk of each host, so 2 hosts cannot save"):
        checkpoints_at("", hosts)


def test_only_the_newest_checkpoints_are_kept(uri: str, context: Context) -> None:
    checkpoints = checkpoints_at(uri, context, keep=2)
    pair = model_and_optimizer()
    for step in (1, 2, 3, 4):
        save(checkpoints, step, pair)
    assert steps_at(uri) == [3, 4]
    assert list(open_storage(uri).folders()) == ["step-00000003", "step-00000004"]


def test_unfinished_checkpoints_expire_like_complete_ones(uri: str, context: Context) -> None:
    """An attempt that was killed during a save leaves files. They are deleted after a newer checkpoint completes."""
    storage = open_storage(uri)
    folder = storage.reserve(2, {"run": "demo", "attempt": "0a1b2c3d"})
    with storage.create(folder, "__0_0.distcp") as writer:
        writer.write(b"x" * 1000)
    assert [record.state for record in list_checkpoints(storage)] == ["unfinished"]
    checkpoints = checkpoints_at(uri, context, keep=1)
    pair = model_and_optimizer()
    save(checkpoints, 1, pair)
    assert (
        folder in storage.folders()
    )  # newer than every complete checkpoint: another process may still write to it
    save(checkpoints, 3, pair)
    assert list(storage.folders()) == ["step-00000003"]


def test_retention_keeps_the_checkpoints_of_other_runs(uri: str, context: Context) -> None:
    pair = model_and_optimizer()
    save(checkpoints_at(uri, replace(context, run="other"), keep=1), 5, pair)
    own = checkpoints_at(uri, context, keep=1, resume="never")
    for step in (6, 7):
        save(own, step, pair)
    assert steps_at(uri) == [5, 7]


def test_unreadable_new_checkpoint_deletes_no_old_one(
    context: Context,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = model_and_optimizer()
    storage = _FlippingStorage(tmp_path / "c")
    checkpoints = checkpoints_in(storage, context, monkeypatch, keep=1)
    save(checkpoints, 1, pair)
    storage.is_flipping = True
    assert not checkpoints.save(2, pair[0], [pair[1]], {}, {}, wait=True)
    verdicts = {
        record.step: record.state for record in list_checkpoints(open_storage(str(tmp_path / "c")))
    }
    assert verdicts == {1: "complete", 2: "damaged"}
    assert '"event": "checkpoint_damaged"' in capfd.readouterr().out


class _FlippingStorage(FolderStorage):
    """Storage that flips a bit of the tensors before each commit, while `is_flipping` is set."""

    is_flipping = False

    def commit(self, folder: str, manifest: str) -> str:
        if self.is_flipping:
            flip_bit(self.root / folder / "__0_0.distcp")
        return super().commit(folder, manifest)


@pytest.mark.parametrize(
    "damage", ["no manifest", "torn manifest", "gone", "shorter", "longer", "flipped", "metadata"]
)
def test_damaged_checkpoint_falls_back_to_the_previous_one(
    damage: str, context: Context, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = (tmp_path / "c").as_uri()
    pair = model_and_optimizer()
    for step in (1, 2):
        save(checkpoints_at(uri, context, keep=5), step, pair)
    newest = path_of(uri) / "step-00000002"
    damage_checkpoint(newest, damage)
    checkpoints = checkpoints_at(uri, context, keep=1)
    found, (model, _) = resumed(checkpoints)
    assert found.step == 1
    assert same(dict(model.state_dict()), dict(pair[0].state_dict()))
    out = capfd.readouterr().out
    assert "step-00000002" in out
    # The damaged checkpoint is kept, and its step can be saved again in another folder.
    save(checkpoints, 2, pair)
    again, _ = resumed(checkpoints_at(uri, context))
    assert again.step == 2
    assert again.uri != newest.as_uri()
    assert newest.is_dir()
    save(checkpoints, 3, pair)
    assert newest.is_dir() == (
        damage != "no manifest"
    )  # damaged checkpoints are kept as evidence, unfinished are not


def damage_checkpoint(folder: Path, damage: str) -> None:
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    actions: dict[str, Callable[[], Any]] = {
        "no manifest": (folder / MANIFEST_FILE).unlink,
        "torn manifest": lambda: (folder / MANIFEST_FILE).write_text(
            (folder / MANIFEST_FILE).read_text()[:40]
        ),
        "gone": data.unlink,
        "shorter": lambda: data.write_bytes(content[:-1]),
        "longer": lambda: data.write_bytes(content + b"x"),
        "flipped": lambda: flip_bit(data),
        "metadata": lambda: flip_bit(folder / ".metadata"),
    }
    actions[damage]()


def test_each_flipped_byte_is_found(context: Context, tmp_path: Path) -> None:
    """Plain DCP and torch.load accept nearly all of these changes without an error."""
    save(checkpoints_at(str(tmp_path / "c"), context), 1, model_and_optimizer())
    folder = tmp_path / "c" / "step-00000001"
    data = folder / "__0_0.distcp"
    storage, original = FolderStorage(tmp_path / "c"), data.read_bytes()
    manifest = Manifest.from_json((folder / MANIFEST_FILE).read_text())
    for position in range(0, len(original), max(1, len(original) // 60)):
        content = bytearray(original)
        content[position] ^= 0x10
        data.write_bytes(content)
        assert list(find_damage(storage, "step-00000001", manifest.files)), position


@pytest.mark.aws
def test_a_flipped_byte_in_s3_marks_the_checkpoint_damaged(
    aws: dict[str, str], context: Context
) -> None:
    import boto3

    uri = "s3://cloudtrain-test/some/checkpoints"
    pair = model_and_optimizer()
    for step in (1, 2):
        save(checkpoints_at(uri, context), step, pair)
    s3, key = boto3.client("s3"), "some/checkpoints/step-00000002/__0_0.distcp"
    content = bytearray(s3.get_object(Bucket="cloudtrain-test", Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    s3.put_object(Bucket="cloudtrain-test", Key=key, Body=bytes(content))
    assert resumed(checkpoints_at(uri, context))[0].step == 1
    (record,) = [record for record in list_checkpoints(open_storage(uri)) if record.step == 2]
    assert record.state == "damaged"
    assert "has changed since it was written" in record.why
    assert DAMAGED_FILE in open_storage(uri).sizes(record.name)


def test_run_with_only_damaged_checkpoints_does_not_restart(
    context: Context, tmp_path: Path
) -> None:
    uri = str(tmp_path / "c")
    save(checkpoints_at(uri, context), 1, model_and_optimizer())
    flip_bit(tmp_path / "c" / "step-00000001" / "__0_0.distcp")
    for _ in range(2):  # the first attempt detects the damage, the second one reads the damage mark
        with pytest.raises(CheckpointError, match=r"every checkpoint at .* is damaged"):
            resumed(checkpoints_at(uri, context))


def test_resume_never_still_uses_the_runs_own_checkpoints(uri: str, context: Context) -> None:
    pair = model_and_optimizer()
    save(checkpoints_at(uri, replace(context, run="other")), 9, pair)
    assert resumed(checkpoints_at(uri, context, resume="never"))[0].uri is None
    save(checkpoints_at(uri, context, resume="never"), 5, pair)
    assert resumed(checkpoints_at(uri, context, resume="never"))[0].step == 5


def test_resuming_from_another_run_keeps_its_checkpoints(
    uri: str, context: Context, tmp_path: Path
) -> None:
    pair = model_and_optimizer()
    other = checkpoints_at(uri, replace(context, run="other"))
    for step in (4, 5):
        save(other, step, pair)
    second = (tmp_path / "second").as_uri()
    found, _ = resumed(checkpoints_at(second, context, resume=uri))
    assert (found.step, found.is_own) == (5, False)
    assert resumed(checkpoints_at(second, context, resume=f"{uri}/step-00000004"))[0].step == 4
    save(checkpoints_at(second, context, resume=uri, keep=1), 6, pair)
    assert (
        resumed(checkpoints_at(second, context, resume=uri))[0].step == 6
    )  # after a restart its own is preferred
    assert steps_at(uri) == [4, 5]


def test_resume_run_selects_a_run_in_a_shared_folder(context: Context, tmp_path: Path) -> None:
    uri, pair = str(tmp_path / "c"), model_and_optimizer()
    save(checkpoints_at(uri, replace(context, run="first")), 3, pair)
    save(checkpoints_at(uri, replace(context, run="second")), 9, pair)
    found, _ = resumed(checkpoints_at(uri, context, resume=uri, resume_run="first"))
    assert found.step == 3


def test_resuming_from_an_empty_location_is_an_error(context: Context, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint at"):
        resumed(
            checkpoints_at(
                (tmp_path / "own").as_uri(), context, resume=(tmp_path / "other").as_uri()
            )
        )


def test_a_checkpoint_of_another_model_is_rejected(context: Context, tmp_path: Path) -> None:
    checkpoints = checkpoints_at((tmp_path / "c").as_uri(), context)
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
        with pytest.raises(
            CheckpointError, match=f"step-00000001 does not fit this model: {reason}"
        ):
            checkpoints.resume(other, [torch.optim.AdamW(other.parameters())])


def test_two_writers_of_one_step_share_no_files(uri: str) -> None:
    """A process of an old attempt resumes writing during the save of a new attempt."""
    storage = open_storage(uri)
    old, new = ({"run": "demo", "attempt": attempt} for attempt in ("aaaaaaaa", "bbbbbbbb"))
    first, second = storage.reserve(4, old), storage.reserve(4, new)
    assert first != second
    for folder, content in ((first, b"old"), (second, b"new")):
        with storage.create(folder, "__0_0.distcp") as writer:
            writer.write(content)
    names = [
        storage.commit(second, json.dumps({"by": "new"})),
        storage.commit(first, json.dumps({"by": "old"})),
    ]
    assert min(names) == checkpoint_folder_name(4)
    assert {storage.read(name, "__0_0.distcp") for name in names} == {b"old", b"new"}
    assert [json.loads(storage.read(name, MANIFEST_FILE) or b"")["by"] for name in names] == [
        "new",
        "old",
    ]


def test_no_checkpoint_is_listed_before_its_manifest_exists(uri: str) -> None:
    storage = open_storage(uri)
    folder = storage.reserve(1, {"run": "demo", "attempt": "aaaaaaaa"})
    with storage.create(folder, "__0_0.distcp") as writer:
        writer.write(b"x" * 10)
    assert steps_at(uri) == []
