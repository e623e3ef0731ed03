"""Whose a bucket must be: S3 refuses a call on one that has come to belong to somebody else.

A name of a bucket that is deleted can be taken by any account, which would then be handed code, data and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

OWNERS_VARIABLE: Final = "CLOUDTRAIN_BUCKET_OWNERS"
"""JSON object from the name of a bucket to the account that must own it, for a process without a run.json."""

_MEMBER = "ExpectedBucketOwner"


def expect_owner(client: Any, owner_of: Callable[[str], str | None]) -> None:
    """Have every call of an S3 client name the account that must own the bucket.

    Args:
        client: boto3's, of the service `s3`.
        owner_of: Returns the account by the bucket's name, or None where nobody knows it: users read the buckets of
            others.
    """

    def name_owner(params: Mapping[str, Any], model: Any, **_: Any) -> dict[str, Any] | None:
        owner = owner_of(str(params.get("Bucket", "")))
        if owner is None or model.input_shape is None or _MEMBER not in model.input_shape.members:
            return None
        return {**params, _MEMBER: owner}

    client.meta.events.register("provide-client-params.s3", name_owner)


def owners_from(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the owners that a process was told of by its environment."""
    found: dict[str, str] = json.loads(environ.get(OWNERS_VARIABLE, "{}"))
    return found
