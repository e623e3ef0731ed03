"""Checkpoints between versions: of PyTorch, and of cloudtrain."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_manifest
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from cloudtrain_runtime.checkpoint.inspection import Inspection
from cloudtrain_runtime.checkpoint.manager import CheckpointManager
from cloudtrain_runtime.checkpoint.safe_metadata import read_metadata
from cloudtrain_runtime.contract import CheckpointConfig
from cloudtrain_runtime.errors import CheckpointError
from cloudtrain_runtime.process.run_context import Context

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed.checkpoint warns

GOLDEN = Path(__file__).parent.parent / "golden_checkpoints"
"""Checkpoints that other versions have saved; each folder's name contains the version."""


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_checkpoints_of_other_versions_are_exported(folder: str, tmp_path: Path) -> None:
    found = Inspection(str(GOLDEN / folder))
    (entry,) = found.verify(lambda event: None)
    assert (entry.state, entry.why) == ("complete", "")
    found.export(entry, tmp_path / "all.pt", form="torch", part="all")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in state["model"].items()} == {
        "weight": (1, 3),
        "bias": (1,),
    }
    assert all(value.isfinite().all() for value in state["model"].values())


def metadata_of_another_version(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> bytes:
    """Return pickled metadata of one tensor; `change` maps the pickled values of its properties."""

    class Properties(TensorProperties):
        def __reduce__(self) -> Any:
            return TensorProperties, (), change(self.__getstate__())

    entry = TensorStorageMetadata(Properties(dtype=torch.float16), torch.Size([2]), [])
    return pickle.dumps(Metadata(state_dict_metadata={"model.weight": entry}, storage_data={}))


def test_tensor_properties_may_have_unknown_values() -> None:
    with_strides = metadata_of_another_version(lambda values: (*values[:5], (1,)))
    with_more = metadata_of_another_version(lambda values: (*values[:5], (1,), "new", None))
    for data in (with_strides, with_more):
        entry = read_metadata(data).state_dict_metadata["model.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        assert entry.properties.dtype == torch.float16


def saved(context: Context, root: Path, *, step: int = 1) -> CheckpointManager:
    model = nn.Linear(3, 1)
    checkpoints = CheckpointManager(CheckpointConfig(root.as_uri(), None, None, 3, "auto"), context)
    checkpoints.save(step, model, [torch.optim.SGD(model.parameters(), lr=0.1)], {}, {}, wait=True)
    return checkpoints


def test_a_first_save_with_unreadable_metadata_ends_the_run(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (self.dtype,))
    with pytest.raises(
        CheckpointError, match=rf"PyTorch {torch.__version__[:4]}.* could not be loaded .* run ends"
    ):
        saved(context, tmp_path)
    assert Inspection(str(tmp_path)).entries == (), "the failed save left files of a checkpoint"


def test_the_step_after_an_unreadable_save_ends_the_run(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (self.dtype,))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = CheckpointManager(
        CheckpointConfig(tmp_path.as_uri(), None, None, 3, "auto"), context
    )
    assert checkpoints.save(1, model, [optimizer], {}, {})
    assert checkpoints.wait_for_save(60)
    with pytest.raises(CheckpointError, match="could not be loaded again"):
        optimizer.step()


def test_an_unreadable_checkpoint_names_both_versions(context: Context, tmp_path: Path) -> None:
    saved(context, tmp_path)
    folder = tmp_path / "step-00000001"
    (folder / ".metadata").write_bytes(metadata_of_another_version(lambda values: values[:4]))
    (folder / "manifest.json").unlink()
    shutil.move(folder / "writer.json", tmp_path)
    write_manifest(folder, run="demo", torch="9.9.0")
    expected = rf"\(saved with PyTorch 9\.9\.0, read with PyTorch {torch.__version__[:4]}"
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=expected):
        CheckpointManager(
            CheckpointConfig(tmp_path.as_uri(), None, None, 3, "auto"), context
        ).resume(model, [optimizer])
    (entry,) = Inspection(str(tmp_path)).verify(lambda event: None)
    assert entry.state == "unreadable"
    assert "saved with PyTorch 9.9.0" in entry.why


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda metadata: metadata.storage_data.clear(), "does not name the bytes of model"),
        (lambda metadata: _set(metadata, offset=10**9), "outside of the checkpoint's files"),
        (lambda metadata: _set(metadata, length=10**9), "outside of the checkpoint's files"),
        (
            lambda metadata: _set(metadata, relative_path="../x"),
            "outside of the checkpoint's files",
        ),
    ],
    ids=["none", "offset", "length", "path"],
)
def test_metadata_must_name_bytes_of_the_checkpoint(
    context: Context, tmp_path: Path, change: Callable[[Metadata], None], expected: str
) -> None:
    saved(context, tmp_path)
    folder = tmp_path / "step-00000001"
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (our own)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    (entry,) = Inspection(str(tmp_path)).verify(lambda event: None)
    assert (entry.state, expected in entry.why) == ("unreadable", True)


def _set(metadata: Metadata, **fields: Any) -> None:
    for info in metadata.storage_data.values():
        for name, value in fields.items():
            setattr(info, name, value)
