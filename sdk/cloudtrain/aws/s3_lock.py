"""Locks in S3: an object with the name of its holder, which S3 writes for one of several processes.

Only conditional writes replace a lock, so a process that has read an old one cannot overwrite a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.aws.s3_objects import HIDDEN_OBJECT, find_object, put_if, put_object
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


@dataclass(frozen=True)
class LockState:
    """A lock as S3 has it.

    Attributes:
        holder: Name of the holder; None if the object does not name one: it is damaged, or another program's.
        age_seconds: Time since it was written, by S3's clock.
        etag: Its ETag.
    """

    holder: str | None
    age_seconds: float
    etag: str


@dataclass(frozen=True)
class S3Lock:
    """A lock in S3.

    Attributes:
        s3: boto3's S3 client.
        uri: The object.
        key: Key of the holder in the object, which is a JSON object.
    """

    s3: S3Client
    uri: str
    key: str

    def read(self) -> LockState | None:
        """Return the lock, or None if there is none."""
        found = find_object(self.s3, self.uri, HIDDEN_OBJECT)
        if found is None:
            return None
        return LockState(parse_holder(found.body, self.key), found.age_seconds, found.etag)

    def write(self, holder: str, *, etag: str | None, **notes: str) -> str | None:
        """Write the lock in place of the version with this ETag, or where there is none (None).

        A write whose response was lost is sent again and refused, so a lock that has this holder counts as written.

        Args:
            holder: Name of the holder.
            etag: ETag of the version to replace.
            notes: More keys of the object.

        Returns:
            The ETag of the lock, or None if another process was faster.
        """
        written = put_if(self.s3, self.uri, self._body(holder, notes), etag=etag)
        if written is not None:
            return written
        now = self.read()
        return now.etag if now is not None and now.holder == holder else None

    def overwrite(self, holder: str) -> None:
        """Write the lock, whoever holds it."""
        put_object(self.s3, self.uri, self._body(holder, {}))

    def _body(self, holder: str, notes: dict[str, str]) -> bytes:
        return dump_json({self.key: holder, **notes}).encode()


def parse_holder(body: bytes, key: str) -> str | None:
    """Return the holder that the content of a lock names below a key, or None."""
    try:
        content = load_json(body)
    except ValueError:
        return None
    holder = content.get(key) if isinstance(content, dict) else None
    return holder if isinstance(holder, str) else None
