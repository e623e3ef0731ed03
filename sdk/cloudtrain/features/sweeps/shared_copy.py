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
from pathlib import Path
from typing import Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_lock import LockState, S3Lock
from cloudtrain.aws.s3_objects import (
    HIDDEN_OBJECT,
    find_json,
    find_object,
    list_folders,
    put_object,
)
from cloudtrain.errors import CloudError, UserError
from cloudtrain.features.sweeps.stored_sweep import SWEEP_FILE, SWEEPS_FOLDER
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain.support.run_id import submit_order

_DATABASE = "sweep.db"
_LOCK = "lock.json"
_WRITER = "controller"
"""Metadata of `sweep.db`: the folder that wrote it."""
_WRITER_FILE = "writer"
_OWNER = "owner"
_RELEASED = ""
"""Owner of a lock that was released."""
_UNKNOWN_OWNER = "another process"
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
        with aws_errors("list the sweeps of the account"):
            found = list_folders(self.s3, f"{self.base.rstrip('/')}/{SWEEPS_FOLDER}/")
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
        with aws_errors(f"read {self.uri}/{SWEEP_FILE}"):
            return find_json(self.s3, f"{self.uri}/{SWEEP_FILE}", HIDDEN_OBJECT) or None

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
        uri = f"{self.uri}/{_DATABASE}"
        with aws_errors(f"read {uri}"):
            found = find_object(self.s3, uri, HIDDEN_OBJECT)
        if found is None or found.metadata.get(_WRITER) == _writer(folder):
            return False
        partial = folder / f".{_DATABASE}.fetched"
        partial.write_bytes(found.body)
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
                    self._write_lock(_RELEASED, self.etag)

    def _acquire(self, owner: str) -> str:
        with aws_errors("acquire the lock of the sweep"):
            etag, held = self._write_lock(owner, None), None
            if etag is None and (held := self._lock.read()) is not None and _is_free(held):
                etag = self._write_lock(owner, held.etag)
        if etag is None:
            holder = None if held is None else held.holder
            hint = "stop it there; a controller that was killed is replaced after five minutes"
            raise UserError(
                f"a controller of this sweep runs already: {holder or _UNKNOWN_OWNER}", hint
            )
        return etag

    def _renew(self, owner: str, ended: threading.Event) -> None:
        """Renew the lock until the end; a lock that another controller has replaced is lost."""
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(CloudError), aws_errors("renew the lock of the sweep"):
                renewed = self._write_lock(owner, self.etag)
                if renewed is None:
                    self.is_lost = True
                    return
                self.etag = renewed

    @property
    def _lock(self) -> S3Lock:
        return S3Lock(self.s3, f"{self.uri}/{_LOCK}", _OWNER)

    def _write_lock(self, owner: str, etag: str | None) -> str | None:
        return self._lock.write(owner, etag=etag, time=datetime.now(UTC).isoformat())

    def _put(self, name: str, body: bytes, **options: Any) -> None:
        with aws_errors(f"write {self.uri}/{name}"):
            put_object(self.s3, f"{self.uri}/{name}", body, **options)


def _is_free(lock: LockState) -> bool:
    """Return whether a lock was released, or not renewed in time. One that names no owner may still be held."""
    if lock.holder == _RELEASED or lock.age_seconds > _EXPIRED_SECONDS:
        return True
    return lock.holder is not None and _is_dead_here(lock.holder)


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
