"""Submit locks in S3: one per request and code, so that concurrent submits create only one job.

A lock is an object that is named by a plan's identity and contains a run id. S3 writes it for the first submit and
refuses the others (conditional writes with `If-None-Match`, and `If-Match` to replace one). So concurrent submits of
the same request use the same run id, and SageMaker accepts the name of a training job only once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from cloudtrain.aws.errors import SuppressCodes
from cloudtrain.support.run_id import is_run_id
from cloudtrain.support.s3_uri import split_uri
from cloudtrain_runtime.contract.aws_codes import (
    CONDITION_CONFLICT,
    CONDITION_NOT_MET,
    DENIED,
    MISSING_OBJECT,
)
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_FOLDER = "requests"
_NOT_FOUND = MISSING_OBJECT | DENIED
"""Without permission to list the bucket, S3 answers AccessDenied for a missing object."""
_REFUSED = CONDITION_NOT_MET | CONDITION_CONFLICT | MISSING_OBJECT
"""S3 answers `If-Match` with the last two if the object has been deleted in the meantime."""


@dataclass(frozen=True)
class SubmitLock:
    """A lock in S3. `run` is empty if the content is no run id; `age_seconds` and `etag` come from S3."""

    run: str
    age_seconds: float
    etag: str


class SubmitLocks:
    """The submit locks below the prefix with the URI `base`."""

    def __init__(self, s3: Any, base: str) -> None:
        self._s3 = s3
        self._base = f"{base.rstrip('/')}/{_FOLDER}"

    def read(self, identity: str) -> SubmitLock | None:
        """Return the lock of a request, or None if there is none."""
        answer: Mapping[str, Any] | None = None
        with SuppressCodes(_NOT_FOUND):
            answer = self._s3.get_object(**self._location(identity))
        if answer is None:
            return None
        # Both times come from S3: this machine's clock may be wrong.
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        age_seconds = max(0.0, (now - answer["LastModified"]).total_seconds())
        return SubmitLock(_parse_run(answer["Body"].read()), age_seconds, answer["ETag"])

    def acquire(self, identity: str, run: str, *, replace: SubmitLock | None) -> bool:
        """Write a lock in place of `replace`, or where none is; return False if another submit was faster."""
        condition = {"IfNoneMatch": "*"} if replace is None else {"IfMatch": replace.etag}
        return self._put(identity, run, condition)

    def overwrite(self, identity: str, run: str) -> None:
        """Write a lock unconditionally."""
        self._put(identity, run, {})

    def _put(self, identity: str, run: str, condition: dict[str, str]) -> bool:
        with SuppressCodes(_REFUSED):
            self._s3.put_object(
                **self._location(identity), Body=dump_json({"run": run}).encode(), **condition
            )
            return True
        return False

    def _location(self, identity: str) -> dict[str, str]:
        bucket, key = split_uri(f"{self._base}/{identity}.json")
        return {"Bucket": bucket, "Key": key}


def _parse_run(body: bytes) -> str:
    """Return the run id in a lock; empty if the content is something else."""
    try:
        content = load_json(body)
    except ValueError:
        return ""
    run = str(content.get("run", "")) if isinstance(content, dict) else ""
    return run if is_run_id(run) else ""
