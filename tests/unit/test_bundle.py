"""Bundle archives: equal code gives equal bytes, and an incomplete archive is written again."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from support.code_folders import write_tree

from cloudtrain.bundle import collect
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.errors import BundleError


def test_equal_code_gives_an_identical_archive(tmp_path: Path) -> None:
    first = write_tree(tmp_path / "a", b_py="2", a_py="1", sub__c_py="3")
    second = write_tree(tmp_path / "b", sub__c_py="3", a_py="1", b_py="2")
    for path in second.rglob("*"):
        os.utime(path, (1, 1))
    (second / "a.py").chmod(0o600)
    one, two = (
        write_bundle(collect(folder), tmp_path / f"out-{folder.name}") for folder in (first, second)
    )
    assert one.info == two.info
    assert one.path.read_bytes() == two.path.read_bytes()


def test_names_modes_and_contents_change_the_digest(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="1")
    digests = {collect(folder).info.digest}
    (folder / "a.py").write_text("2")
    digests.add(collect(folder).info.digest)
    (folder / "a.py").chmod(0o755)
    digests.add(collect(folder).info.digest)
    (folder / "a.py").rename(folder / "b.py")
    digests.add(collect(folder).info.digest)
    assert len(digests) == 4


def test_the_archive_starts_one_rank_and_holds_the_runtime(tmp_path: Path) -> None:
    bundle = write_bundle(collect(write_tree(tmp_path / "a", a_py="1")), tmp_path / "out")
    with tarfile.open(bundle.path) as archive:
        names = archive.getnames()
        member = archive.getmember("a.py")
    assert "cloudtrain_worker.py" in names
    assert "cloudtrain_runtime/contract/manifest.py" in names
    assert (member.mtime, member.uid, member.uname, member.mode) == (0, 0, "", 0o644)


def test_an_existing_archive_is_reused(tmp_path: Path) -> None:
    contents = collect(write_tree(tmp_path / "a", a_py="1"))
    first = write_bundle(contents, tmp_path / "out").path
    before = first.stat().st_mtime_ns
    assert write_bundle(contents, tmp_path / "out").path == first
    assert first.stat().st_mtime_ns == before


def test_archive_bytes_are_pinned(tmp_path: Path) -> None:
    """The runtime's files are left out, because their content changes with each version."""
    folder = write_tree(tmp_path / "a", a_py="print(1)\n", sub__b="x" * 200_000)
    (folder / ("long" * 40)).write_text("a name that is too long for ustar")
    (folder / "größe.py").write_text("")
    (folder / "run").write_text("#!")
    (folder / "run").chmod(0o755)
    contents = collect(folder)
    entries = tuple(
        entry for entry in contents.entries if not entry.name.startswith("cloudtrain_runtime/")
    )
    archive = write_bundle(dataclasses.replace(contents, entries=entries), tmp_path / "out").path
    assert (
        hashlib.sha256(archive.read_bytes()).hexdigest()
        == "5738fb36cf23cb4b1c118a747fa4f41082d9ceefe80da3eec92423078f364906"
    )


def test_other_tools_can_read_the_archive(tmp_path: Path) -> None:
    contents = collect(
        write_tree(tmp_path / "a", a_py="print(1)\n", sub__b="x" * 200_000, empty="")
    )
    archive = write_bundle(contents, tmp_path / "out").path
    subprocess.run(["gzip", "-t", archive], check=True)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "xzf", archive, "-C", tmp_path / "unpacked"], check=True)
    assert (tmp_path / "unpacked" / "sub" / "b").read_text() == "x" * 200_000
    for entry in contents.entries:
        assert (
            hashlib.sha256((tmp_path / "unpacked" / entry.name).read_bytes()).hexdigest()
            == entry.sha256
        )
    assert len(gzip.decompress(archive.read_bytes())) % tarfile.RECORDSIZE == 0


def test_modules_of_the_code_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tree(tmp_path / "a", train_py="", src__lib__net_py="", src__train_py="")
    (folder / "src" / "lib" / "data.txt").write_text("")
    found = collect(folder).modules
    assert found["train"] == "train.py"
    assert (found["lib"], found["net"]) == ("src/lib", "src/lib/net.py")
    assert "cloudtrain_runtime" not in found
    monkeypatch.setattr("cloudtrain.bundle.contents.MOST_MODULES", 2)
    assert len(collect(folder).modules) == 2


def test_memory_does_not_grow_with_file_sizes(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="")
    with (folder / "table").open("wb") as file:
        file.truncate(64_000_000)
    tracemalloc.start()
    write_bundle(collect(folder), tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16_000_000


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "a", a_py="1" * 1000, b_py="2" * 2000)
    calls: list[tuple[int, int]] = []
    contents = collect(folder, progress=lambda done, total: calls.append((done, total)))
    write_bundle(
        contents, tmp_path / "out", progress=lambda done, total: calls.append((done, total))
    )
    assert len(calls) == 2 * len(contents.entries) - 1
    assert calls[-1] == (contents.info.bytes, contents.info.bytes)
    assert all(done <= total for done, total in calls)


def test_a_complete_archive_is_not_rewritten(tmp_path: Path) -> None:
    contents = collect(write_tree(tmp_path / "a", a_py="1"))
    first = write_bundle(contents, tmp_path / "out").path.stat()
    again = write_bundle(contents, tmp_path / "out").path.stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


@pytest.mark.parametrize("size", [0, 4, 65_000, -1], ids=["empty", "stub", "cut", "one byte less"])
@pytest.mark.parametrize("code", ["1", "1" * 200_000], ids=["small", "large"])
def test_a_truncated_archive_is_rewritten(tmp_path: Path, code: str, size: int) -> None:
    contents = collect(write_tree(tmp_path / "a", a_py=code))
    archive = write_bundle(contents, tmp_path / "out").path
    complete = archive.read_bytes()
    archive.write_bytes(complete[:size])
    assert write_bundle(contents, tmp_path / "out").path.read_bytes() == complete


def test_an_archive_of_zeros_is_rewritten(tmp_path: Path) -> None:
    """A file system can leave such a file when the machine loses power before the content is on the disk."""
    contents = collect(write_tree(tmp_path / "a", a_py="1"))
    archive = write_bundle(contents, tmp_path / "out").path
    complete = archive.read_bytes()
    archive.write_bytes(bytes(len(complete)))
    assert write_bundle(contents, tmp_path / "out").path.read_bytes() == complete


@pytest.mark.parametrize("change", ["longer", "shorter", "other", "gone"])
def test_a_file_that_changes_during_packing_is_reported(tmp_path: Path, change: str) -> None:
    folder = write_tree(tmp_path / "a", a_py="12345")
    contents = collect(folder)
    if change == "gone":
        (folder / "a.py").unlink()
    else:
        (folder / "a.py").write_text({"longer": "123456", "shorter": "1", "other": "54321"}[change])
    with pytest.raises(BundleError, match=r"a\.py changed while the bundle was written"):
        write_bundle(contents, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == []


def test_a_planted_archive_is_rewritten(tmp_path: Path) -> None:
    """An archive of the right name and length, in a valid format, with the content of another."""
    ours = collect(write_tree(tmp_path / "a", train_py="print('read')"))
    other = collect(write_tree(tmp_path / "b", train_py="print('evil')"))
    archive = write_bundle(ours, tmp_path / "out").path
    intact = archive.read_bytes()
    planted = write_bundle(other, tmp_path / "other").path.read_bytes()
    assert len(planted) == len(intact)
    archive.write_bytes(planted)
    assert write_bundle(ours, tmp_path / "out").path.read_bytes() == intact
    archive.write_bytes(intact + planted)
    assert write_bundle(ours, tmp_path / "out").path.read_bytes() == intact
    with tarfile.open(archive, "r:gz") as members:
        names = members.getnames()
    with tarfile.open(archive, "w:gz") as members:
        for name in names:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            members.addfile(link)
    assert write_bundle(ours, tmp_path / "out").path.read_bytes() == intact


def test_an_archive_with_a_flipped_bit_is_rewritten(tmp_path: Path) -> None:
    contents = collect(write_tree(tmp_path / "a", a_py="1"))
    archive = write_bundle(contents, tmp_path / "out").path
    intact = archive.read_bytes()
    for place in (11, len(intact) // 2, len(intact) - 6):  # block header, content, checksum
        damaged = bytearray(intact)
        damaged[place] ^= 4
        archive.write_bytes(damaged)
        assert write_bundle(contents, tmp_path / "out").path.read_bytes() == intact
