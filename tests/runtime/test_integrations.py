"""Parts of the integrations: which checkpoints count as complete, which are kept, and the position in a DataLoader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_manifest
from torch.utils.data import DataLoader, IterableDataset

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.checkpoint.listing import list_checkpoints
from cloudtrain_runtime.checkpoint.retention import expired_folders
from cloudtrain_runtime.checkpoint.step_boundary import BoundaryDecision
from cloudtrain_runtime.checkpoint.storage import WRITER_FILE, FolderStorage
from cloudtrain_runtime.checkpoint.trainer_format import list_trainer_checkpoints
from cloudtrain_runtime.contract import CheckpointConfig, MlTree
from cloudtrain_runtime.contract.manifest import checkpoint_folder_name
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.integrations.checkpoint_folder import MARKER, CheckpointFolder
from cloudtrain_runtime.integrations.data_position import DataPosition
from cloudtrain_runtime.integrations.run_control import RunControl
from cloudtrain_runtime.process.run_context import context

CONFIG = CheckpointConfig(uri="", every_seconds=None, every_steps=10, keep=2, resume="auto")


def folder_of(path: Path, run: str = "first", **changes: Any) -> CheckpointFolder:
    return CheckpointFolder(
        replace(context(), run=run, checkpoint_dir=path), replace(CONFIG, **changes)
    )


def save(folder: CheckpointFolder, step: int, text: str = "weights") -> Path:
    path = folder.path(step)
    folder.begin(step)
    (path / "sub").mkdir()
    (path / "model.bin").write_bytes(text.encode() * 100_000)
    (path / "sub" / "state.json").write_text(f"{step}")
    folder.finish(step)
    return path


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for step in (5, 10, 100):
        save(folder, step)
    assert folder.complete_steps() == [10, 100]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-100",
    ]
    folder.path(200).mkdir()
    (folder.path(200) / "model.bin").touch()
    folder.finish(200, kept=[folder.path(10)])
    assert folder.complete_steps() == [10, 100, 200]


@pytest.mark.parametrize(
    "damage", ["no marker", "no file", "short file", "other save", "no list", "wrong list"]
)
def test_an_incomplete_checkpoint_is_not_used(tmp_path: Path, damage: str) -> None:
    folder = folder_of(tmp_path)
    save(folder, 10)
    newest = save(folder, 20)
    marker, file = newest / MARKER, newest / "model.bin"
    if damage == "no marker":
        marker.unlink()
    elif damage == "no file":
        (newest / "sub" / "state.json").unlink()
    elif damage == "short file":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "other save":  # of the same size
        file.write_bytes(b"WEIGHTS" * 100_000)
    else:
        marker.write_text(
            "[" if damage == "no list" else '{"run": "first", "step": 20, "files": [{"path": 3}]}'
        )
    assert folder.newest_step() == 10
    folder.prepare(10)
    # Without our file it may be another program's.
    assert newest.exists() == (damage == "no marker")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_both_formats_keep_and_delete_the_same(tmp_path: Path, keep: int) -> None:
    """Only complete checkpoints count; damaged ones stay; unfinished ones go with the complete ones before them."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    unfinished, damaged = (5, 35), (20,)
    trainer = folder_of(theirs, keep=9)
    for step in (5, 10, 20, 30, 35, 40):
        saved = ours / checkpoint_folder_name(step)
        saved.mkdir(parents=True)
        (saved / "model.bin").write_text("weights")
        if step in unfinished:
            (saved / WRITER_FILE).write_text('{"run": "first"}')
        else:
            write_manifest(saved, run="first", step=step)
            save(trainer, step)
        if step in damaged:
            (saved / "model.bin").write_text("short")
            (trainer.path(step) / "model.bin").write_text("short")
    for step in unfinished:
        trainer.begin(step)

    storage = FolderStorage(ours)
    states = [each.state for each in list_checkpoints(storage)]
    assert states == [each.state for each in list_trainer_checkpoints(FolderStorage(theirs))]
    assert {each.run for each in list_trainer_checkpoints(FolderStorage(theirs))} == {"first"}
    expired = expired_folders(storage, run="first", step=40, keep=keep, state={})
    left = {each.step for each in list_checkpoints(storage) if each.name not in expired}
    resumed = folder_of(theirs, keep=keep)
    assert resumed.newest_step() == 40
    resumed.prepare(40)
    resumed.finish(40)
    assert {int(path.name.rpartition("-")[2]) for path in theirs.iterdir()} == left
    assert left == {1: {20, 40}, 2: {20, 30, 35, 40}, 3: {10, 20, 30, 35, 40}}[keep]


def test_a_list_of_another_step_is_damaged_in_both_formats(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, 10).rename(folder.path(20))
    own = tmp_path / checkpoint_folder_name(20)
    own.mkdir()
    write_manifest(own, step=10)
    storage = FolderStorage(tmp_path)
    found = [*list_checkpoints(storage), *list_trainer_checkpoints(storage)]
    assert [(each.state, each.why) for each in found] == [
        ("damaged", "manifest.json is of step 10"),
        ("damaged", "cloudtrain.json is of step 10"),
    ]
    assert folder_of(tmp_path).newest_step() is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_list_that_cannot_be_read_stops_the_run(tmp_path: Path) -> None:
    """A failing disk may hold the run's checkpoints, so the run does not start from the beginning."""
    folder = folder_of(tmp_path)
    (save(folder, 10) / MARKER).chmod(0)
    with pytest.raises(CheckpointError, match="its checkpoints cannot be listed"):
        folder_of(tmp_path).newest_step()


def test_folders_of_other_programs_are_kept(tmp_path: Path) -> None:
    for step in (5, 20, 900):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "model.bin").write_text("theirs")
    folder = folder_of(tmp_path, keep=1)
    folder.begin(15)  # and an attempt that was killed while it saved
    folder.prepare(0)
    for step in (10, 20, 30):
        save(folder, step)
    kept = {path.parent.name for path in tmp_path.glob("*/model.bin")}
    assert kept == {"checkpoint-5", "checkpoint-20.other-1", "checkpoint-30", "checkpoint-900"}
    assert not folder.path(15).exists()
    assert (tmp_path / "checkpoint-20.other-1" / "model.bin").read_text() == "theirs"


def test_an_unfinished_checkpoint_of_another_run_is_kept(tmp_path: Path) -> None:
    folder_of(tmp_path, "other").begin(40)
    never = folder_of(tmp_path, resume="never")
    never.prepare(0)
    assert never.path(40).exists()
    folder_of(tmp_path).prepare(0)
    assert not never.path(40).exists()


@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.aws)])
def test_checkpoints_of_trainers_are_listed(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    folder = folder_of(tmp_path / "saved", keep=9)
    saved = {step: save(folder, step) for step in (10, 20, 30, 40, 50)}
    (saved[20] / "model.bin").write_bytes(b"short")
    (saved[30] / "sub" / "state.json").unlink()
    (saved[40] / MARKER).unlink()
    (saved[50] / MARKER).write_text(
        '{"run": "first", "step": 50, "files": [{"path": "model.bin", "fingerprints": [[]]}]}'
    )
    (tmp_path / "saved" / "lightning").mkdir()  # other files of a script
    uri = (tmp_path / "saved").as_uri()
    if place == "s3":
        request.getfixturevalue("aws")
        uri = upload(tmp_path / "saved")
    found = {each.step: each for each in Inspection(uri).of_trainers()}
    assert list(found) == [50, 40, 30, 20, 10]
    assert [each.state for each in found.values()] == [
        "damaged",
        "unfinished",
        "damaged",
        "damaged",
        "complete",
    ]
    assert found[20].why == "model.bin has 5 bytes instead of 700000"
    assert found[30].why == "sub/state.json is missing"
    assert found[10].uri == f"{uri}/checkpoint-10"
    sizes = [path.stat().st_size for path in saved[10].rglob("*") if path.is_file()]
    assert (found[10].run, found[10].bytes, found[10].files) == ("first", sum(sizes), 3)
    assert Inspection(uri).entries == (), (
        "they are not found for a resume, which the trainer itself chooses"
    )


def upload(root: Path) -> str:
    import boto3

    for path in root.rglob("*"):
        if path.is_file():
            boto3.client("s3").upload_file(
                str(path), "cloudtrain-test", f"runs/trainer/{path.relative_to(root)}"
            )
    return "s3://cloudtrain-test/runs/trainer"


def test_checkpoints_of_other_runs_are_used_as_asked(tmp_path: Path) -> None:
    save(folder_of(tmp_path, "first"), 10)
    save(folder_of(tmp_path, "second"), 20)
    assert folder_of(tmp_path, "third").newest_step() == 20
    assert folder_of(tmp_path, "third", resume="file:///x", resume_run="first").newest_step() == 10
    never = folder_of(tmp_path, "third", resume="never")
    assert never.newest_step() is None
    with pytest.raises(
        CheckpointError, match="step 10 of run first, which this run would overwrite"
    ):
        never.prepare(0)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.parametrize(
    ("every_steps", "every_seconds", "saved"),
    [(2, None, [2, 4]), (None, 0.0, [1, 2, 3, 4]), (None, 3600.0, []), (3, 3600.0, [3])],
)
def test_a_save_is_due_by_steps_or_by_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    every_steps: int | None,
    every_seconds: float | None,
    saved: list[int],
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_ML_ROOT", str(tmp_path))
    control = RunControl(
        context(), replace(CONFIG, every_steps=every_steps, every_seconds=every_seconds)
    )
    assert [step for step in range(1, 5) if control.decide(step).save] == saved
    assert not control.decide(5).stop
    tree = MlTree(tmp_path)
    tree.stop_notice.parent.mkdir()
    tree.stop_notice.touch()
    assert control.decide(7) == BoundaryDecision(save=True, stop=True)


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40).tolist())


class Draws:
    """An epoch's batches, and a random number that is drawn after each, as dropout does."""

    def __init__(self, kind: str, workers: int, has_generator: bool) -> None:
        options: dict[str, Any] = {"num_workers": workers, "batch_size": 4}
        options["generator"] = torch.Generator().manual_seed(5) if has_generator else None
        if kind == "single samples":
            options["batch_size"] = None
        if kind == "persistent":
            options["persistent_workers"] = workers > 0
        if kind == "stream":
            loader: DataLoader[int] = DataLoader(Shuffled(), **options)
        else:
            loader = DataLoader(range(40), shuffle=True, **options)  # type: ignore[arg-type]
        self.batches = 40 if kind == "single samples" else 10
        self.position = DataPosition(context())
        self.loader: Any = self.position.follow(loader)
        assert isinstance(self.loader, DataLoader)

    def run(
        self, first: int = 0, skipped: int = 0, stop: tuple[int, int] | None = None
    ) -> list[Any]:
        found = []
        for epoch in range(first, 3):
            batches = iter(self.loader)
            self.position.settle()
            for number in range(1 + (skipped if epoch == first else 0), self.batches + 1):
                found.append((epoch, torch.as_tensor(next(batches)).tolist(), torch.rand(1).item()))
                if (epoch, number) == stop:
                    return found
        return found


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("batches", 0), ("batches", 2), ("single samples", 0), ("persistent", 2), ("stream", 0)],
)
def test_a_loader_continues_at_its_position(kind: str, workers: int, has_generator: bool) -> None:
    torch.manual_seed(0)
    expected = Draws(kind, workers, has_generator).run()
    for epoch, batches in ((0, 3), (1, 3), (2, 0)):
        torch.manual_seed(0)
        stopped = Draws(kind, workers, has_generator)
        before = stopped.run(stop=(epoch, batches) if batches else (epoch - 1, stopped.batches))
        state = stopped.position.state(epoch, batches)
        torch.manual_seed(9)
        resumed = Draws(kind, workers, has_generator)
        resumed.position.resume(state)
        assert before + resumed.run(epoch, batches) == expected


def test_loaders_without_a_position_are_recognised() -> None:
    position = DataPosition(context())
    assert position.follow([1, 2]) == [1, 2]
    assert not position.is_exact
    position = DataPosition(context())
    for _ in range(2):
        position.follow(DataLoader(range(4)))  # type: ignore[arg-type]
    assert not position.is_exact
