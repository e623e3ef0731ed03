"""The copies of an account's sweeps in S3, with which another machine continues them.

Below `<prefix>/sweeps/<sweep>/` are `sweep.json`, `sweep.db`, which is written after each change, and the lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_objects import list_folders
from cloudtrain.controllers.shared_folder import SharedFolder
from cloudtrain.features.sweeps.stored_sweep import SWEEPS_FOLDER, StoredSweep
from cloudtrain.support.run_id import submit_order

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


@dataclass(frozen=True)
class SharedSweeps:
    """The sweeps below a prefix of the account's bucket.

    Attributes:
        s3: boto3's S3 client.
        base: `s3://bucket/prefix`.
    """

    s3: S3Client
    base: str

    def ids(self) -> list[str]:
        """Return the ids of the sweeps, newest first."""
        with aws_errors("list the sweeps of the account"):
            found = list_folders(self.s3, f"{self.base.rstrip('/')}/{SWEEPS_FOLDER}/")
        return sorted(found, key=submit_order, reverse=True)

    def copy_of(self, sweep: str) -> SharedFolder:
        """Return the copy of a sweep."""
        return SharedFolder(
            self.s3, f"{self.base.rstrip('/')}/{SWEEPS_FOLDER}/{sweep}", StoredSweep.noun
        )
