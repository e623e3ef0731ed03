"""Locks in S3: one corpus of objects for all that hold locks, with any clock of the machine and of S3."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from cloudtrain.backends.sagemaker.submit_lock import SubmitLocks
from cloudtrain.backends.sagemaker.uploads import Uploads
from cloudtrain.controllers.shared_folder import SharedFolder
from cloudtrain.errors import CloudError, UserError
from simulation.network import Network
from simulation.services import Account, Answer, Request, StoredObject
from simulation.world import World

RUN = "demo-261123-101500-1a2b3c"
OWNER = "elsewhere/1/aa"
HOLDER = json.dumps({"run": RUN, "owner": OWNER}).encode()
FRESH, OLD = 30.0, 301.0
WEEK = 7 * 86400.0
BASE = "s3://bucket/cloudtrain"
SWEEP = f"sweeps/{RUN}"
REQUEST = "0123456789abcdef"
KEYS = {
    "submit": f"cloudtrain/requests/{REQUEST}.json",
    "sweep": f"cloudtrain/{SWEEP}/lock.json",
}


@dataclass(frozen=True)
class Lock:
    """A lock object, what a submit reads in it, and whether a sweep's controller may replace it."""

    body: bytes
    age_seconds: float
    run: str
    is_free: bool


LOCKS = {
    "fresh": Lock(HOLDER, FRESH, RUN, is_free=False),
    "expired": Lock(HOLDER, OLD, RUN, is_free=True),
    "released": Lock(b'{"owner": "", "run": ""}', FRESH, "", is_free=True),
    "damaged": Lock(HOLDER[:-1], FRESH, "", is_free=False),
    "damaged and expired": Lock(HOLDER[:-1], OLD, "", is_free=True),
    "not UTF-8": Lock(b'{"run": "\xff"}', FRESH, "", is_free=False),
    "empty": Lock(b"", FRESH, "", is_free=False),
    "a list": Lock(b"[]", FRESH, "", is_free=False),
    "nested deeply": Lock(b"[" * 100_000, FRESH, "", is_free=False),
    "of another version": Lock(b'{"version": 2, "held": {}}', FRESH, "", is_free=False),
    "of another type": Lock(b'{"run": 1, "owner": null}', FRESH, "", is_free=False),
}


class CutShort(Account):
    """An account from which half of each object arrives."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        size = {"Content-Length": str(len(found.body))}
        return Answer(found.status, found.body[: len(found.body) // 2], {**found.headers, **size})


class WithoutDate(Account):
    """An account behind a proxy that removes the date of a response."""

    def answer(self, request: Request) -> Answer:
        found = super().answer(request)
        kept = {name: value for name, value in found.headers.items() if name != "Date"}
        return Answer(found.status, found.body, kept)


class Bucket:
    """A bucket whose clock is `ahead` seconds ahead of the machine's."""

    def __init__(self, kind: type[Account] = Account, ahead: float = 0.0) -> None:
        self._world, self._ahead = World(0), ahead
        self._account = kind(self._now)
        self.objects = self._account.buckets["bucket"] = {}

    def _now(self) -> float:
        return self._world.now + self._ahead

    def put(self, key: str, body: bytes, age_seconds: float = 0.0) -> None:
        self.objects[key] = StoredObject(body, self._now() - age_seconds)

    def run(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of a call with a client of S3."""
        self._world = World(0)
        Network(self._world, self._account)
        session = boto3.Session("key", "secret", region_name="us-west-2")
        actor = self._world.start("client", lambda: call(session.client("s3")))
        self._world.run()
        if actor.error is not None:
            raise actor.error
        return actor.result


def copy_of(s3: Any) -> SharedFolder:
    return SharedFolder(s3, f"{BASE}/{SWEEP}", "sweep")


def hold(s3: Any) -> str:
    """Hold the lock of a sweep; return its content meanwhile."""
    copy = copy_of(s3)
    with copy.lock():
        held = s3.get_object(Bucket="bucket", Key=KEYS["sweep"])
        assert held["ETag"] == copy.etag
        return str(json.loads(held["Body"].read())["owner"])


@pytest.mark.parametrize("ahead", [0.0, WEEK, -WEEK])
@pytest.mark.parametrize("name", LOCKS)
def test_each_holder_survives_each_lock(name: str, ahead: float) -> None:
    lock, bucket = LOCKS[name], Bucket(ahead=ahead)
    for key in KEYS.values():
        bucket.put(key, lock.body, lock.age_seconds)

    def submit(s3: Any) -> None:
        locks = SubmitLocks(s3, BASE)
        found = locks.read(REQUEST)
        assert found is not None
        assert found.run == lock.run
        assert lock.age_seconds - 2 < found.age_seconds < lock.age_seconds + 2
        assert locks.acquire(REQUEST, "first", replace=found)
        assert not locks.acquire(REQUEST, "second", replace=found)

    bucket.run(submit)
    assert json.loads(bucket.objects[KEYS["submit"]].body) == {"run": "first"}
    if lock.is_free:
        assert bucket.run(hold)
        return
    with pytest.raises(UserError, match="a controller of this sweep runs already"):
        bucket.run(hold)
    assert bucket.objects[KEYS["sweep"]].body == lock.body


def test_where_no_lock_is_the_first_one_has_it() -> None:
    bucket = Bucket()

    def submit(s3: Any) -> None:
        locks = SubmitLocks(s3, BASE)
        assert locks.read(REQUEST) is None
        assert locks.acquire(REQUEST, "first", replace=None)
        assert not locks.acquire(REQUEST, "second", replace=None)
        assert locks.acquire(REQUEST, "first", replace=None), (
            "its response was lost, and it is sent again"
        )

    bucket.run(submit)
    assert bucket.run(hold)
    assert json.loads(bucket.objects[KEYS["sweep"]].body)["owner"] == ""


def test_a_copy_that_arrives_in_part_is_no_traceback(tmp_path: Path) -> None:
    bucket = Bucket(CutShort)
    bucket.put(f"cloudtrain/{SWEEP}/sweep.db", b"a database")
    bucket.put(f"cloudtrain/{SWEEP}/sweep.json", b"{}" * 10)
    with pytest.raises(CloudError, match=r"could not read .*sweep[.]db"):
        bucket.run(lambda s3: copy_of(s3).fetch_state(tmp_path / "sweep.db"))
    with pytest.raises(CloudError, match=r"could not read .*sweep[.]json"):
        bucket.run(lambda s3: copy_of(s3).read_record("sweep.json"))


def test_a_response_without_a_date_is_no_traceback(tmp_path: Path) -> None:
    bucket = Bucket(WithoutDate)
    code = tmp_path / "code.tar.gz"
    code.write_bytes(b"the code")

    def upload(s3: Any) -> None:
        for _ in range(2):
            uploads = Uploads(s3)
            uploads.add_archive(code, f"{BASE}/code/code.tar.gz")
            uploads.send()

    bucket.run(upload)
    assert bucket.objects["cloudtrain/code/code.tar.gz"].body == b"the code"
    bucket.run(lambda s3: SubmitLocks(s3, BASE).overwrite(REQUEST, RUN))
    lock = bucket.run(lambda s3: SubmitLocks(s3, BASE).read(REQUEST))
    assert lock.run == RUN
