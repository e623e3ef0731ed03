"""Members of archives are checked when they are written and read. None leaves its folder."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudtrain.bundle import collect, unpacking
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.bundle.unpacking import UnpackError, unpack
from cloudtrain.planning.request import CONTAINER_ENTRYPOINT

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644
) -> Member:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode = kind, link, mode
    data = b"planted" if kind == tarfile.REGTYPE else b""
    header.size = len(data)
    return header, data


HOSTILE = {
    "absolute": (member("/BASE/escaped"),),
    "above": (member("../escaped"),),
    "far above": (member("a/b/../../../escaped"),),
    "link out": (member("out", tarfile.SYMTYPE, link="/BASE"), member("out/escaped")),
    "link above": (member("out", tarfile.SYMTYPE, link=".."), member("out/escaped")),
    "two links": (
        member("one", tarfile.SYMTYPE, link="two"),
        member("two", tarfile.SYMTYPE, link="../"),
        member("one/escaped"),
    ),
    "hard link": (member("victim", tarfile.LNKTYPE, link="/BASE/victim"), member("victim")),
    "hard link above": (member("victim", tarfile.LNKTYPE, link="../victim"), member("victim")),
    "device": (member("device", tarfile.CHRTYPE),),
    "pipe": (member("pipe", tarfile.FIFOTYPE),),
}


@pytest.fixture
def pack(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an archive. BASE becomes the parent of the folder in which it is unpacked."""
    (tmp_path / "victim").write_text("safe")

    def write(*members: Member) -> Path:
        path = tmp_path / "hostile.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for header, data in members:
                copy = header.replace(deep=False)
                copy.name = header.name.replace("/BASE", str(tmp_path))
                copy.linkname = header.linkname.replace("/BASE", str(tmp_path))
                archive.addfile(copy, io.BytesIO(data))
        return path

    return write


def names_outside(tmp_path: Path) -> set[str]:
    assert (tmp_path / "victim").read_text() == "safe"
    return {path.name for path in tmp_path.iterdir()} - {
        "victim",
        "hostile.tar.gz",
        "home",
        "unpacked",
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_members_that_leave_the_folder_are_refused(
    tmp_path: Path, pack: Callable[..., Path], name: str
) -> None:
    (tmp_path / "unpacked").mkdir()
    with pytest.raises(UnpackError, match=r"hostile\.tar\.gz"):
        unpack(pack(*HOSTILE[name]), tmp_path / "unpacked")
    assert names_outside(tmp_path) == set()


@pytest.mark.parametrize("name", HOSTILE)
def test_older_pythons_refuse_such_members(
    tmp_path: Path, pack: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 have no filters."""
    monkeypatch.setattr(unpacking, "_HAS_DATA_FILTER", False)
    test_members_that_leave_the_folder_are_refused(tmp_path, pack, name)


WITHOUT_FILTERS = pytest.param(
    False, marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python warns without one")
)


@pytest.mark.parametrize("has_filters", [True, WITHOUT_FILTERS])
def test_harmless_members_lose_their_set_id_bits(
    tmp_path: Path, pack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, *, has_filters: bool
) -> None:
    monkeypatch.setattr(unpacking, "_HAS_DATA_FILTER", has_filters)
    unpack(pack(member("bin/run", mode=0o6755), member("a.py")), tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "a.py").read_text() == "planted"
    assert (tmp_path / "unpacked" / "bin" / "run").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x1f\x8b\x08\x00" + bytes(20)])
def test_a_file_that_is_no_archive_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hostile.tar.gz").write_bytes(content)
    with pytest.raises(UnpackError, match=r"hostile\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "hostile.tar.gz", tmp_path)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("device", "pipe")])
def test_the_container_writes_only_below_its_folder(
    tmp_path: Path, pack: Callable[..., Path], name: str
) -> None:
    """Runs the shell command of the request, as root if the tests run as root."""
    run_entrypoint(tmp_path, pack(*HOSTILE[name]))
    assert names_outside(tmp_path) == set()


def test_the_container_drops_set_id_bits(tmp_path: Path, pack: Callable[..., Path]) -> None:
    assert run_entrypoint(tmp_path, pack(member("run", mode=0o6755))) == 0
    assert (tmp_path / "unpacked" / "code" / "run").stat().st_mode & 0o7000 == 0


def run_entrypoint(tmp_path: Path, archive: Path) -> int:
    """Run the container's entry point with a `python` that does nothing."""
    root = tmp_path / "unpacked"
    channel = root / "input" / "data" / "code"
    channel.mkdir(parents=True)
    (channel / "sourcedir.tar.gz").write_bytes(archive.read_bytes())
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    environ = {"PATH": f"{python.parent}:{os.environ['PATH']}", "CLOUDTRAIN_ML_ROOT": str(root)}
    return subprocess.run(
        CONTAINER_ENTRYPOINT, env=environ, check=False, capture_output=True
    ).returncode


def test_a_bundle_holds_regular_files_below_its_root(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "sub" / "deep").mkdir(parents=True)
    (code / "a.py").write_text("")
    (code / "run").write_text("")
    (code / "run").chmod(0o6777)
    (code / "sub" / "deep" / "back.py").symlink_to("../../a.py")
    (code / "odd\nname: ..").write_text("")
    bundle = write_bundle(collect(code), tmp_path / "out")
    with tarfile.open(bundle.path) as archive:
        members = list(check_members(archive, tmp_path))
    assert {member.mode for member in members} == {0o644, 0o755}
    assert {member.uid for member in members} == {0}
    assert "sub/deep/back.py" in {member.name for member in members}


def check_members(archive: tarfile.TarFile, folder: Path) -> Iterator[tarfile.TarInfo]:
    for each in archive:
        assert each.isreg(), each.name
        assert tarfile.data_filter(each, str(folder)).name == each.name
        yield each
