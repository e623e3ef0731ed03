"""S3 objects over HTTP: with moto and with a lighter server that injects faults."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.s3_faults import FaultPlan
from support.s3_server import S3Server, serve_s3

from cloudtrain_runtime.s3.objects import RangeReader, S3Error, S3Objects
from cloudtrain_runtime.s3.uploads import part_bytes

MIB = 1 << 20
BUCKET = "cloudtrain-test"
Build = Callable[..., S3Objects]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        yield running


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The lighter server without faults, with an empty bucket. The AWS variables point to it."""
    set_account(server.endpoint, monkeypatch)
    server.reset(BUCKET)
    return server


@pytest.fixture(params=["light", "moto"])
def objects(request: pytest.FixtureRequest) -> S3Objects:
    """Objects below an empty prefix of either server."""
    request.getfixturevalue("s3" if request.param == "light" else "aws")
    return S3Objects(f"s3://{BUCKET}/run/checkpoints")


def set_account(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv(
        "AWS_MAX_ATTEMPTS", "4"
    )  # with the default of 10, a permanent fault takes a minute


def some_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count)  # noqa: S311


def upload(objects: S3Objects, key: str, data: bytes, step_bytes: int = 3 * MIB) -> None:
    with objects.create(key) as writer:
        for start in range(0, len(data), step_bytes):
            writer.write(memoryview(data)[start : start + step_bytes])


def dangling_uploads() -> int:
    import boto3

    answer = boto3.session.Session().client("s3").list_multipart_uploads(Bucket=BUCKET)
    return len(answer.get("Uploads", []))


def test_objects_are_put_read_listed_and_deleted(objects: S3Objects) -> None:
    assert objects.sizes() == {}
    assert objects.read("a.json") is None
    objects.put("a.json", b"one")
    objects.put("a.json", b"three")
    objects.put("step-1/b +ä&.bin", b"")
    assert objects.read("a.json") == b"three"
    assert objects.sizes() == {"a.json": 5, "step-1/b +ä&.bin": 0}
    assert objects.sizes("step-") == {"step-1/b +ä&.bin": 0}
    objects.delete(["a.json", "step-1/b +ä&.bin", "never.there"])
    objects.delete([])
    assert objects.sizes() == {}


@pytest.mark.parametrize("count", [0, 5, 20 * MIB + 1])
def test_an_upload_stores_the_bytes_that_were_written(objects: S3Objects, count: int) -> None:
    data = some_bytes(count)
    upload(objects, "shard", data)
    assert objects.sizes() == {"shard": count}
    assert objects.read("shard") == data


def test_a_buffer_may_change_after_it_is_written(s3: S3Server) -> None:
    objects, buffer = S3Objects(f"s3://{BUCKET}/p"), bytearray(5 * MIB)
    with objects.create("shard") as writer:
        for value in (1, 2, 3):
            buffer[:] = bytes([value]) * len(buffer)
            writer.write(memoryview(buffer))
    assert objects.read("shard") == b"".join(bytes([value]) * len(buffer) for value in (1, 2, 3))


@pytest.mark.parametrize("count", [3, 20 * MIB])
def test_an_exception_leaves_no_object_and_no_upload(objects: S3Objects, count: int) -> None:
    def fail() -> None:
        with objects.create("shard") as writer:
            writer.write(some_bytes(count))
            raise KeyError("an error of the writer")

    with pytest.raises(KeyError, match="an error of the writer"):
        fail()
    deadline = time.monotonic() + 10
    while dangling_uploads() and time.monotonic() < deadline:
        time.sleep(0.05)  # the connector aborts in the background
    assert dangling_uploads() == 0
    assert objects.sizes() == {}


def test_blocks_are_read_in_any_order(objects: S3Objects) -> None:
    data, block = some_bytes(5 * MIB + 17), MIB
    objects.put("shard", data)
    offsets = list(range(0, len(data), block))
    for order in (
        offsets,
        [0, 4 * block, 2 * block, 3 * block, 0],
        random.Random(1).sample(offsets, 6),  # noqa: S311
    ):
        with objects.open("shard", len(data)) as source:
            for offset in order:
                assert source.read_at(offset, block) == data[offset : offset + block]
            assert source.read_at(len(data) - 2, 100) == data[-2:]
            assert source.read_at(len(data), 100) == b""


def test_jumps_leave_few_downloads_behind() -> None:
    """A load of some tensors jumps within the object: what was read ahead is cancelled, or waits for its turn."""
    reading, threads = threading.get_ident(), set[int]()
    lock, fetched = threading.Lock(), list[int]()

    def fetch(offset: int, end: int) -> bytes:
        with lock:
            fetched.append(offset)
            threads.add(threading.get_ident())
        return bytes(end - offset)

    reader = RangeReader(fetch, 100_000)
    for block in range(100, 10_000, 100):  # two blocks in order, then a jump
        reader.read_at(block * 10, 10)
        reader.read_at(block * 10 + 10, 10)
    reader.close()
    assert len(threads - {reading}) <= 4
    assert not [each for each in threading.enumerate() if each.name == "download"]


def test_a_missing_object_cannot_be_read_by_ranges(objects: S3Objects) -> None:
    with (
        objects.open("nothing", 100) as source,
        pytest.raises(S3Error, match="there is no such object"),
    ):
        source.read_at(0, 100)


def test_reading_past_the_end_of_an_object_is_an_error(objects: S3Objects) -> None:
    objects.put("shard", b"12345")
    with objects.open("shard", 100) as source:
        assert source.read_at(0, 8) == b"12345"
        with pytest.raises(S3Error, match="shorter than expected"):
            source.read_at(8, 8)


def test_more_objects_than_a_page_are_listed_and_deleted(s3: S3Server) -> None:
    objects = S3Objects(f"s3://{BUCKET}/many")
    keys = [f"step-{number:05d}/file" for number in range(1001)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: objects.put(key, b"x"), keys))
    assert sorted(objects.sizes()) == keys
    before = s3.counts()["DeleteObjects"]
    objects.delete(iter(keys))
    assert s3.counts()["DeleteObjects"] == before + 2
    assert objects.sizes() == {}


def test_exactly_one_of_many_conditional_writes_succeeds(s3: S3Server) -> None:
    """S3 guarantees this. moto checks and writes without a lock, so that two writes can succeed there."""
    objects = S3Objects(f"s3://{BUCKET}/run/checkpoints")
    with ThreadPoolExecutor(12) as threads:
        won = list(
            threads.map(lambda n: objects.put_new("claim", f"attempt {n}".encode()), range(12))
        )
    assert won.count(True) == 1
    assert objects.read("claim") == f"attempt {won.index(True)}".encode()
    assert not objects.put_new("claim", f"attempt {won.index(True)}".encode())
    objects.put("claim", b"an unconditional write succeeds")


def test_clients_work_in_a_forked_process_and_its_parent(s3: S3Server) -> None:
    objects = S3Objects(f"s3://{BUCKET}/forked")
    upload(objects, "parent", b"parent")
    child = multiprocessing.get_context("fork").Process(
        target=upload, args=(objects, "child", b"child")
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    upload(objects, "after", b"after")
    assert objects.sizes() == {"parent": 6, "child": 5, "after": 5}


def test_part_sizes_grow_up_to_the_largest_object() -> None:
    assert part_bytes(0) == 8 * MIB
    assert sum(part_bytes(number) for number in range(10_000)) >= 5 << 40


def test_uploads_use_the_profile_of_the_environment(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[default]\naws_access_key_id=OTHER\naws_secret_access_key=s\n"
    text += "[team]\naws_access_key_id=TEAM\naws_secret_access_key=s\n"
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text(text)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "team")
    before = s3.counts()["PutObject"] + s3.counts()["UploadPart"]
    upload(S3Objects(f"s3://{BUCKET}/p"), "shard", b"data")
    assert s3.counts()["PutObject"] + s3.counts()["UploadPart"] > before
    assert "OTHER" not in s3.access_keys()
    assert "TEAM" in s3.access_keys()


def test_credentials_of_a_container_are_renewed(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{s3.endpoint}/_/credentials")
    objects = S3Objects(f"s3://{BUCKET}/p")
    objects.put("first", b"1")
    used = [key for key in s3.access_keys() if key.startswith("CONTAINER")]
    s3.set_faults(FaultPlan(expired_keys=tuple(used)))
    objects.put("second", b"2")
    assert objects.sizes() == {"first": 1, "second": 1}


@pytest.mark.parametrize("kind", ["throttled", "broken", "reset"])
def test_an_upload_survives_transient_faults(s3: S3Server, kind: str) -> None:
    objects, data = S3Objects(f"s3://{BUCKET}/p"), some_bytes(20 * MIB)
    s3.set_faults(
        FaultPlan(max_faults=3, skip=1, operations=".*Part|.*MultipartUpload", **{kind: 0.6})
    )
    before = s3.counts()[kind]
    upload(objects, "shard", data)
    assert s3.counts()[kind] == before + 3
    assert objects.read("shard") == data


def test_an_upload_succeeds_if_its_last_response_is_lost(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, data = S3Objects(f"s3://{BUCKET}/p"), some_bytes(20 * MIB)
    s3.set_faults(FaultPlan(max_faults=1, lost=1.0, operations="CompleteMultipartUpload"))
    upload(objects, "shard", data)
    assert objects.read("shard") == data


@pytest.mark.parametrize("kind", ["throttled", "broken", "reset", "torn", "slow"])
def test_reading_survives_transient_faults(s3: S3Server, kind: str) -> None:
    objects, data = S3Objects(f"s3://{BUCKET}/p"), some_bytes(6 * MIB)
    objects.put("shard", data)
    s3.set_faults(FaultPlan(max_faults=3, operations="GetObject", **{kind: 0.7}))
    with objects.open("shard", len(data)) as source:
        assert b"".join(source.read_at(start, MIB) for start in range(0, len(data), MIB)) == data
    assert objects.read("shard") == data


@pytest.mark.parametrize("kind", ["throttled", "broken", "reset", "lost", "conflict"])
def test_a_conditional_write_survives_transient_faults(s3: S3Server, kind: str) -> None:
    objects = S3Objects(f"s3://{BUCKET}/p")
    s3.set_faults(FaultPlan(max_faults=2, operations="PutObject", **{kind: 1.0}))
    assert objects.put_new("claim", b"mine")
    assert objects.read("claim") == b"mine"
    s3.set_faults(FaultPlan(max_faults=2, operations="PutObject", **{kind: 1.0}))
    assert not objects.put_new("claim", b"theirs")
    assert objects.read("claim") == b"mine"


def test_listing_and_deleting_survive_transient_faults(s3: S3Server) -> None:
    objects = S3Objects(f"s3://{BUCKET}/p")
    objects.put("a", b"1")
    s3.set_faults(FaultPlan(max_faults=4, throttled=0.4, broken=0.4, lost=0.4))
    assert objects.sizes() == {"a": 1}
    objects.delete(["a"])
    assert objects.sizes() == {}


def test_a_truncated_upload_shows_in_the_sizes(s3: S3Server) -> None:
    objects = S3Objects(f"s3://{BUCKET}/p")
    s3.set_faults(FaultPlan(truncated=1.0, max_faults=1, operations="PutObject|UploadPart"))
    upload(objects, "shard", bytes(MIB))
    assert objects.sizes() == {"shard": MIB // 2}


def test_the_server_rejects_bytes_with_a_wrong_checksum(s3: S3Server) -> None:
    import boto3

    client = boto3.session.Session().client("s3")
    with pytest.raises(client.exceptions.ClientError, match="BadDigest"):
        client.put_object(Bucket=BUCKET, Key="x", Body=b"data", ChecksumCRC32="AAAAAA==")


PERMANENT = {
    "throttled": "S3 throttled every attempt",
    "broken": "S3 failed on every attempt",
    "reset": "the connection was lost",
    "expired": "the credentials have expired",
    "denied": "access is denied",
}


@pytest.mark.parametrize("kind", PERMANENT)
def test_a_failed_upload_names_the_object_and_the_cause(
    s3: S3Server, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    objects = S3Objects(f"s3://{BUCKET}/p")
    objects.sizes()
    before = s3.counts()[kind]
    s3.set_faults(FaultPlan(skip=2, **{kind: 1.0}))
    with pytest.raises(S3Error, match=PERMANENT[kind]) as caught:
        upload(objects, "shard", some_bytes(30 * MIB))
    assert f"s3://{BUCKET}/p/shard" in str(caught.value)
    assert s3.counts()[kind] - before <= 10, "the parts and the abort, with two attempts each"
    s3.set_faults(FaultPlan())
    assert objects.sizes() == {}


@pytest.mark.parametrize("kind", [*PERMANENT, "torn"])
def test_every_failed_request_names_the_cause(
    s3: S3Server, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr("cloudtrain_runtime.s3.objects._READ_PAUSES_SECONDS", (0.01, 0.01))
    objects = S3Objects(f"s3://{BUCKET}/p")
    objects.put("a", bytes(MIB))
    s3.set_faults(FaultPlan(**{kind: 1.0}))
    cause = PERMANENT.get(kind, "the connection was lost")
    with pytest.raises(S3Error, match=cause):
        objects.read("a")
    with objects.open("a", MIB) as source, pytest.raises(S3Error, match=cause):
        source.read_at(0, MIB)
    if kind == "torn":
        return
    for request in (
        lambda: objects.put("b", b"1"),
        lambda: objects.put_new("b", b"1"),
        objects.sizes,
        lambda: objects.delete(["a"]),
    ):
        with pytest.raises(S3Error, match=cause):
            request()


def test_a_killed_server_is_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with serve_s3(tmp_path / "s3") as server:
        set_account(server.endpoint, monkeypatch)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        server.reset(BUCKET)
        objects = S3Objects(f"s3://{BUCKET}/p")
        upload(objects, "kept", b"kept")

        def upload_during_kill() -> None:
            with objects.create("shard") as writer:
                writer.write(some_bytes(9 * MIB))
                server.kill()

        with pytest.raises(S3Error, match="the connection was lost"):
            upload_during_kill()
        with pytest.raises(S3Error, match="the connection was lost"):
            objects.sizes()
        server.start()
        assert objects.sizes() == {"kept": 4}
        assert objects.read("kept") == b"kept"


def test_a_missing_bucket_is_named(objects: S3Objects) -> None:
    missing = S3Objects("s3://no-such-bucket/p")
    for request in (missing.sizes, lambda: missing.read("a"), lambda: upload(missing, "a", b"1")):
        with pytest.raises(S3Error, match=r"s3://no-such-bucket/p.*there is no such bucket"):
            request()


def test_missing_credentials_are_the_reported_cause(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    objects = S3Objects(f"s3://{BUCKET}/p")
    for request in (objects.sizes, lambda: upload(objects, "a", b"1")):
        with pytest.raises(S3Error, match="there are no credentials"):
            request()
