"""Expected bucket owners: S3 rejects calls on a bucket that belongs to another account.

After a bucket is deleted, any account can take its name and would then receive code, data and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from cloudtrain_runtime.contract.strict_json import load_json

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

OWNERS_VARIABLE: Final = "CLOUDTRAIN_BUCKET_OWNERS"
"""JSON object from the name of a bucket to the account that must own it, for a process without a run.json."""

_MEMBER = "ExpectedBucketOwner"


def expect_owner(client: S3Client, owner_of: Callable[[str], str | None]) -> None:
    """Make every call of an S3 client name the account that must own the bucket.

    Args:
        client: boto3's S3 client.
        owner_of: Returns the expected account by bucket name, or None if unknown: users also read buckets of other
            accounts.
    """

    def name_owner(params: Mapping[str, Any], model: Any, **_: Any) -> dict[str, Any] | None:
        owner = owner_of(str(params.get("Bucket", "")))
        if owner is None or model.input_shape is None or _MEMBER not in model.input_shape.members:
            return None
        return {**params, _MEMBER: owner}

    # The stubs lack that botocore uses what this handler returns.
    client.meta.events.register("provide-client-params.s3", name_owner)  # type: ignore[arg-type]


def owners_from(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the expected owners by bucket name from the environment."""
    found: dict[str, str] = load_json(environ.get(OWNERS_VARIABLE, "{}"))
    return found
