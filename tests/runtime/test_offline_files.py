"""The durable state of offline files: every end of an attempt leaves each value once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain_runtime.metrics.tracking.offline_files import OfflineFiles
from cloudtrain_runtime.metrics.tracking.tracker import Value


def value(step: int) -> Value:
    return Value("train/loss", 0.5, 1.0, step)


def segment(folder: Path, content: str = "values") -> Path:
    own = folder / "offline-run-1"
    (own / "files").mkdir(parents=True)
    (own / "files" / "requirements.txt").write_text("torch")
    (own / "run.wandb").write_text(content)
    return own


def opened(folder: Path) -> OfflineFiles:
    return OfflineFiles((folder / "kept").as_uri(), "demo")


def test_values_until_a_checkpoint_survive(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.load() == {}
    first.add([value(1), value(2)])
    first.save()
    first.add([value(3)])  # the host is lost before the next checkpoint
    second = opened(tmp_path)
    assert second.load() == {"train/loss": 2}
    assert (second.pending, second.row) == ([value(1), value(2)], -1)


def test_values_of_a_copied_segment_are_not_pending(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.add([value(1), value(2)])
    first.copy(segment(tmp_path), "run.wandb")
    second = opened(tmp_path)
    assert second.load() == {"train/loss": 2}
    assert (second.pending, second.row) == ([], 2)
    assert (tmp_path / "kept" / "offline-run-1" / "files" / "requirements.txt").is_file()


@pytest.mark.parametrize("is_copied", [False, True])
def test_an_end_within_a_copy_is_recognised(tmp_path: Path, is_copied: bool) -> None:
    first = opened(tmp_path)
    first.add([value(1)])
    first.copy(segment(tmp_path), "run.wandb")
    state = tmp_path / "kept" / "demo.json"
    # As it was between the two steps of the copy.
    state.write_text(
        '{"logged": {}, "row": -1, "copying": "offline-run-1/run.wandb", "pending": '
        '[{"name": "train/loss", "value": 0.5, "time": 1.0, "step": 1}]}'
    )
    if not is_copied:
        (tmp_path / "kept" / "offline-run-1" / "run.wandb").unlink()
    second = opened(tmp_path)
    assert second.load() == {"train/loss": 1}
    assert second.pending == ([] if is_copied else [value(1)])


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"logged": 1, "row": 0, "copying": "", "pending": []}']
)
def test_a_damaged_state_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "demo.json").write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011 (of JSON, or of the state)
        opened(tmp_path).load()
