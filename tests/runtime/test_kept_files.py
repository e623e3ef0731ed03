"""Outputs of a script in its code folder: linked, merged with files of an earlier run, and counted in bounded time."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloudtrain_runtime.contract import ML_ROOT_VARIABLE, MlTree, parse_event
from cloudtrain_runtime.launcher import code_outputs
from cloudtrain_runtime.launcher.code_outputs import CodeFolder
from cloudtrain_runtime.launcher.unkept_files import Budget


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlTree:
    tree = MlTree(tmp_path / "ml")
    monkeypatch.setenv(ML_ROOT_VARIABLE, str(tree.root))  # other programs use this machine, too
    for folder in (tree.code, tree.model):
        folder.mkdir(parents=True)
    return tree


def _event(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    event = parse_event(capfd.readouterr().out)
    assert event is not None
    return event


def test_kept_files_replace_files_of_the_code(tree: MlTree) -> None:
    (tree.outputs / "out").mkdir(parents=True)
    (tree.outputs / "out/a").write_text("kept")
    (tree.code / "out").mkdir()
    for name in ("a", "b"):
        (tree.code / "out" / name).write_text("shipped")
    CodeFolder(tree, ["out/"])
    assert {path.name: path.read_text() for path in (tree.code / "out").iterdir()} == {
        "a": "kept",
        "b": "shipped",
    }
    assert (tree.code / "out").is_symlink()


def test_a_folder_that_replaces_its_link_is_kept(
    tree: MlTree, capfd: pytest.CaptureFixture[str]
) -> None:
    code = CodeFolder(tree, ["./runs/out/"])
    (tree.code / "runs/out").unlink()
    (tree.code / "runs/out/deep").mkdir(parents=True)
    (tree.code / "runs/out/deep/a").write_text("new")
    code.report("algo-1")
    assert (tree.outputs / "runs/out/deep/a").read_text() == "new"
    assert _event(capfd)["unkept_files"] == 0


def test_an_output_may_be_missing_at_the_end(
    tree: MlTree, capfd: pytest.CaptureFixture[str]
) -> None:
    code = CodeFolder(tree, ["out/", "model.pt"])
    shutil.rmtree(tree.outputs)
    (tree.model / "m").touch()
    code.report("algo-1")
    event = _event(capfd)
    assert (event["unkept"], event["model_is_empty"], event["is_complete"]) == ([], False, True)


def test_a_truncated_scan_reports_itself_as_incomplete(
    tree: MlTree, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = CodeFolder(tree, [])
    for number in range(20):
        (tree.code / f"{number}.txt").write_text("x")
    monkeypatch.setattr(code_outputs, "Budget", partial(Budget, entries=15))
    code.report("algo-1")
    event = _event(capfd)
    assert (event["unkept_files"], len(event["unkept"]), event["is_complete"]) == (15, 10, False)
