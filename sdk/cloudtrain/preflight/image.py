"""Check of the container image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cloudtrain import catalog
from cloudtrain.preflight.base import CheckContext, UnansweredError, command, is_denied
from cloudtrain.support.aws_names import ImageUri, parse_image
from cloudtrain.support.checks import Check, failed, passed
from cloudtrain_runtime.contract.aws_codes import code_of

_MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
)


def check_image(context: CheckContext) -> Iterator[Check]:
    """Check that the image exists. The plan has already checked that it is in ECR and in the job's region.

    Its manifest is requested, as by a pull. AWS's registries allow this, but not DescribeImages.
    """
    from botocore.exceptions import ClientError

    uri = context.plan.image
    image = parse_image(uri)
    if image is None:
        raise UnansweredError(f"{uri} is in a registry that AWS cannot be asked about")
    wanted = {"imageTag": image.tag or "latest"}
    if image.digest:
        wanted = {"imageDigest": image.digest}
    try:
        answer = context.client("ecr").batch_get_image(
            registryId=image.account,
            repositoryName=image.repository,
            imageIds=[wanted],
            acceptedMediaTypes=list(_MANIFESTS),
        )
    except ClientError as error:
        yield _check_without_registry(uri, image, error)
        return
    if answer["images"]:
        digest = answer["images"][0].get("imageId", {}).get("imageDigest", "")
        # The tag may point to another image when the job starts.
        current = f" and is {digest} now" if digest and not image.digest else ""
        yield passed("image", f"{uri} exists{current}")
        return
    look = command(
        *(
            "aws",
            "ecr",
            "list-images",
            "--registry-id",
            image.account,
            "--repository-name",
            image.repository,
        ),
        *("--region", image.region),
    )
    yield failed("image", f"there is no image {uri}", f"list the images: {look}")


def _check_without_registry(uri: str, image: ImageUri, error: Any) -> Check:
    is_missing = code_of(error) == "RepositoryNotFoundException"
    # The catalog's entries are those of every region.
    name = uri.partition("/")[2]
    listed = next((listed for listed in catalog.images() if name in (listed.gpu, listed.cpu)), None)
    if listed is not None and (is_missing or is_denied(error)):
        day = listed.sources["gpu"].date
        return passed("image", f"{uri} is in AWS's list of {day}; its registry could not be read")
    if not is_missing:
        raise error
    make = command(
        "aws",
        "ecr",
        "create-repository",
        "--repository-name",
        image.repository,
        "--region",
        image.region,
    )
    message = f"there is no repository {image.repository} in account {image.account}"
    return failed("image", message, f"correct cluster.image, or {make} and push the image")
