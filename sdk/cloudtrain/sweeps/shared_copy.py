"""The copy of an account's sweep in S3, with which another machine continues it.

Below `<prefix>/sweeps/<sweep>/` are `sweep.json`, `sweep.db`, which is written after each change, and `lock.json`, the
lock of the controller: S3 writes it for the first one and refuses others (conditional writes), and its holder renews
it. A lock that was not renewed for five minutes belongs to a controller that was killed, and may be replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from cloudtrain.aws.errors import SuppressCodes, aws_errors
from cloudtrain.errors import CloudError, UserError
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.run_id import submit_order
from cloudtrain.support.s3_uri import split_uri
from cloudtrain.sweeps.stored_sweep import SWEEP_FILE, SWEEPS_FOLDER
from cloudtrain_runtime.contract.aws_codes import (
    CONDITION_CONFLICT,
    CONDITION_NOT_MET,
    DENIED,
    MISSING_OBJECT,
)
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_DATABASE = "sweep.db"
_LOCK = "lock.json"
_NOT_FOUND = MISSING_OBJECT | DENIED
_REFUSED = CONDITION_NOT_MET | CONDITION_CONFLICT | MISSING_OBJECT
_WRITER = "controller"
"""Metadata of `sweep.db`: the folder that wrote it."""
_WRITER_FILE = "writer"
_RELEASED = ""
_SOMEBODY = "another process"
"""Owner of a lock that was released."""
_RENEW_SECONDS = 60.0
_EXPIRED_SECONDS = 300.0


@dataclass(frozen=True)
class SharedSweeps:
    """The sweeps below a prefix of the account's bucket.

    Attributes:
        s3: boto3's S3 client.
        base: `s3://bucket/prefix`.
    """

    s3: Any
    base: str

    def ids(self) -> list[str]:
        """Return the ids of the sweeps, newest first."""
        bucket, key = split_uri(f"{self.base.rstrip('/')}/{SWEEPS_FOLDER}/")
        with aws_errors("list the sweeps of the account"):
            pages = self.s3.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=key, Delimiter="/"
            )
            prefixes = [
                entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ())
            ]
        found = (prefix.rstrip("/").rpartition("/")[2] for prefix in prefixes)
        return sorted(found, key=submit_order, reverse=True)

    def copy_of(self, sweep: str) -> SharedCopy:
        """Return the copy of a sweep."""
        return SharedCopy(self.s3, f"{self.base.rstrip('/')}/{SWEEPS_FOLDER}/{sweep}")


@dataclass
class SharedCopy:
    """The copy of one sweep.

    Attributes:
        s3: boto3's S3 client.
        uri: The folder of the copy.
        etag: That of the lock, as this process has written it; empty before.
        is_lost: Whether another controller has replaced the lock.
    """

    s3: Any
    uri: str
    etag: str = ""
    is_lost: bool = False

    def read_file(self) -> dict[str, Any] | None:
        """Return the content of `sweep.json`, or None if there is none."""
        body = self._get(SWEEP_FILE)
        try:
            content = None if body is None else load_json(body)
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    def publish(self, folder: Path, database: Path) -> None:
        """Store `sweep.json` of a sweep's folder, and a consistent copy of its database."""
        self._put(SWEEP_FILE, (folder / SWEEP_FILE).read_bytes())
        self.publish_database(folder, database)

    def publish_database(self, folder: Path, database: Path) -> None:
        """Store a consistent copy of the database of a sweep's folder.

        Raises:
            UserError: the lock is lost.
        """
        if self.is_lost:
            raise UserError(
                "another controller has taken over this sweep", "follow it on its machine"
            )
        self._put(_DATABASE, database.read_bytes(), Metadata={_WRITER: _writer(folder)})

    def fetch_database(self, folder: Path) -> bool:
        """Copy the database into a sweep's folder, unless this folder wrote it; return whether it was copied."""
        answer: Any = None
        with aws_errors(f"read {self.uri}/{_DATABASE}"), SuppressCodes(_NOT_FOUND):
            answer = self.s3.get_object(**self._location(_DATABASE))
        if answer is None or answer.get("Metadata", {}).get(_WRITER) == _writer(folder):
            return False
        partial = folder / f".{_DATABASE}.fetched"
        partial.write_bytes(answer["Body"].read())
        partial.replace(folder / _DATABASE)
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the controller's lock, which a thread renews.

        Raises:
            UserError: another controller holds it.
            CloudError: AWS refused or cannot be reached.
        """
        owner = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self.etag, ended = self._acquire(owner), threading.Event()
        renewal = threading.Thread(target=self._renew, args=(owner, ended), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join()
            if not self.is_lost:
                with contextlib.suppress(CloudError), aws_errors("release the lock of the sweep"):
                    self._put_lock(_RELEASED, {"IfMatch": self.etag})

    def _acquire(self, owner: str) -> str:
        with aws_errors("acquire the lock of the sweep"):
            etag = self._put_lock(owner, {"IfNoneMatch": "*"})
            if etag is None and (known := self._expired_lock()) is not None:
                etag = self._put_lock(owner, {"IfMatch": known})
        if etag is None:
            holder = _owner_in(self._get(_LOCK)) or _SOMEBODY
            hint = "stop it there; a controller that was killed is replaced after five minutes"
            raise UserError(f"a controller of this sweep runs already: {holder}", hint)
        return etag

    def _expired_lock(self) -> str | None:
        """Return the etag of a lock that was released, or not renewed in time. Both times come from S3."""
        answer: Any = None
        with SuppressCodes(_NOT_FOUND):
            answer = self.s3.get_object(**self._location(_LOCK))
        if answer is None:
            return None
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        owner = _owner_in(answer["Body"].read())
        is_old = (now - answer["LastModified"]).total_seconds() > _EXPIRED_SECONDS
        return str(answer["ETag"]) if is_old or owner == _RELEASED or _is_dead_here(owner) else None

    def _renew(self, owner: str, ended: threading.Event) -> None:
        """Renew the lock until the end; a lock that another controller has replaced is lost."""
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(CloudError), aws_errors("renew the lock of the sweep"):
                renewed = self._put_lock(owner, {"IfMatch": self.etag})
                if renewed is None:
                    self.is_lost = True
                    return
                self.etag = renewed

    def _put_lock(self, owner: str, condition: dict[str, str]) -> str | None:
        """Write the lock if S3's condition holds; return its etag, or None if it is somebody else's."""
        body = dump_json({"owner": owner, "time": datetime.now(UTC).isoformat()}).encode()
        answer: Any = None
        with SuppressCodes(_REFUSED):
            answer = self.s3.put_object(**self._location(_LOCK), Body=body, **condition)
        return self._etag_of(owner) if answer is None else str(answer["ETag"])

    def _etag_of(self, owner: str) -> str | None:
        """Return the lock's etag if it has this owner: a write whose response was lost is sent again, and refused."""
        with SuppressCodes(_NOT_FOUND):
            answer = self.s3.get_object(**self._location(_LOCK))
            if _owner_in(answer["Body"].read()) == owner:
                return str(answer["ETag"])
        return None

    def _get(self, name: str) -> bytes | None:
        answer: Any = None
        with aws_errors(f"read {self.uri}/{name}"), SuppressCodes(_NOT_FOUND):
            answer = self.s3.get_object(**self._location(name))
        return None if answer is None else bytes(answer["Body"].read())

    def _put(self, name: str, body: bytes, **options: Any) -> None:
        with aws_errors(f"write {self.uri}/{name}"):
            self.s3.put_object(**self._location(name), Body=body, **options)

    def _location(self, name: str) -> dict[str, str]:
        bucket, key = split_uri(f"{self.uri}/{name}")
        return {"Bucket": bucket, "Key": key}


def _owner_in(lock: bytes | None) -> str:
    """Return the owner in the content of a lock; of a damaged one, a text that is nobody's name, so that it is held."""
    try:
        content = load_json(lock or b"{}")
    except ValueError:
        return _SOMEBODY
    return str(content.get("owner", _RELEASED)) if isinstance(content, dict) else _SOMEBODY


def _writer(folder: Path) -> str:
    """Return the name of a folder, which another folder at the same path does not have."""
    file = folder / _WRITER_FILE
    if not file.exists():
        write_atomically(file, secrets.token_hex(8))
    return file.read_text(encoding="utf-8")


def _is_dead_here(owner: str) -> bool:
    """Return whether a lock's owner was a process of this machine that has ended."""
    host, _, rest = owner.partition("/")
    process = rest.partition("/")[0]
    if host != socket.gethostname() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
