"""Who submits what: one claim per request and code, in S3, so that any number of submits end with one job.

A claim is an object named by a plan's identity that holds a run id. S3 writes it for the first who asks and refuses the
others (`If-None-Match`, and `If-Match` to replace one: conditional writes, which S3 has known since 2024), so all who
submit the same thing at the same time take the same run id, and SageMaker takes a training job's name once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.strict_json import dump_json

_FOLDER = "requests"
_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409", "NoSuchKey", "404")
"""The last two are S3's answer to `If-Match` where the object has been deleted meanwhile."""


@dataclass(frozen=True)
class Claim:
    """What stands in S3: `run` is empty where it is no run id; `age_seconds` and `etag` are as S3 tells them."""

    run: str
    age_seconds: float
    etag: str


class Claims:
    """The claims below one prefix.

    Args:
        s3: boto3 client.
        base: Uri of the prefix.
    """

    def __init__(self, s3: Any, base: str) -> None:
        self._s3 = s3
        self._base = f"{base.rstrip('/')}/{_FOLDER}"

    def read(self, identity: str) -> Claim | None:
        """Return the claim on a request, or None when there is none."""
        from botocore.exceptions import ClientError

        try:
            answer = self._s3.get_object(**self._place(identity))
        except ClientError as error:
            # Of what is not there S3 says AccessDenied to whom may not list the bucket.
            if error.response["Error"]["Code"] in ("NoSuchKey", "404", "AccessDenied", "403"):
                return None
            raise
        body = answer["Body"].read()
        # Both times are S3's own: this machine's clock may be wrong.
        now = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return Claim(_run_of(body), _seconds_between(answer["LastModified"], now), answer["ETag"])

    def write(self, identity: str, run: str, *, over: Claim | None) -> bool:
        """Claim a request for a run; return False when somebody else was faster.

        Args:
            identity: The request's.
            run: The run's id.
            over: The claim to replace; None where there must be none.
        """
        condition = {"IfNoneMatch": "*"} if over is None else {"IfMatch": over.etag}
        return self._put(identity, run, condition)

    def overwrite(self, identity: str, run: str) -> None:
        """Claim a request whatever stands there."""
        self._put(identity, run, {})

    def _put(self, identity: str, run: str, condition: dict[str, str]) -> bool:
        from botocore.exceptions import ClientError

        try:
            self._s3.put_object(**self._place(identity), Body=dump_json({"run": run}).encode(), **condition)
        except ClientError as error:
            if error.response["Error"]["Code"] in _REFUSED:
                return False
            raise
        return True

    def _place(self, identity: str) -> dict[str, str]:
        bucket, key = split_uri(f"{self._base}/{identity}.json")
        return {"Bucket": bucket, "Key": key}


def _run_of(body: bytes) -> str:
    """Return the run id that a claim holds; empty when somebody has written something else there."""
    try:
        content = json.loads(body)
    except ValueError:
        return ""
    run = str(content.get("run", "")) if isinstance(content, dict) else ""
    return run if is_run_id(run) else ""


def _seconds_between(modified: Any, now: str | None) -> float:
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    moment = parsedate_to_datetime(now) if now else datetime.now(UTC)
    return max(0.0, float((moment - modified).total_seconds()))
