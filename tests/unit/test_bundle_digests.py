"""The cache of file digests."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.code_folders import ACCESS_KEY_ID, write_tree

from cloudtrain.bundle import collect, list_contents
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.errors import BundleError


@pytest.fixture
def _caches_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache digests of files that were just written, too. Otherwise the tests would have to wait."""
    monkeypatch.setattr("cloudtrain.bundle.digests.CLOCK_TICK_NS", -(10**15))


def write_large_tree(folder: Path) -> Path:
    """Write so many files that their digests are cached."""
    write_tree(folder, a_py="1")
    for number in range(1200):
        (folder / f"{number}.txt").write_text(str(number))
    return folder


@pytest.mark.usefixtures("_caches_new_files")
def test_an_unchanged_tree_is_not_read_again(tmp_path: Path) -> None:
    folder = write_large_tree(tmp_path / "a")
    first = collect(folder, home=tmp_path / "home")
    name = next(iter((tmp_path / "home" / "bundles").glob("digests-*.json")))
    cache = json.loads(name.read_text())
    cache["files"]["7.txt"][1][0] = "0" * 64
    name.write_text(json.dumps(cache))
    second = collect(folder, home=tmp_path / "home")
    assert {e.name for e in first.entries} == {e.name for e in second.entries}
    assert next(e.sha256 for e in second.entries if e.name == "7.txt") == "0" * 64
    # Packing hashes each file again, so a wrong cache entry is found and dropped.
    with pytest.raises(BundleError, match=r"7\.txt changed while the bundle was written"):
        write_bundle(second, tmp_path / "home" / "bundles")
    assert collect(folder, home=tmp_path / "home").info == first.info


@pytest.mark.usefixtures("_caches_new_files")
def test_any_change_invalidates_the_digest_cache(tmp_path: Path) -> None:
    folder = write_large_tree(tmp_path / "a")
    before = collect(folder, home=tmp_path / "home").info.digest
    status = (folder / "7.txt").stat()
    (folder / "7.txt").write_text("x")
    os.utime(folder / "7.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert collect(folder, home=tmp_path / "home").info.digest != before


def test_a_file_changed_just_now_is_not_cached(tmp_path: Path) -> None:
    folder = write_large_tree(tmp_path / "a")
    in_an_hour = time.time() + 3600  # newer than "just now", however slowly the files are read
    os.utime(folder / "7.txt", (in_an_hour, in_an_hour))
    collect(folder, home=tmp_path / "home")
    (cache,) = (tmp_path / "home" / "bundles").glob("digests-*.json")
    assert "7.txt" not in json.loads(cache.read_text())["files"]


@pytest.mark.usefixtures("_caches_new_files")
@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 1}', '{"version": null, "files": 3}', "\0"]
)
def test_a_damaged_digest_cache_is_no_error(tmp_path: Path, content: str) -> None:
    folder = write_large_tree(tmp_path / "a")
    before = collect(folder, home=tmp_path / "home").info
    next(iter((tmp_path / "home" / "bundles").glob("digests-*.json"))).write_text(content)
    assert collect(folder, home=tmp_path / "home").info == before


def test_a_small_tree_writes_no_digest_cache(tmp_path: Path) -> None:
    collect(write_tree(tmp_path / "a", a_py=""), home=tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("_caches_new_files")
def test_a_secret_is_found_when_its_digest_is_cached(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", train_py=f"'{ACCESS_KEY_ID}'\n", data="")
    with (folder / "data").open("wb") as file:
        file.truncate(20_000_000)
    for _ in range(2):
        assert [
            str(finding) for finding in list_contents(folder, home=tmp_path / "home").refused
        ] == ["train.py:1: AWS access key id"]
    assert len(list((tmp_path / "home" / "bundles").glob("digests-*.json"))) == 1
