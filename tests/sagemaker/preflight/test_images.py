"""The check of the container image."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.aws_frontend import Answer, Front
from support.jobs import Cli
from support.preflight import ACCOUNT, SCRIPT, Checks, client, only_failure

from cloudtrain.errors import SpecError

pytestmark = pytest.mark.aws


def test_own_images(account: Front, checks: Checks) -> None:
    uri = f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/mine:1"
    own = f"cluster.image={uri}"
    assert "create-repository --repository-name mine" in only_failure(checks(own), "image").fix
    ecr = client("ecr")
    ecr.create_repository(repositoryName="mine")
    failure = only_failure(checks(own), "image")
    assert failure.detail == f"there is no image {uri}"
    assert "aws ecr list-images --registry-id 123456789012 --repository-name mine" in failure.fix
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "layers": [],
    }
    ecr.put_image(repositoryName="mine", imageManifest=json.dumps(manifest), imageTag="1")
    found = ecr.describe_images(repositoryName="mine")["imageDetails"][0]["imageDigest"]
    assert checks(own)["image"].detail == f"{uri} exists and is {found} now"
    pinned = uri.replace(":1", f"@{found}")
    assert checks(f"cluster.image={pinned}")["image"].detail == f"{pinned} exists"
    other = pinned.replace(found[-8:], "00000000")
    assert (
        only_failure(checks(f"cluster.image={other}"), "image").detail
        == f"there is no image {other}"
    )


def test_an_image_of_the_fips_endpoint_is_looked_up(account: Front, checks: Checks) -> None:
    uri = f"{ACCOUNT}.dkr.ecr-fips.us-west-2.amazonaws.com/mine:1"
    assert (
        "create-repository --repository-name mine"
        in only_failure(checks(f"cluster.image={uri}"), "image").fix
    )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/mine:1",
            "the image is in eu-west-1, but the job is in us-west-2",
        ),
        ("ghcr.io/team/train:2", "SageMaker pulls images from ECR, or from a private registry"),
    ],
)
def test_an_unusable_image_uri_is_rejected_by_the_plan(
    account: Front, checks: Checks, image: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        checks(f"cluster.image={image}")


def test_an_image_of_aws_is_looked_up_or_found_in_the_list(account: Front, checks: Checks) -> None:
    account.respond("BatchGetImage", Answer.denied())
    assert "in AWS's list of 20" in checks()["image"].detail
    failures = [
        {"imageId": {"imageTag": "x"}, "failureCode": "ImageNotFound", "failureReason": "x"}
    ]
    account.respond("BatchGetImage", Answer.json({"images": [], "failures": failures}))
    assert "there is no image 763104351884.dkr" in only_failure(checks(), "image").detail


def test_the_images_digest_is_stored_with_the_plan(
    account: Front, cli: Cli, job: Callable[..., Path]
) -> None:
    ecr = client("ecr")
    ecr.create_repository(repositoryName="mine")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "layers": [],
    }
    ecr.put_image(repositoryName="mine", imageManifest=json.dumps(manifest), imageTag="1")
    digest = ecr.describe_images(repositoryName="mine")["imageDetails"][0]["imageDigest"]
    image = f"cluster.image={ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/mine:1"
    path = job(SCRIPT, train_py="")
    done = cli("submit", path, "--set", image, "--json", environ={"CLOUDTRAIN_TRANSPORT": "boto3"})
    assert done.code == 0, done.err
    key = f"cloudtrain/{done.json['run']}/plan.json"
    plan = json.loads(client("s3").get_object(Bucket="cloudtrain-test", Key=key)["Body"].read())
    (found,) = (check for check in plan["checks"] if check["name"] == "image")
    assert found["detail"].endswith(f"mine:1 exists and is {digest} now")
