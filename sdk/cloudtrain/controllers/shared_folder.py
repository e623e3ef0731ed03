"""The copy of a controller's folder in S3, with which another machine continues.

Below `<prefix>/<kind>/<id>/` are the controller's records and `lock.json`, its lock: S3 writes it for the first
controller and refuses others (conditional writes), and its holder renews it. A lock that was not renewed for five
minutes belongs to a controller that was killed, and may be replaced.
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
from typing import TYPE_CHECKING, Any

from cloudtrain.aws.errors import aws_errors
from cloudtrain.aws.s3_lock import LockState, S3Lock
from cloudtrain.aws.s3_objects import HIDDEN_OBJECT, find_json, find_object, put_object
from cloudtrain.errors import CloudError, UserError
from cloudtrain.support.atomic_write import write_atomically

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_LOCK = "lock.json"
_WRITER = "controller"
"""Metadata of a state: the folder that wrote it."""
_WRITER_FILE = "writer"
_OWNER = "owner"
_RELEASED = ""
"""Owner of a lock that was released."""
_UNKNOWN_OWNER = "another process"
_RENEW_SECONDS = 60.0
_EXPIRED_SECONDS = 300.0


@dataclass
class SharedFolder:
    """The copy of one folder.

    Attributes:
        s3: boto3's S3 client.
        uri: The folder of the copy.
        noun: What the controller controls, for messages: `sweep`.
        etag: That of the lock, as this process has written it; empty before.
        is_lost: Whether another controller has replaced the lock.
    """

    s3: S3Client
    uri: str
    noun: str
    etag: str = ""
    is_lost: bool = False

    def read_record(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file, or None if there is none."""
        with aws_errors(f"read {self.uri}/{name}"):
            return find_json(self.s3, f"{self.uri}/{name}", HIDDEN_OBJECT) or None

    def store_record(self, file: Path) -> None:
        """Store a file that does not change."""
        self._put(file)

    def store_state(self, file: Path) -> None:
        """Store a file that a controller changes, with the name of its folder.

        Raises:
            UserError: the lock is lost.
        """
        if self.is_lost:
            raise UserError(
                f"another controller has taken over this {self.noun}", "follow it on its machine"
            )
        self._put(file, Metadata={_WRITER: _writer(file.parent)})

    def fetch_state(self, file: Path) -> bool:
        """Copy a file into its folder, unless this folder wrote it; return whether it was copied."""
        uri = f"{self.uri}/{file.name}"
        with aws_errors(f"read {uri}"):
            found = find_object(self.s3, uri, HIDDEN_OBJECT)
        if found is None or found.metadata.get(_WRITER) == _writer(file.parent):
            return False
        partial = file.with_name(f".{file.name}.fetched")
        partial.write_bytes(found.body)
        partial.replace(file)
        return True

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the controller's lock, which a thread renews.

        Raises:
            UserError: another controller holds it.
            CloudError: AWS refused or cannot be reached.
        """
        owner = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self.etag = self._acquire(owner)
        ended = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(owner, ended), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            renewal.join()
            if not self.is_lost:
                with (
                    contextlib.suppress(CloudError),
                    aws_errors(f"release the lock of the {self.noun}"),
                ):
                    self._write_lock(_RELEASED, self.etag)

    def _acquire(self, owner: str) -> str:
        with aws_errors(f"acquire the lock of the {self.noun}"):
            etag, held = self._write_lock(owner, None), None
            if etag is None and (held := self._lock.read()) is not None and _is_free(held):
                etag = self._write_lock(owner, held.etag)
        if etag is None:
            holder = None if held is None else held.holder
            hint = "stop it there; a controller that was killed is replaced after five minutes"
            raise UserError(
                f"a controller of this {self.noun} runs already: {holder or _UNKNOWN_OWNER}", hint
            )
        return etag

    def _renew(self, owner: str, ended: threading.Event) -> None:
        """Renew the lock until the end; a lock that another controller has replaced is lost."""
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(CloudError), aws_errors(f"renew the lock of the {self.noun}"):
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

    def _put(self, file: Path, **options: Any) -> None:
        uri = f"{self.uri}/{file.name}"
        with aws_errors(f"write {uri}"):
            put_object(self.s3, uri, file.read_bytes(), **options)


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
