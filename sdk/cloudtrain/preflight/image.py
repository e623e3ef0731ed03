"""Check of the container image."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cloudtrain import catalog
from cloudtrain.preflight.base import (
    Check,
    CheckContext,
    UnansweredError,
    command,
    error_code,
    failed,
    is_denied,
    passed,
)

_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[a-z0-9._/-]+?)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
)


@dataclass(frozen=True)
class ImageUri:
    """An image in ECR. `identifier` is the tag or digest for ECR's API."""

    account: str
    region: str
    repository: str
    identifier: dict[str, str]


def parse_image(uri: str) -> ImageUri | None:
    """Return the parts of an image's URI, or None if it is not in ECR."""
    match = _ECR.fullmatch(uri)
    if match is None:
        return None
    identifier = {"imageDigest": match["digest"]} if match["digest"] else {"imageTag": match["tag"] or "latest"}
    return ImageUri(match["account"], match["region"], match["repository"], identifier)


def check_image(context: CheckContext) -> Iterator[Check]:
    """Check that the image exists. The plan has already checked that it is in ECR and in the job's region."""
    uri = context.plan.image
    image = parse_image(uri)
    if image is None:
        raise UnansweredError(f"{uri} is not in ECR")
    yield _check_registry(context, uri, image)


def _check_registry(context: CheckContext, uri: str, image: ImageUri) -> Check:
    """Request the manifest, as a pull does. AWS's registries allow this, but not DescribeImages."""
    from botocore.exceptions import ClientError

    try:
        answer = context.client("ecr").batch_get_image(
            registryId=image.account,
            repositoryName=image.repository,
            imageIds=[image.identifier],
            acceptedMediaTypes=list(_MANIFESTS),
        )
    except ClientError as error:
        is_missing = error_code(error) == "RepositoryNotFoundException"
        listed = _find_listed(uri)
        if listed is not None and (is_missing or is_denied(error)):
            day = listed.sources["gpu"].date
            return passed("image", f"{uri} is in AWS's list of {day}; its registry could not be read")
        if not is_missing:
            raise
        return failed(
            "image",
            f"there is no repository {image.repository} in account {image.account}",
            _create_repository_hint(image),
        )
    if answer["images"]:
        digest = answer["images"][0].get("imageId", {}).get("imageDigest", "")
        # The tag may point to another image when the job starts.
        current = f" and is {digest} now" if digest and "imageTag" in image.identifier else ""
        return passed("image", f"{uri} exists{current}")
    return failed("image", f"there is no image {uri}", _list_images_hint(image))


def _find_listed(uri: str) -> catalog.Image | None:
    """Return the catalog's entry of an image, regardless of the region."""
    name = uri.partition("/")[2]
    return next((listed for listed in catalog.images() if name in (listed.gpu, listed.cpu)), None)


def _create_repository_hint(image: ImageUri) -> str:
    make = ("aws", "ecr", "create-repository", "--repository-name", image.repository, "--region", image.region)
    return f"correct cluster.image, or {command(*make)} and push the image"


def _list_images_hint(image: ImageUri) -> str:
    look = command(
        *("aws", "ecr", "list-images", "--registry-id", image.account, "--repository-name", image.repository),
        *("--region", image.region),
    )
    return f"list the images: {look}"
