"""Uploads against moto over HTTP. Clients are killed, interrupted and denied in the middle of an upload."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from support.aws_frontend import Answer, Front, Request
from support.jobs import Cli, command, until

from cloudtrain.backends.sagemaker.uploads import PART_BYTES, Uploads
from cloudtrain.errors import UserError
from cloudtrain_runtime.contract.bucket_owner import expect_owner

pytestmark = pytest.mark.aws

BUCKET = "cloudtrain-test"
DATA = "demo-261121-120000-0a1b2c/data"
"""Prefix of a data set of a run."""
PARTS = 5
JOB = "name: demo\ncode: {script: train.py}\ncluster: {instance_type: ml.g5.xlarge}\n"
DENIED = Answer(
    b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>",
    403,
    {"Content-Type": "text/xml"},
)


def s3(endpoint: str | None = None) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=endpoint)


def put(key: str, body: bytes) -> None:
    s3().put_object(Bucket=BUCKET, Key=key, Body=body)


def body_of(key: str) -> bytes:
    content: bytes = s3().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    return content


def keys(endpoint: str | None = None) -> list[str]:
    """Return the objects in the bucket except the submit lock, which is written first."""
    found = [
        entry["Key"] for entry in s3(endpoint).list_objects_v2(Bucket=BUCKET).get("Contents", [])
    ]
    return [key for key in found if not key.startswith("cloudtrain/requests/")]


def unfinished_uploads(endpoint: str) -> list[str]:
    """Return the keys of multipart uploads that were neither completed nor aborted."""
    found = s3(endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return [upload["Key"] for upload in found]


@pytest.fixture
def front(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Put a server between moto and every client of the test. `aws` has the address of moto itself."""
    with Front(aws["AWS_ENDPOINT_URL"]).serve() as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        monkeypatch.setenv("CLOUDTRAIN_TRANSPORT", "boto3")
        yield served


class PausedUpload:
    """A paused upload of a job's archive: two parts pass, the others wait until the test releases them."""

    def __init__(self, front: Front, key: str) -> None:
        self.front = front
        self.reached, self.released = threading.Event(), threading.Event()
        self.answer: Answer | None = None
        self._operation, self._passing = f"PUT /{BUCKET}/{key}", threading.Semaphore(2)
        front.rules[self._operation] = self._rule

    def _rule(self, _: Request) -> Answer | None:
        if self._passing.acquire(blocking=False):
            return None
        self.reached.set()
        self.released.wait(60)
        return self.answer

    def resume(self) -> None:
        """Pass on the waiting parts and all later ones."""
        del self.front.rules[self._operation]
        self.released.set()


@pytest.fixture
def large(job: Callable[..., Path], cli: Cli) -> tuple[Path, str]:
    """Return a job whose archive is sent in parts, and the archive's key."""
    path = job(JOB, train_py="")
    (path.parent / "weights").write_bytes(os.urandom(PARTS * PART_BYTES - PART_BYTES // 2))
    digest = cli("plan", path, "--json").json["bundle"]["digest"]
    return path, f"cloudtrain/code/{digest}/sourcedir.tar.gz"


@contextlib.contextmanager
def submitting(path: Path, paused: PausedUpload) -> Iterator[subprocess.Popen[str]]:
    """Submit in a separate process. The block begins in the middle of the upload."""
    words = [str(command()), "submit", str(path), "--skip-check"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert paused.reached.wait(60)
        yield process
    finally:
        paused.released.set()
        process.kill()
        process.communicate()


def has_received_signals(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has received the signals that were sent to it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = [
        line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return all(int(mask, 16) == 0 for mask in pending)


def test_killed_upload_leaves_no_object(
    front: Front, aws: dict[str, str], large: tuple[Path, str], cli: Cli
) -> None:
    path, key = large
    moto = aws["AWS_ENDPOINT_URL"]
    paused = PausedUpload(front, key)
    with submitting(path, paused) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
        paused.resume()
    assert keys(moto) == []
    assert unfinished_uploads(moto) == [
        key
    ]  # only a lifecycle rule can remove what a killed client leaves

    front.seen.clear()
    done = cli("submit", path, "--skip-check", "--json")
    assert done.code == 0, done.err
    assert front.seen.count(f"PUT /{BUCKET}/{key}") == PARTS
    archive = next(Path(os.environ["CLOUDTRAIN_HOME"]).rglob("sourcedir.tar.gz"))
    assert body_of(key) == archive.read_bytes()
    run = done.json["run"]
    assert sorted(keys(moto)) == sorted(
        [key, f"cloudtrain/{run}/config/run.json", f"cloudtrain/{run}/plan.json"]
    )


def test_ctrl_c_leaves_neither_object_nor_parts(
    front: Front, aws: dict[str, str], large: tuple[Path, str]
) -> None:
    path, key = large
    paused = PausedUpload(front, key)
    with submitting(path, paused) as process:
        process.send_signal(signal.SIGINT)
        until(lambda: has_received_signals(process))
        paused.resume()
        _, output = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert keys(aws["AWS_ENDPOINT_URL"]) == []
    assert unfinished_uploads(aws["AWS_ENDPOINT_URL"]) == []
    assert f"DELETE /{BUCKET}/{key}" in front.seen


def test_a_refusal_leaves_neither_object_nor_parts(
    front: Front, aws: dict[str, str], large: tuple[Path, str]
) -> None:
    path, key = large
    paused = PausedUpload(front, key)
    with submitting(path, paused) as process:
        paused.answer = DENIED
        paused.released.set()
        _, output = process.communicate(timeout=300)
    assert process.returncode == 3, output
    assert "could not upload the code: AWS says AccessDenied" in output
    assert keys(aws["AWS_ENDPOINT_URL"]) == []
    assert unfinished_uploads(aws["AWS_ENDPOINT_URL"]) == []


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "sourcedir.tar.gz"
    path.write_bytes(b"archive")
    return path


def send(uploads: Uploads) -> int:
    """Send the added files; return the number of bytes that are sent."""
    totals = [0]
    uploads.send(lambda _, total: totals.append(total))
    return totals[-1]


def send_archive(archive: Path) -> int:
    uploads = Uploads(s3())
    uploads.add_archive(archive, f"s3://{BUCKET}/code/sourcedir.tar.gz")
    return send(uploads)


def test_an_archive_is_uploaded_once(aws: dict[str, str], archive: Path) -> None:
    assert send_archive(archive) == 7
    assert body_of("code/sourcedir.tar.gz") == b"archive"
    assert send_archive(archive) == 0


@pytest.mark.parametrize("torn", [b"", b"arch", b"archive and more"])
def test_an_archive_of_another_size_is_replaced(
    aws: dict[str, str], archive: Path, torn: bytes
) -> None:
    put("code/sourcedir.tar.gz", torn)
    assert send_archive(archive) == 7
    assert body_of("code/sourcedir.tar.gz") == b"archive"


@pytest.mark.parametrize("size", [7, PART_BYTES, 2 * PART_BYTES + 3])
def test_an_object_that_another_put_there_is_replaced(
    aws: dict[str, str], tmp_path: Path, size: int
) -> None:
    """The object has the same size, as one that a job has put there before."""
    path = tmp_path / "sourcedir.tar.gz"
    path.write_bytes(os.urandom(size))
    for planted in (b"x" * size, path.read_bytes()):
        put("code/sourcedir.tar.gz", planted)
        put("packages/demo/sourcedir.tar.gz", planted)
        uploads = Uploads(s3())
        uploads.add_archive(path, f"s3://{BUCKET}/code/sourcedir.tar.gz")
        uploads.add_folder(path, f"s3://{BUCKET}/packages/demo")
        assert send(uploads) == 2 * size  # `put` records no SHA-256
        assert body_of("code/sourcedir.tar.gz") == path.read_bytes()
        assert body_of("packages/demo/sourcedir.tar.gz") == path.read_bytes()
        uploads = Uploads(s3())
        uploads.add_archive(path, f"s3://{BUCKET}/code/sourcedir.tar.gz")
        uploads.add_folder(path, f"s3://{BUCKET}/packages/demo")
        assert send(uploads) == 0


@pytest.mark.parametrize(("days", "files"), [(29, 0), (31, 1)])
def test_an_old_archive_is_sent_again(front: Front, archive: Path, days: int, files: int) -> None:
    """A lifecycle rule deletes code by its age, but the submitted job may need it for weeks."""
    modified = format_datetime(datetime.now(UTC) - timedelta(days=days), usegmt=True)
    digest = base64.b64encode(hashlib.sha256(b"archive").digest()).decode()
    headers = {"Last-Modified": modified, "ETag": '"0"', "x-amz-checksum-sha256": digest}
    front.respond(f"HEAD /{BUCKET}/code/sourcedir.tar.gz", Answer(b"archive", 200, headers))
    assert send_archive(archive) == 7 * files


@pytest.mark.parametrize(("days", "files"), [(29, 0), (31, 1)])
def test_an_earlier_runs_old_archive_is_sent_again(
    front: Front, tmp_path: Path, days: int, files: int
) -> None:
    """The archive is read from S3, so any machine can resume the run."""
    modified = format_datetime(datetime.now(UTC) - timedelta(days=days), usegmt=True)
    there = Answer(b"archive", 200, {"Last-Modified": modified, "ETag": '"0"'})
    for method in ("HEAD", "GET"):
        front.respond(f"{method} /{BUCKET}/code/sourcedir.tar.gz", there)
    uploads = Uploads(s3())
    uploads.renew_archive(f"s3://{BUCKET}/code/sourcedir.tar.gz", tmp_path)
    assert send(uploads) == 7 * files
    del front.rules[f"GET /{BUCKET}/code/sourcedir.tar.gz"]
    assert keys() == ["code/sourcedir.tar.gz"] * files
    assert not files or body_of("code/sourcedir.tar.gz") == b"archive"


def test_a_deleted_archive_of_an_earlier_run_is_reported(
    aws: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=f"was deleted from s3://{BUCKET}/code/sourcedir.tar.gz"
    ) as raised:
        Uploads(s3()).renew_archive(f"s3://{BUCKET}/code/sourcedir.tar.gz", tmp_path)
    assert "cloudtrain submit JOB --set checkpoint.resume=RUN" in raised.value.hint


def test_an_archive_without_permission_to_read_it_is_kept(front: Front, tmp_path: Path) -> None:
    front.respond(f"HEAD /{BUCKET}/code/sourcedir.tar.gz", DENIED)
    uploads = Uploads(s3())
    uploads.renew_archive(f"s3://{BUCKET}/code/sourcedir.tar.gz", tmp_path)
    assert send(uploads) == 0


def test_uploads_need_no_permission_to_list(front: Front, archive: Path, data: Path) -> None:
    """Without this permission S3 answers 403 instead of 404."""
    for operation in (f"HEAD /{BUCKET}/code/sourcedir.tar.gz", f"GET /{BUCKET}"):
        front.respond(operation, DENIED)
    assert send_archive(archive) == 7
    uploads = Uploads(s3())
    uploads.add_folder(data, f"s3://{BUCKET}/{DATA}")
    assert send(uploads) == 6


def test_every_upload_request_names_the_buckets_owner(aws: dict[str, str], archive: Path) -> None:
    """S3 refuses a bucket of another owner. moto does not, so the test checks the requests."""
    named: Counter[str] = Counter()
    client = s3()
    client.meta.events.register(
        "before-call.s3",
        lambda model, params, **_: named.update({model.name: "expected" in str(params["headers"])}),
    )
    expect_owner(client, lambda bucket: "123456789012")
    uploads = Uploads(client)
    archive.write_bytes(bytes(PART_BYTES + 1))
    uploads.add_archive(archive, f"s3://{BUCKET}/code/sourcedir.tar.gz")
    uploads.add_folder(archive, f"s3://{BUCKET}/{DATA}")
    uploads.send()
    uploads.put_texts({f"s3://{BUCKET}/run/plan.json": "{}"})
    assert set(named) == {
        *("HeadObject", "ListObjectsV2", "PutObject"),
        *("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
    }
    assert all(named.values())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "numbers"
    for name, content in {"one": "1", "deep/two": "22", "deep/er/drei ü": "333"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_only_missing_and_changed_files_are_uploaded(aws: dict[str, str], data: Path) -> None:
    s3().put_object(
        Bucket=BUCKET,
        Key=f"{DATA}/one",
        Body=b"1",
        ChecksumAlgorithm="SHA256",
    )
    put(f"{DATA}/deep/two", b"torn file")
    uploads = Uploads(s3())
    uploads.add_folder(data, f"s3://{BUCKET}/{DATA}")
    assert send(uploads) == 5
    assert keys() == [
        f"{DATA}/deep/er/drei ü",
        f"{DATA}/deep/two",
        f"{DATA}/one",
    ]
    assert body_of(f"{DATA}/deep/two") == b"22"


def test_progress_counts_the_bytes_of_all_files(
    aws: dict[str, str], data: Path, archive: Path
) -> None:
    (data / "large").write_bytes(bytes(2 * PART_BYTES + 1))
    total = 7 + 6 + 2 * PART_BYTES + 1
    updates: list[tuple[int, int]] = []
    uploads = Uploads(s3())
    uploads.add_archive(archive, f"s3://{BUCKET}/code/sourcedir.tar.gz")
    uploads.add_folder(data, f"s3://{BUCKET}/{DATA}")
    uploads.send(lambda done, of: updates.append((done, of)))
    assert updates[-1] == (total, total)
    assert {of for _, of in updates} == {total}
    assert [done for done, _ in updates] == sorted(done for done, _ in updates)
    assert send(uploads) == 0


def test_many_files_are_sent_at_once(front: Front, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    meeting = threading.Barrier(4, timeout=30)  # each waits for four parallel requests

    def meet(_: Request) -> None:
        meeting.wait()

    for index in range(8):
        (folder / f"{index}").write_text("x")
        front.rules[f"PUT /{BUCKET}/many/{index}"] = meet
    uploads = Uploads(s3())
    uploads.add_folder(folder, f"s3://{BUCKET}/many")
    assert send(uploads) == 8


def test_a_folder_without_files_is_refused(aws: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    with pytest.raises(UserError, match="contains no file"):
        Uploads(s3()).add_folder(tmp_path / "empty", f"s3://{BUCKET}/{DATA}")


def test_a_file_deleted_before_its_upload_is_reported(aws: dict[str, str], data: Path) -> None:
    uploads = Uploads(s3())
    uploads.add_folder(data, f"s3://{BUCKET}/{DATA}")
    (data / "one").unlink()
    with pytest.raises(UserError, match=r"numbers/one cannot be read: No such file"):
        uploads.send()


def test_a_file_name_that_is_not_utf8_is_reported(aws: dict[str, str], data: Path) -> None:
    (data / os.fsdecode(b"caf\xe9")).write_text("latin 1")
    with pytest.raises(UserError, match="not UTF-8"):
        Uploads(s3()).add_folder(data, f"s3://{BUCKET}/{DATA}")
    assert keys() == []
