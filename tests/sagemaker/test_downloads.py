"""Copies of a run's results: what is verified, kept, refused and unpacked."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import CloudError, UserError
from cloudtrain.runs.downloads import Choice, Download, RunResults, RunStorage
from cloudtrain.runs.file_transfer import SourceFile, copy_files, open_source, staging_folder

RUN = "demo-261120-101500-1a2b3c"
PREFIX = f"cloudtrain/{RUN}"
URI = f"s3://cloudtrain-test/{PREFIX}"


def s3_client() -> Any:
    """Return a client that stores no checksums, as other programs do; the ETag remains."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(request_checksum_calculation="when_required"))


class Results:
    """A run with results in a folder, or in S3 below `URI`."""

    def __init__(self, root: Path, uri: str = "") -> None:
        self.root = root
        self.uri = uri or root.as_uri()

    def write(self, name: str, content: bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        if self.uri.startswith("s3:"):
            s3_client().upload_file(str(path), "cloudtrain-test", f"{PREFIX}/{name}")
        return path

    def download(
        self, to: Path, *what: str, plan: Mapping[str, Any] | None = None, **options: Any
    ) -> Download:
        import os

        import boto3

        storage = RunStorage(f"{self.uri}/output", dict(os.environ), lambda: boto3.client("s3"))
        saved = {
            "checkpoint": {"uri": f"{self.uri}/checkpoints"},
            "config": CONFIG,
            "request": {},
            **(plan or {}),
        }
        return RunResults(RUN, storage, lambda: saved).download(to, Choice(what, **options))


CONFIG = {"script": "train.py", "task": None, "outputs": ["out/"], "checkpoint": {"uri": ""}}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.aws)])
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Results:
    if request.param == "folder":
        return Results(tmp_path / "stored")
    request.getfixturevalue("aws")
    return Results(tmp_path / "stored", URI)


@pytest.fixture
def folder(tmp_path: Path) -> Results:
    return Results(tmp_path / "stored")


def packed(members: Mapping[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    """Return a tar.gz with these files, and members without content."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in extra:
            archive.addfile(info)
    return target.getvalue()


def names(done: Download, *, new: bool = True) -> list[str]:
    return sorted(each.path for each in done.files if each.is_new is new)


def test_results_are_copied_verified_and_recorded(results: Results, tmp_path: Path) -> None:
    results.write("output/model.tar.gz", packed({"weights.bin": b"w" * 1000}))
    results.write("output/output.tar.gz", packed({"notes.txt": b"n"}))
    results.write("output2/model.tar.gz", b"of a neighbour")
    results.write("checkpoints/outputs/out/a.txt", b"a")
    results.write("checkpoints/last.ckpt", b"state")
    results.write("checkpoints-2/last.ckpt", b"of a neighbour")
    to = tmp_path / "to"
    done = results.download(to)
    assert names(done) == [
        "checkpoints/last.ckpt",
        "model.tar.gz",
        "output.tar.gz",
        "outputs/out/a.txt",
    ]
    assert done.missing == {}
    assert {each.verified for each in done.files} == (
        {"md5"} if results.uri.startswith("s3:") else {"sha256"}
    )
    assert (to / "outputs/out/a.txt").read_bytes() == b"a"
    checked = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=to, capture_output=True, text=True, check=False
    )
    assert checked.stdout.count(": OK") == 4, checked.stderr
    assert sorted(path.name for path in to.iterdir()) == [
        *("SHA256SUMS", "checkpoints", "model.tar.gz", "output.tar.gz", "outputs"),
    ]


def test_folders_of_a_trainer_that_is_not_attached_are_copied(
    results: Results, tmp_path: Path
) -> None:
    results.write("checkpoints/checkpoint-5/model.bin", b"w")
    assert names(results.download(tmp_path / "to")) == ["checkpoints/checkpoint-5/model.bin"]
    results.write(
        "checkpoints/checkpoint-9/cloudtrain.json",
        f'{{"run": "{RUN}", "step": 9, "files": []}}'.encode(),
    )
    done = results.download(tmp_path / "attached")
    assert names(done) == ["checkpoints/checkpoint-9/cloudtrain.json"]
    assert list(done.left_out) == ["checkpoint-5"], "it is not finished"


def test_equal_files_are_kept_and_others_refused(results: Results, tmp_path: Path) -> None:
    results.write("output/model.tar.gz", b"model")
    results.write("output/output.tar.gz", b"first")
    to = tmp_path / "to"
    assert names(results.download(to)) == ["model.tar.gz", "output.tar.gz"]
    (to / "output.tar.gz").unlink()
    second = results.download(to)
    assert (names(second), names(second, new=False)) == (["output.tar.gz"], ["model.tar.gz"])
    (to / "model.tar.gz").write_bytes(b"MODEL")
    (to / "output.tar.gz").unlink()
    with pytest.raises(
        UserError, match=r"other files of these names; nothing was copied: model\.tar\.gz"
    ):
        results.download(to)
    assert ((to / "model.tar.gz").read_bytes(), (to / "output.tar.gz").exists()) == (
        b"MODEL",
        False,
    )
    assert names(results.download(to, force=True)) == ["model.tar.gz", "output.tar.gz"]
    assert (to / "model.tar.gz").read_bytes() == b"model"


def test_a_missing_part_names_those_that_exist(results: Results, tmp_path: Path) -> None:
    results.write("output/model.tar.gz", b"model")
    done = results.download(tmp_path / "to")
    assert names(done) == ["model.tar.gz"]
    assert sorted(done.missing) == ["checkpoints", "outputs"]
    with pytest.raises(UserError, match=f"{RUN} has no outputs at ") as caught:
        results.download(tmp_path / "to", "outputs")
    assert caught.value.hint == "it has model"


def test_a_run_without_results_says_so(folder: Results, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no model at .*; no outputs at .*; no checkpoints at "
    ):
        folder.download(tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_wrong_part_or_step_is_refused(folder: Results, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a run has no part 'modle'") as caught:
        folder.download(tmp_path / "to", "modle")
    assert caught.value.hint == 'did you mean "model"?'
    with pytest.raises(UserError, match="'lst' is no step"):
        folder.download(tmp_path / "to", step="lst")
    with pytest.raises(UserError, match="a step chooses a checkpoint"):
        folder.download(tmp_path / "to", "model", step=5)


@pytest.mark.aws
@pytest.mark.parametrize("key", ["output/a//b", "output/model/./x"])
def test_keys_that_leave_the_folder_are_refused(
    aws: dict[str, str], tmp_path: Path, key: str
) -> None:
    import boto3

    results = Results(tmp_path / "stored", URI)
    results.write("output/model.tar.gz", b"model")
    boto3.client("s3").put_object(Bucket="cloudtrain-test", Key=f"{PREFIX}/{key}", Body=b"evil")
    with pytest.raises(
        UserError, match=r"a file whose name cannot be used here: .*; nothing was copied"
    ):
        results.download(tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == []


def _link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "name",
    ["../escaped", "/escaped", "a\0b", "a\nb", "SHA256SUMS", ".cloudtrain-download-1/x", "twice"],
)
def test_unsafe_names_are_refused(folder: Results, tmp_path: Path, name: str) -> None:
    folder.write("source/file", b"evil")
    source = open_source(str(folder.root / "source"), dict)
    twice = [SourceFile("twice", source, "file", 4, 0.0)] * (name == "twice")
    with (
        pytest.raises(UserError, match="a file whose name cannot be used here"),
        staging_folder(tmp_path / "to") as staging,
    ):
        copy_files([*twice, SourceFile(name, source, "file", 4, 0.0)], staging, force=True)
    assert list((tmp_path / "to").iterdir()) == []


HOSTILE: Mapping[str, Callable[[], bytes]] = {
    "parent": lambda: packed({"../escaped": b"evil"}),
    "absolute": lambda: packed({"/tmp/escaped": b"evil"}),  # noqa: S108 (it must not be written)
    "link out": lambda: packed({}, _link("model", "/etc/passwd", tarfile.SYMTYPE)),
    "through a link": lambda: packed(
        {}, _link("a", "..", tarfile.SYMTYPE), _link("b", "a/x", tarfile.LNKTYPE)
    ),
    "loop": lambda: packed({}, _link("a", "b", tarfile.SYMTYPE), _link("b", "a", tarfile.SYMTYPE)),
    "device": lambda: packed({}, _link("pipe", "", tarfile.FIFOTYPE)),
    "cut": lambda: packed({"weights": bytes(range(256)) * 999})[:900],
    "no archive": lambda: b"<html>",
    "bomb": lambda: packed({"weights": bytes(3 << 20), "more": bytes(3 << 20)}),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_archives_are_kept_packed(
    folder: Results, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.runs.downloads._UNPACKED_BYTES", 4 << 20)
    folder.write("output/model.tar.gz", HOSTILE[kind]())
    with pytest.raises(UserError, match=r"it is kept packed|cannot be unpacked"):
        folder.download(tmp_path / "to", unpack=True)
    left = sorted(
        path.relative_to(tmp_path / "to").as_posix() for path in (tmp_path / "to").rglob("*")
    )
    assert left == ["SHA256SUMS", "model.tar.gz"]
    assert not (tmp_path / "escaped").exists()


def test_archives_are_unpacked_without_links(folder: Results, tmp_path: Path) -> None:
    link = _link("newest", "deep/weights", tarfile.SYMTYPE)
    folder.write(
        "output/model.tar.gz", packed({"./deep/weights": b"w", "deep/weights": b"w"}, link)
    )
    done = folder.download(tmp_path / "to", unpack=True)
    assert names(done) == ["model.tar.gz", "model/deep/weights", "model/newest"]
    assert (tmp_path / "to/model/newest").read_bytes() == b"w"
    assert not (tmp_path / "to/model/newest").is_symlink()
    assert names(folder.download(tmp_path / "to", unpack=True)) == []


def test_links_that_leave_the_run_are_left_out(folder: Results, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    folder.write("output/model.tar.gz", b"model")
    folder.write("checkpoints/last.ckpt", b"state")
    (folder.root / "checkpoints/inside").symlink_to("last.ckpt")
    (folder.root / "checkpoints/outside").symlink_to(tmp_path / "secret")
    (folder.root / "checkpoints/above").symlink_to("..")
    assert names(folder.download(tmp_path / "to", "checkpoints")) == [
        "checkpoints/inside",
        "checkpoints/last.ckpt",
    ]


def test_an_interrupted_download_is_continued(folder: Results, tmp_path: Path) -> None:
    folder.write("output/model.tar.gz", b"model")
    to = tmp_path / "to"
    left, own = to / ".cloudtrain-download-x1", to / ".partial"
    for each in (left, own):
        each.mkdir(parents=True)
        (each / "0").write_bytes(b"mod")
    assert names(folder.download(to)) == ["model.tar.gz"]
    assert not left.exists()  # of a download that was killed
    assert (own / "0").read_bytes() == b"mod"


def test_lines_about_other_files_stay_in_the_sums(folder: Results, tmp_path: Path) -> None:
    folder.write("output/model.tar.gz", b"model")
    to = tmp_path / "to"
    to.mkdir()
    zeros = b"0" * 64
    own = b"# data\n" + zeros + b"  moved.bin\n\nSHA256 (a) = 1\n" + zeros + b"  caf\xe9\r\n"
    stale = zeros + b"  model.tar.gz\n"
    (to / "SHA256SUMS").write_bytes(own + stale)
    folder.download(to)
    line = f"{hashlib.sha256(b'model').hexdigest()}  model.tar.gz\n".encode()
    assert (to / "SHA256SUMS").read_bytes() == own + line


def test_two_downloads_into_one_folder_are_refused(folder: Results, tmp_path: Path) -> None:
    folder.write("output/model.tar.gz", b"model")
    with (
        staging_folder(tmp_path / "to"),
        pytest.raises(UserError, match="another download writes to"),
    ):
        folder.download(tmp_path / "to")


def test_a_target_that_is_a_file_is_refused(folder: Results, tmp_path: Path) -> None:
    folder.write("output/model.tar.gz", b"model")
    (tmp_path / "to").write_text("a file")
    with pytest.raises(UserError, match="to: File exists"):
        folder.download(tmp_path / "to")


def test_a_file_that_does_not_fit_is_refused(
    folder: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    folder.write("output/model.tar.gz", b"")
    free = os.statvfs(tmp_path)
    os.truncate(
        folder.root / "output/model.tar.gz", 2 * free.f_blocks * free.f_frsize
    )  # a sparse file
    with pytest.raises(UserError, match="nothing was copied"):
        folder.download(tmp_path / "to")


@pytest.mark.aws
def test_an_object_without_a_digest_is_compared_with_the_record(
    aws: dict[str, str], tmp_path: Path
) -> None:
    import boto3

    key = boto3.client("kms").create_key()["KeyMetadata"]["KeyId"]
    store = {"Bucket": "cloudtrain-test", "Key": f"{PREFIX}/output/model.tar.gz"}
    s3_client().put_object(**store, Body=b"model", ServerSideEncryption="aws:kms", SSEKMSKeyId=key)
    results, to = Results(tmp_path / "stored", URI), tmp_path / "to"
    assert {each.verified for each in results.download(to, "model").files} == {"size"}
    assert names(results.download(to, "model"), new=False) == ["model.tar.gz"]
    (to / "model.tar.gz").write_bytes(b"MODEL")
    with pytest.raises(UserError, match="other files of these names"):
        results.download(to, "model")


@pytest.mark.aws
def test_checksums_of_s3_are_compared(aws: dict[str, str], tmp_path: Path) -> None:
    import boto3

    for name, algorithm in (("model.tar.gz", "SHA256"), ("output.tar.gz", "CRC32")):
        key = f"{PREFIX}/output/{name}"
        boto3.client("s3").put_object(
            Bucket="cloudtrain-test", Key=key, Body=b"model", ChecksumAlgorithm=algorithm
        )
    done = Results(tmp_path / "stored", URI).download(tmp_path / "to", "model", "outputs")
    assert [each.verified for each in done.files] == ["sha256", "crc32"]


@pytest.mark.aws
def test_an_object_that_differs_from_its_digest_is_refused(
    aws: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "stored", URI)
    results.write("output/model.tar.gz", b"model")
    monkeypatch.setattr(
        "cloudtrain.runs.file_transfer.stored_digest", lambda *_: ("crc32", "00000000")
    )
    with pytest.raises(
        CloudError, match=r"model.tar.gz has changed while it was read, or was damaged on its way"
    ):
        results.download(tmp_path / "to", "model")
    assert not (tmp_path / "to/model.tar.gz").exists()


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    """Check that no unfinished copy remains."""
    yield
    assert not list(tmp_path.rglob(".cloudtrain-download-*"))
