"""The copy of an account's sweep in S3 and its lock, against moto over HTTP."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from support.jobs import EXAMPLES

from cloudtrain.errors import UserError
from cloudtrain.features.sweeps.loader import load_sweep
from cloudtrain.features.sweeps.shared_copy import SharedCopy, SharedSweeps
from cloudtrain.features.sweeps.stored_sweep import StoredSweep

pytestmark = pytest.mark.aws

BASE = "s3://cloudtrain-test/cloudtrain"
SWEEP = "digits-261123-101500-1a2b3c"


@pytest.fixture
def sweeps(aws: dict[str, str]) -> SharedSweeps:
    import boto3

    return SharedSweeps(boto3.client("s3", endpoint_url=aws["AWS_ENDPOINT_URL"]), BASE)


@pytest.fixture
def copy(sweeps: SharedSweeps) -> SharedCopy:
    return sweeps.copy_of(SWEEP)


def put_lock(copy: SharedCopy, owner: str) -> None:
    place = {"Bucket": "cloudtrain-test", "Key": f"cloudtrain/sweeps/{SWEEP}/lock.json"}
    copy.s3.put_object(**place, Body=json.dumps({"owner": owner}).encode())


def test_one_controller_at_a_time_has_the_lock(copy: SharedCopy) -> None:
    with copy.lock():
        first, other = copy.etag, SharedCopy(copy.s3, copy.uri)
        with pytest.raises(UserError) as error, other.lock():
            pass
        assert socket.gethostname() in error.value.message
    with copy.lock():
        assert copy.etag != first


def test_the_lock_of_a_killed_controller_is_replaced(copy: SharedCopy) -> None:
    put_lock(copy, f"{socket.gethostname()}/999999999/aa")  # no process of this machine
    with copy.lock():
        assert not copy.is_lost
    put_lock(copy, "elsewhere/1/aa")  # it may be alive
    with pytest.raises(UserError), copy.lock():
        pass


def test_a_lost_lock_ends_the_controller(
    copy: SharedCopy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cloudtrain.features.sweeps.shared_copy._RENEW_SECONDS", 0.05)
    with copy.lock():
        put_lock(copy, "elsewhere/1/aa")
        while not copy.is_lost:
            pass
        with pytest.raises(UserError):
            copy.publish_database(tmp_path, tmp_path / "sweep.db")


def test_a_folder_fetches_only_what_another_wrote(sweeps: SharedSweeps, tmp_path: Path) -> None:
    sweep: Any = load_sweep(EXAMPLES / "sweep-digits" / "sweep.yaml")
    first = StoredSweep.create(tmp_path / "first", sweep, "sagemaker", ("digest", 1.5, 20))
    copy = sweeps.copy_of(first.id)
    (first.folder / "sweep.db").write_bytes(b"trials of the first machine")
    copy.publish(first.folder, first.folder / "sweep.db")
    assert not copy.fetch_database(first.folder)
    assert sweeps.ids()[0] == first.id
    content = copy.read_file()
    assert content is not None
    second = StoredSweep.adopt(tmp_path / "second", content, EXAMPLES / "digits")
    assert (second.id, second.identity, second.sweep.job.base) == (
        first.id,
        first.identity,
        EXAMPLES / "digits",
    )
    assert (second.planned_trials, second.lowest_usd, second.digest) == (20, 1.5, "digest")
    assert copy.fetch_database(second.folder)
    assert (second.folder / "sweep.db").read_bytes() == b"trials of the first machine"


def test_a_lock_whose_answer_was_lost_is_held(
    copy: SharedCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 sends the write again, and S3 refuses it because of the first one."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "aa")
    put_lock(copy, f"{socket.gethostname()}/{os.getpid()}/aa")
    with copy.lock():
        assert not copy.is_lost
