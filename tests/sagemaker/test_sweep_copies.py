"""The copy of an account's sweep in S3 and its lock, against moto over HTTP."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES

from cloudtrain.controllers.shared_folder import LockedError, LostError, SharedFolder
from cloudtrain.errors import UserError
from cloudtrain.features.sweeps.loader import load_sweep
from cloudtrain.features.sweeps.shared_copy import SharedSweeps
from cloudtrain.features.sweeps.stored_sweep import StoredSweep

pytestmark = pytest.mark.aws

BASE = "s3://cloudtrain-test/cloudtrain"
SWEEP = "digits-261123-101500-1a2b3c"


@pytest.fixture
def sweeps(aws: dict[str, str]) -> SharedSweeps:
    import boto3

    return SharedSweeps(boto3.client("s3", endpoint_url=aws["AWS_ENDPOINT_URL"]), BASE)


@pytest.fixture
def copy(sweeps: SharedSweeps) -> SharedFolder:
    return sweeps.copy_of(SWEEP)


def put_lock(copy: SharedFolder, owner: str) -> None:
    place = {"Bucket": "cloudtrain-test", "Key": f"cloudtrain/sweeps/{SWEEP}/lock.json"}
    copy.s3.put_object(**place, Body=json.dumps({"owner": owner}).encode())


def test_one_controller_at_a_time_has_the_lock(copy: SharedFolder) -> None:
    with copy.lock():
        first, other = copy.etag, SharedFolder(copy.s3, copy.uri, "sweep")
        with pytest.raises(UserError) as error, other.lock():
            pass
        assert socket.gethostname() in error.value.message
    with copy.lock():
        assert copy.etag != first


def test_the_lock_of_a_killed_controller_is_replaced(copy: SharedFolder) -> None:
    put_lock(copy, f"{socket.gethostname()}/999999999/aa")  # no process of this machine
    with copy.lock():
        assert not copy.is_lost
    put_lock(copy, "elsewhere/1/aa")  # it may be alive
    with pytest.raises(UserError), copy.lock():
        pass


def test_a_lost_lock_ends_the_controller(
    copy: SharedFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cloudtrain.controllers.shared_folder._RENEW_SECONDS", 0.05)
    with copy.lock():
        put_lock(copy, "elsewhere/1/aa")
        while not copy.is_lost:
            pass
        with pytest.raises(UserError):
            copy.store_state(tmp_path / "sweep.db")


def test_a_folder_fetches_only_what_another_wrote(sweeps: SharedSweeps, tmp_path: Path) -> None:
    sweep: Any = load_sweep(EXAMPLES / "sweep-digits" / "sweep.yaml")
    first = StoredSweep.create(tmp_path / "first", sweep, "sagemaker", ("digest", 1.5, 20))
    copy = sweeps.copy_of(first.id)
    first.database.write_bytes(b"trials of the first machine")
    copy.store_record(first.folder / "sweep.json")
    copy.store_state(first.database)
    assert not copy.fetch_state(first.database)
    assert sweeps.ids()[0] == first.id
    content = copy.read_record("sweep.json")
    assert content is not None
    second = StoredSweep.adopt(tmp_path / "second", content, EXAMPLES / "digits")
    assert (second.id, second.identity, second.sweep.job.base) == (
        first.id,
        first.identity,
        EXAMPLES / "digits",
    )
    assert (second.planned_trials, second.lowest_usd, second.digest) == (20, 1.5, "digest")
    assert copy.fetch_state(second.database)
    assert (second.folder / "sweep.db").read_bytes() == b"trials of the first machine"


def test_a_lock_whose_answer_was_lost_is_held(
    copy: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 sends the write again, and S3 refuses it because of the first one."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "aa")
    put_lock(copy, f"{socket.gethostname()}/{os.getpid()}/aa")
    with copy.lock():
        assert not copy.is_lost


def write_state(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "sweep.db"
    file.write_bytes(content)
    return file


def test_a_controller_that_slept_stores_no_state(copy: SharedFolder, tmp_path: Path) -> None:
    first = write_state(tmp_path / "first", b"1")
    assert not copy.fetch_state(first)
    copy.store_state(first)
    other = SharedFolder(copy.s3, copy.uri, "sweep")
    second = write_state(tmp_path / "second", b"")
    assert other.fetch_state(second)
    assert second.read_bytes() == b"1"
    other.store_state(write_state(tmp_path / "second", b"2"))
    with pytest.raises(LostError, match="another controller has taken over this sweep"):
        copy.store_state(write_state(tmp_path / "first", b"3"))
    assert copy.is_lost
    # What it has recorded is replaced by what the other one has stored.
    assert copy.fetch_state(first)
    assert first.read_bytes() == b"2"


def test_a_state_whose_answer_was_lost_is_stored(copy: SharedFolder, tmp_path: Path) -> None:
    """boto3 sends the write again, and S3 refuses it because of the first one."""
    file = write_state(tmp_path / "first", b"1")
    copy.fetch_state(file)
    copy.store_state(file)
    before = copy.state_etag
    copy.state_etag = None
    copy.store_state(file)
    assert copy.state_etag == before
    copy.store_state(write_state(tmp_path / "first", b"2"))


def test_environments_of_a_function_are_machines(
    copy: SharedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them can have the same host name, so a process id says nothing about another one."""
    monkeypatch.setenv("AWS_LAMBDA_LOG_STREAM_NAME", "2026/11/21/[$LATEST]one")
    put_lock(copy, f"{socket.gethostname()}/999999999/aa")
    with pytest.raises(LockedError), copy.lock():
        pass
    put_lock(copy, "2026-11-21-[$LATEST]two/999999999/aa")
    with pytest.raises(LockedError), copy.lock():
        pass
    put_lock(copy, "2026-11-21-[$LATEST]one/999999999/aa")
    with copy.lock():
        assert not copy.is_lost


def test_a_request_to_stop_reaches_the_holder(
    copy: SharedFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cloudtrain.controllers.shared_folder._RENEW_SECONDS", 0.05)
    file = tmp_path / "stop"
    with copy.lock(file):
        assert not file.exists()
        copy.s3.put_object(
            Bucket="cloudtrain-test", Key=f"cloudtrain/sweeps/{SWEEP}/stop", Body=b""
        )
        while not file.exists():
            pass
