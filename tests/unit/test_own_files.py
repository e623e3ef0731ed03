"""Nothing is deleted or replaced that does not carry a mark of cloudtrain's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.backends.sandbox.own_folders import claim_folder, delete_claimed
from cloudtrain.backends.sandbox.process import lock_home
from cloudtrain.errors import UserError
from cloudtrain.features.dashboard.report import write_report
from cloudtrain.support.home_folder import make_home


def test_a_sandbox_deletes_only_its_own_folders(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    (jobs / "mine").mkdir(parents=True)
    (jobs / "big.yaml").touch()
    first, second = claim_folder(jobs / "theirs"), claim_folder(jobs / "mine")
    assert (first, second) == (jobs / "theirs", jobs / "mine-2")
    (first / "model").touch()
    assert claim_folder(first) == first
    assert not (first / "model").exists()
    (jobs / "link").symlink_to(first)
    delete_claimed(jobs)
    delete_claimed(tmp_path / "absent")
    assert {path.name for path in jobs.iterdir()} == {"mine", "big.yaml", "link"}


def test_a_home_with_files_of_others_gets_no_gitignore(tmp_path: Path) -> None:
    used, empty, default = (tmp_path / name for name in ("used", "empty", ".cloudtrain"))
    for folder in (used, default):
        folder.mkdir()
        (folder / "job.yaml").touch()
    for folder in (used, empty, default):
        make_home(folder)
    assert not (used / ".gitignore").exists()
    assert (empty / ".gitignore").read_text() == (default / ".gitignore").read_text() == "*\n"
    (empty / ".gitignore").write_text("secret.txt")
    lock_home(empty).close()
    assert (empty / ".gitignore").read_text() == "secret.txt"


def test_a_sandbox_replaces_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "sandbox.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match="is no file of a sandbox"):
        lock_home(tmp_path)
    assert (tmp_path / "sandbox.json").read_text() == '{"mine": 1}'


def test_a_report_replaces_no_other_file(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>mine</title>")
    with pytest.raises(UserError, match="is no report of cloudtrain"):
        write_report([], page)
    assert "mine" in page.read_text()
