"""Checks of buckets, channels of data and the volume, and the owner that requests name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from support.aws_frontend import Answer, Front, Request
from support.jobs import Cli
from support.preflight import ACCOUNT, JOB, SCRIPT, Checks, client, only_failure, put

from cloudtrain.support.checks import Result

pytestmark = pytest.mark.aws


def test_a_bucket_that_is_missing(
    account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDTRAIN_BUCKET", "not-there")
    failure = only_failure(checks(), "bucket")
    assert failure.fix == "aws s3 mb s3://not-there --region us-west-2"


def test_a_bucket_in_another_region(
    account: Front, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    client("s3", region_name="eu-west-1").create_bucket(
        Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    monkeypatch.setenv("CLOUDTRAIN_BUCKET", "far-away")
    failure = only_failure(checks(), "bucket")
    assert failure.detail == "far-away is in eu-west-1, the job in us-west-2"
    assert "aws s3 mb s3://far-away-us-west-2 --region us-west-2" in failure.fix
    found = checks("data.train=s3://far-away/numbers", text=JOB)
    assert "SageMaker reads only buckets of the job's region" in found["data.train"].detail


def refuse_owner(request: Request) -> Answer | None:
    """Deny a request with an expected owner, as S3 does if another account owns the bucket. moto ignores it."""
    return Answer(b"", 403) if "x-amz-expected-bucket-owner" in request.headers else None


def test_a_bucket_of_another_account(account: Front, checks: Checks) -> None:
    account.rules["HEAD /cloudtrain-test"] = refuse_owner
    failure = only_failure(checks(text=SCRIPT), "bucket")
    assert "belongs to another account" in failure.detail
    assert f"a bucket of account {ACCOUNT}" in failure.fix


def test_a_bucket_that_cannot_be_read(account: Front, checks: Checks) -> None:
    account.respond("HEAD /cloudtrain-test", Answer(b"", 403))
    found = checks(text=SCRIPT)
    assert found["bucket"].result is Result.UNKNOWN
    assert "grant s3:ListBucket" in found["bucket"].fix


def test_only_our_bucket_is_queried_with_its_owner(account: Front, checks: Checks) -> None:
    client("s3").create_bucket(
        Bucket="shared", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    put("numbers/one", b"1", bucket="shared")
    account.requests.clear()
    assert checks("data.train=s3://shared/numbers")["data.train"].result is Result.PASS
    owners = {
        (request.operation.rpartition("/")[2], request.headers.get("x-amz-expected-bucket-owner"))
        for request in account.requests
        if request.operation.endswith(("/cloudtrain-test", "/shared"))
    }
    assert owners == {("cloudtrain-test", ACCOUNT), ("shared", None)}


def test_an_empty_prefix(account: Front, checks: Checks) -> None:
    put("nothing/")  # the console's empty folder
    failure = only_failure(checks("data.train=s3://cloudtrain-test/nothing"), "data.train")
    assert failure.detail == "there are no objects below s3://cloudtrain-test/nothing"
    assert failure.fix == "aws s3 sync FOLDER s3://cloudtrain-test/nothing"


def test_a_data_bucket_that_is_missing(account: Front, checks: Checks) -> None:
    assert (
        "no bucket not-there"
        in only_failure(checks("data.train=s3://not-there/x"), "data.train").detail
    )


def test_a_prefix_that_includes_neighbours_fails(account: Front, checks: Checks) -> None:
    assert checks("data.train=s3://cloudtrain-test/numbers")["data.train"].result is Result.PASS
    put("numbers-old/four", b"1")
    failure = only_failure(checks("data.train=s3://cloudtrain-test/numbers"), "data.train")
    assert "also includes s3://cloudtrain-test/numbers-old/" in failure.detail
    assert failure.fix == "for the folder only, write s3://cloudtrain-test/numbers/"
    assert checks("data.train=s3://cloudtrain-test/numbers/")["data.train"].result is Result.PASS


@pytest.mark.parametrize(
    ("uri", "detail", "fix"),
    [
        (
            "single.csv",
            "also includes s3://cloudtrain-test/single.csv.bak",
            "move the object to a separate folder",
        ),
        (
            "sing",
            "there is no object or folder s3://cloudtrain-test/sing;",
            "write s3://cloudtrain-test/single.csv",
        ),
        (
            "num",
            "there is no object or folder s3://cloudtrain-test/num;",
            "write s3://cloudtrain-test/numbers/",
        ),
    ],
)
def test_an_ambiguous_uri_names_the_remedy(
    account: Front, checks: Checks, uri: str, detail: str, fix: str
) -> None:
    put("single.csv", b"1")
    put("single.csv.bak", b"1")
    failure = only_failure(checks(f"data.train=s3://cloudtrain-test/{uri}"), "data.train")
    assert detail in failure.detail
    assert fix in failure.fix


def test_fewer_objects_than_shards_fail(account: Front, checks: Checks) -> None:
    sharded = "data.train={uri: 's3://cloudtrain-test/numbers/', sharded: true}"
    assert checks(sharded, "cluster.instances=3")["data.train"].result is Result.PASS
    failure = only_failure(checks(sharded, "cluster.instances=4"), "data.train")
    assert "--set data.train.sharded=false" in failure.fix


def listing(count: int, size: int, *, token: str = "") -> Answer:
    """Return a page of a listing; `token` continues it."""
    objects = "".join(
        f"<Contents><Key>numbers/{i}</Key><Size>{size}</Size></Contents>" for i in range(count)
    )
    more = ""
    if token:
        more = (
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        )
    text = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{more}{objects}</ListBucketResult>'
    return Answer(text.encode(), 200, {"Content-Type": "application/xml"})


def serve_listing(front: Front, answer: Answer) -> None:
    client("s3").create_bucket(
        Bucket="large", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    front.rules["GET /large"] = lambda request: answer


LARGE = "data.train={uri: 's3://large/numbers/'}"


def test_a_volume_that_is_too_small(account: Front, checks: Checks) -> None:
    serve_listing(account, listing(4, 70 * 10**9))
    failure = only_failure(checks(LARGE), "volume")
    assert "280.0 GB are downloaded to each instance" in failure.detail
    assert "cluster.volume: 300GB" in failure.fix
    assert checks(LARGE, "cluster.volume=300GB")["volume"].result is Result.PASS
    assert checks(LARGE.replace("}", ", mode: FastFile}"))["volume"].result is Result.PASS
    shared_out = LARGE.replace("}", ", sharded: true}")
    assert only_failure(checks(shared_out), "volume").detail.startswith("140.0 GB")
    assert checks(shared_out, "cluster.volume=150GB")["volume"].result is Result.PASS


def test_local_nvme_replaces_the_volume(account: Front, checks: Checks) -> None:
    serve_listing(account, listing(4, 70 * 10**9))
    assert checks(LARGE, "cluster.instance_type=ml.p4d.24xlarge")["volume"].result is Result.PASS


def test_a_long_listing_is_a_lower_bound(account: Front, checks: Checks) -> None:
    serve_listing(account, listing(2, 10**6))
    numbers = itertools.count()
    account.rules["GET /large"] = lambda _: listing(2, 10**6, token=f"page-{next(numbers)}")
    found = checks(LARGE)
    assert "at least 2 objects" in found["data.train"].detail
    assert found["volume"].result is Result.UNKNOWN
    assert account.seen.count("GET /large") == 20


def test_local_data_counts_towards_the_volume(
    account: Front, checks: Checks, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    with (tmp_path / "here" / "sparse").open("wb") as file:
        file.truncate(40 * 10**9)
    found = checks("data.train=../here")
    assert "data.train" not in found
    assert "40.0 GB are downloaded" in only_failure(found, "volume").detail


def test_every_write_of_a_submit_names_the_buckets_owner(
    account: Front, cli: Cli, job: Callable[..., Path]
) -> None:
    path = job(SCRIPT + "data: {train: numbers}\n", train_py="")
    (path.parent / "numbers").mkdir()
    (path.parent / "numbers" / "one").write_text("1")
    account.requests.clear()
    done = cli("submit", path, environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    owners = [
        r.headers.get("x-amz-expected-bucket-owner")
        for r in account.requests
        if "/cloudtrain-test" in r.operation
    ]
    assert (
        len([r for r in account.requests if r.operation.startswith("PUT /cloudtrain-test/")]) == 5
    )
    assert set(owners) == {ACCOUNT}
