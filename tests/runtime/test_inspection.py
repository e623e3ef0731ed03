"""Listing, finding, verifying and exporting checkpoints in a folder and in S3."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    BLOCK_BYTES,
    RUN,
    flip,
    save_bytes,
    save_ranks,
    write_manifest,
)

import cloudtrain_runtime
from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.contract.saved_checkpoint import SavedCheckpoint
from cloudtrain_runtime.errors import CheckpointError, DamagedError


def ignore(event: Mapping[str, Any]) -> None:
    del event


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with checkpoints in every state."""
    root = tmp_path / "some checkpoints"
    for step in (100, 200, 300):
        save_bytes(root, step)
    save_bytes(root, 300, attempt="11112222", run="other-261120-101500-1a2b3c")
    (save_bytes(root, 400) / "manifest.json").unlink()
    (root / "step-00000400" / "writer.json").write_text(
        json.dumps({"run": RUN, "attempt": "0a1b2c3d"})
    )
    (save_bytes(root, 500) / "__1_0.distcp").write_bytes(b"short")
    (save_bytes(root, 600) / "manifest.json").write_text('{"version": 1}')
    (save_bytes(root, 700) / "damaged.json").write_text('{"why": ["a bit has flipped"]}')
    (root / "notes").mkdir()
    return root


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.aws)])
def uri(request: pytest.FixtureRequest, root: Path) -> str:
    """The uri of these checkpoints, in a folder or in S3."""
    if request.param == "folder":
        return root.as_uri()
    request.getfixturevalue("aws")
    return upload(root)


def upload(root: Path) -> str:
    import boto3

    client = boto3.client("s3")
    for path in root.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "cloudtrain-test", f"runs/saved/{path.relative_to(root)}")
    return "s3://cloudtrain-test/runs/saved"


def brief(entries: tuple[SavedCheckpoint, ...]) -> list[tuple[str, str]]:
    return [(entry.name, entry.state) for entry in entries]


def test_a_list_shows_every_state_with_its_reason(uri: str) -> None:
    entries = Inspection(uri).entries
    assert brief(entries) == [
        ("step-00000700", "damaged"),
        ("step-00000600", "damaged"),
        ("step-00000500", "damaged"),
        ("step-00000400", "unfinished"),
        *sorted(
            [("step-00000300", "complete"), ("step-00000300-11112222", "complete")],
            key=lambda pair: [entry.name for entry in entries].index(pair[0]),
        ),
        ("step-00000200", "complete"),
        ("step-00000100", "complete"),
    ]
    why = {entry.step: entry.why for entry in entries}
    assert why[700] == "a bit has flipped"
    assert why[600] == "manifest.json has version 1; expected 2"
    assert why[500] == "__1_0.distcp has 5 bytes instead of 100"
    assert why[400] == "it was never finished"
    assert why[100] == ""
    oldest, unfinished = entries[-1], entries[3]
    assert (oldest.run, oldest.time, oldest.world_size, oldest.torch) == (
        RUN,
        1_000_100.0,
        2,
        "2.13.0",
    )
    assert oldest.files == 4
    assert oldest.bytes > 3 * BLOCK_BYTES
    assert oldest.uri == f"{uri}/step-00000100"
    assert unfinished.run == RUN, "writer.json names the run of an unfinished checkpoint"


def test_a_checkpoint_that_is_being_written_is_unfinished(root: Path) -> None:
    (root / "step-00000100").rename(root / ".writing-step-00000800-0a1b2c3d")
    newest = Inspection(str(root)).entries[0]
    assert (newest.step, newest.state) == (800, "unfinished"), (
        "also with a manifest, until the folder is renamed"
    )


def test_a_uri_may_name_a_single_checkpoint(uri: str) -> None:
    assert brief(Inspection(f"{uri}/step-00000200/").entries) == [("step-00000200", "complete")]
    assert Inspection(f"{uri}/step-00000200").find().step == 200
    with pytest.raises(
        CheckpointError, match=r"of step 400 at .*400 is unfinished: .* complete: 300$"
    ):
        Inspection(f"{uri}/step-00000400").find()


def test_a_missing_folder_has_no_checkpoints() -> None:
    assert Inspection("/nowhere").entries == ()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint at file:///nowhere$"):
        Inspection("/nowhere").find()


def test_find_selects_by_step_and_run(uri: str) -> None:
    found = Inspection(uri)
    assert found.find().step == 300
    assert found.find(run=RUN).name == "step-00000300"
    assert found.find(300, "other-261120-101500-1a2b3c").name == "step-00000300-11112222"
    assert found.find(200).step == 200
    with pytest.raises(
        CheckpointError, match=r"step 250 at .*; the nearest complete: 200 and 300$"
    ):
        found.find(250)
    with pytest.raises(
        CheckpointError, match=r"step 700 at .* is damaged: a bit has flipped; the nearest"
    ):
        found.find(700)
    with pytest.raises(
        CheckpointError, match=r"step 100 of other-\S+ at .*; there are those of demo-\S+;"
    ):
        found.find(100, "other-261120-101500-1a2b3c")
    with pytest.raises(CheckpointError, match=r"of new at .*; there are those of demo-\S+, other-"):
        found.find(run="new")


def test_undamaged_checkpoints_are_verified(uri: str) -> None:
    progress: list[Mapping[str, Any]] = []
    verified = Inspection(uri).verify(progress.append, 300)
    assert [entry.state for entry in verified] == ["complete", "complete"]
    assert progress[-1]["done"] == progress[-1]["total"] > 6 * BLOCK_BYTES
    with pytest.raises(CheckpointError, match="nearest complete: 300"):
        Inspection(uri).verify(ignore, 400)
    with pytest.raises(CheckpointError, match="nearest complete: 100 and 200"):
        Inspection(uri).verify(ignore, 150)


@pytest.mark.parametrize("at", [0, BLOCK_BYTES, 3 * BLOCK_BYTES + 16])
def test_verify_finds_one_changed_bit_at_any_offset(root: Path, at: int) -> None:
    flip(root / "step-00000200" / "__0_0.distcp", at)
    assert Inspection(str(root)).find(200).state == "complete", "listing reads no data files"
    states = {entry.name: entry for entry in Inspection(str(root)).verify(ignore)}
    assert states["step-00000200"].state == "damaged"
    assert "__0_0.distcp" in states["step-00000200"].why
    assert states["step-00000100"].state == "complete"
    assert not (root / "step-00000200" / "damaged.json").exists(), "verifying changes no files"


def test_every_damaged_file_is_named(root: Path) -> None:
    flip(root / "step-00000200" / "__0_0.distcp", 1)
    flip(root / "step-00000200" / "__1_0.distcp", 1)
    (entry,) = Inspection(str(root)).verify(ignore, 200)
    assert "__0_0.distcp" in entry.why
    assert "__1_0.distcp" in entry.why


def test_a_checkpoint_deleted_meanwhile_is_not_damaged(root: Path) -> None:
    found = Inspection(str(root))
    (root / "step-00000100").rename(root / ".deleting-step-00000100-1")
    assert [entry.step for entry in found.verify(ignore, 100)] == []


@pytest.fixture(
    scope="module", params=[("fsdp", 2), ("ddp", 2), ("plain", 1)], ids=lambda param: param[0]
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint that real ranks have written."""
    kind, ranks = request.param
    if kind == "fsdp" and torch.__version__ < "2.6":
        pytest.skip("torch.distributed.fsdp has fully_shard from torch 2.6 on")
    folder = tmp_path_factory.mktemp(kind) / "step-00000042"
    save_ranks(folder, kind, ranks)
    write_manifest(folder, block_bytes=BLOCK_BYTES)
    return folder


def expected_weights() -> dict[str, torch.Tensor]:
    """Return the weights that `support.checkpoints.save_ranks` saves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 40)).sum().backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.processes
def test_weights_of_any_layout_are_exported_to_one_file(trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = Inspection(str(trained))
    done = found.export(found.find(), tmp_path / "new" / "model.pt", form="torch", part="model")
    state = torch.load(tmp_path / "new" / "model.pt", weights_only=True)
    torch.testing.assert_close(state, dict(expected_weights()), rtol=1e-5, atol=1e-6)
    assert (done["tensors"], done["elements"], done["skipped"]) == (4, 2407, [])
    found.export(found.find(), tmp_path / "model.safetensors", form="safetensors", part="model")
    same = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(same[name], value) for name, value in state.items())
    assert not list(tmp_path.rglob("*partial"))


@pytest.mark.processes
def test_an_export_of_all_parts_has_every_entry(trained: Path, tmp_path: Path) -> None:
    found = Inspection(str(trained))
    found.export(found.find(), tmp_path / "all.pt", form="torch", part="all")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(state) == {"model", "optimizer", "objects", "rng"}
    assert state["objects"]["schedule"]["last_epoch"] == 3
    assert state["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (50, 40)
    done = found.export(found.find(), tmp_path / "all.safetensors", form="safetensors", part="all")
    assert any("last_epoch" in name for name in done["skipped"])


@pytest.mark.processes
def test_a_damaged_checkpoint_is_not_exported(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / trained.name
    copy.mkdir()
    for path in trained.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    largest = max(copy.glob("*.distcp"), key=lambda path: path.stat().st_size)
    for at in range(0, largest.stat().st_size, 500):
        flip(largest, at)
    found = Inspection(str(copy))
    with pytest.raises(DamagedError, match="distcp"):
        found.export(found.find(), tmp_path / "model.pt", form="torch", part="model")
    assert not (tmp_path / "model.pt").exists()
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated"
)  # a warning of torch 2.5 about its own code
def test_a_checkpoint_without_a_model_is_not_exported(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemWriter, save

    folder = tmp_path / "step-00000001"
    with pytest.warns(UserWarning, match="single process"):
        save({"optimizer": {"x": torch.ones(2)}}, storage_writer=FileSystemWriter(folder))
    write_manifest(folder)
    found = Inspection(str(tmp_path))
    with pytest.raises(CheckpointError, match="holds no model"):
        found.export(found.find(), tmp_path / "model.pt", form="torch", part="model")


def run_inspection(*arguments: str) -> list[dict[str, Any]]:
    """Run `python -m cloudtrain_runtime.checkpoint.inspection`; return its output lines, parsed."""
    command = [sys.executable, "-m", "cloudtrain_runtime.checkpoint.inspection", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_program_prints_progress_and_then_its_result(root: Path) -> None:
    *progress, result = run_inspection("verify", str(root), "--step", "100")
    assert {event["event"] for event in progress} == {"progress"}
    assert [entry["state"] for entry in result["checkpoints"]] == ["complete"]
    (error,) = run_inspection("find", str(root), "--step", "1")
    assert (error["event"], error["kind"]) == ("error", "input")


def test_listing_imports_no_torch(root: Path) -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', 'list', sys.argv[1]]\n"
        "try: runpy.run_module('cloudtrain_runtime.checkpoint.inspection', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'cloudtrain', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_verify_without_torch_reports_the_missing_check(root: Path, tmp_path: Path) -> None:
    (tmp_path / "isolated").mkdir()
    (tmp_path / "isolated" / "cloudtrain_runtime").symlink_to(
        Path(str(cloudtrain_runtime.__file__)).parent
    )
    code = (
        "import sys, runpy; sys.path.insert(0, sys.argv[1]); sys.argv[1:2] = ['verify']\n"
        "runpy.run_module('cloudtrain_runtime.checkpoint.inspection', run_name='__main__')"
    )
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        str(tmp_path / "isolated"),
        str(root),
        "--step",
        "100",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout.splitlines()[-1])["checkpoints"]
    assert entry["state"] == "complete"
    assert (
        entry["why"]
        == "only its bytes were compared: to parse them takes PyTorch, which is not installed here"
    )


@pytest.mark.aws
def test_a_missing_bucket_is_a_storage_error(aws: dict[str, str]) -> None:
    (error,) = run_inspection("list", "s3://no-such-bucket-here/x")
    assert (error["event"], error["kind"]) == ("error", "storage")
    assert "NoSuchBucket" in error["message"]
