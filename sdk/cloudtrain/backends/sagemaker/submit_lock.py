"""Submit locks in S3: one per request and code, so that concurrent submits create only one job.

A lock is an object that is named by a plan's identity and contains a run id. S3 writes it for the first submit and
refuses the others (conditional writes with `If-None-Match`, and `If-Match` to replace one). So concurrent submits of
the same request use the same run id, and SageMaker accepts the name of a training job only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.aws.s3_lock import S3Lock
from cloudtrain.support.run_id import is_run_id

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_FOLDER = "requests"
_HOLDER = "run"


@dataclass(frozen=True)
class SubmitLock:
    """A lock in S3. `run` is empty if the content is no run id; `age_seconds` is by S3's clock."""

    run: str
    age_seconds: float
    etag: str


class SubmitLocks:
    """The submit locks below the prefix with the URI `base`."""

    def __init__(self, s3: S3Client, base: str) -> None:
        self._s3 = s3
        self._base = f"{base.rstrip('/')}/{_FOLDER}"

    def read(self, identity: str) -> SubmitLock | None:
        """Return the lock of a request, or None if there is none."""
        found = self._lock(identity).read()
        if found is None:
            return None
        run = found.holder or ""
        return SubmitLock(run if is_run_id(run) else "", found.age_seconds, found.etag)

    def acquire(self, identity: str, run: str, *, replace: SubmitLock | None) -> bool:
        """Write a lock in place of `replace`, or where none is; return False if another submit was faster."""
        etag = None if replace is None else replace.etag
        return self._lock(identity).write(run, etag=etag) is not None

    def overwrite(self, identity: str, run: str) -> None:
        """Write a lock unconditionally."""
        self._lock(identity).overwrite(run)

    def _lock(self, identity: str) -> S3Lock:
        return S3Lock(self._s3, f"{self._base}/{identity}.json", _HOLDER)
