"""The copy of a controller's folder in S3, with which another machine continues.

Below `<prefix>/<kind>/<id>/` are the controller's records and `lock.json`, its lock: S3 writes it for the first
controller and refuses others (conditional writes), and its holder renews it. A lock that was not renewed for five
minutes belongs to a controller that was killed, and may be replaced. If that one was only suspended, as on a closed
laptop, it cannot write its state any more: S3 writes a state only in place of the version that its writer has read.

A request to end what is controlled is an object with the name of its local file. Who holds the lock looks for it.
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
from cloudtrain.aws.s3_objects import (
    HIDDEN_OBJECT,
    ReadObject,
    find_json,
    find_object,
    put_if,
    put_object,
)
from cloudtrain.errors import CloudError, UserError
from cloudtrain.support.atomic_write import write_atomically

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

LOCK_OBJECT = "lock.json"
_WRITER = "controller"
"""Metadata of a state: the folder that wrote it."""
_WRITER_FILE = "writer"
_OWNER = "owner"
_RELEASED = ""
"""Owner of a lock that was released."""
_UNKNOWN_OWNER = "another process"
_RENEW_SECONDS = 60.0
_EXPIRED_SECONDS = 300.0
_WRITE_ATTEMPTS = 3
_LAMBDA_VARIABLE = "AWS_LAMBDA_LOG_STREAM_NAME"
"""Names one environment of a Lambda function. All of them may have the same host name."""


class LockedError(UserError):
    """Another controller holds the lock."""


class LostError(UserError):
    """Another controller has replaced the lock, because it was not renewed in time."""


@dataclass
class SharedFolder:
    """The copy of one folder.

    Attributes:
        s3: boto3's S3 client.
        uri: The folder of the copy.
        noun: What the controller controls, for messages: `sweep`.
        etag: That of the lock, as this process has written it; empty before.
        is_lost: Whether another controller has replaced the lock.
        state_etag: ETag of the state that this process has read or written; None where there was none.
    """

    s3: S3Client
    uri: str
    noun: str
    etag: str = ""
    is_lost: bool = False
    state_etag: str | None = None

    def read_record(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file, or None if there is none."""
        with aws_errors(f"read {self.uri}/{name}"):
            return find_json(self.s3, f"{self.uri}/{name}", HIDDEN_OBJECT) or None

    def store_record(self, file: Path) -> None:
        """Store a file that does not change."""
        uri = f"{self.uri}/{file.name}"
        with aws_errors(f"write {uri}"):
            put_object(self.s3, uri, file.read_bytes())

    def store_state(self, file: Path) -> None:
        """Store a file that a controller changes, with the name of its folder. `fetch_state` comes before.

        Raises:
            LostError: the lock is lost, or another controller has stored the file since this one has read it.
        """
        if self.is_lost:
            raise self._lost_error()
        with aws_errors(f"write {self.uri}/{file.name}"):
            etag = self._replace_state(file)
        if etag is None:
            self.is_lost = True
            raise self._lost_error()
        self.state_etag = etag

    def _replace_state(self, file: Path) -> str | None:
        """Write a state in place of the known one; return its ETag, or None if S3 has another one."""
        body = file.read_bytes()
        writer = {_WRITER: _writer(file.parent)}
        for _ in range(_WRITE_ATTEMPTS):
            uri = f"{self.uri}/{file.name}"
            etag = put_if(self.s3, uri, body, etag=self.state_etag, Metadata=writer)
            if etag is not None:
                return etag
            found = self._find(file)
            if found is not None and found.body == body and found.metadata == writer:
                # S3 refused the second try of a write whose response was lost.
                return found.etag
            if found is None or found.etag != self.state_etag:
                return None
            # Two writes at the same time, of which S3 refuses one, and maybe both.
        return None

    def fetch_state(self, file: Path) -> bool:
        """Copy a file into its folder, unless this folder wrote it; return whether it was copied."""
        with aws_errors(f"read {self.uri}/{file.name}"):
            found = self._find(file)
        self.state_etag = None if found is None else found.etag
        if found is None or found.metadata.get(_WRITER) == _writer(file.parent):
            return False
        partial = file.with_name(f".{file.name}.fetched")
        partial.write_bytes(found.body)
        partial.replace(file)
        return True

    def fetch_stop(self, file: Path) -> None:
        """Create the file of a request to end if one is stored."""
        uri = f"{self.uri}/{file.name}"
        with aws_errors(f"read {uri}"):
            if find_object(self.s3, uri, HIDDEN_OBJECT) is not None:
                file.touch()

    @contextlib.contextmanager
    def lock(self, stop_file: Path | None = None) -> Iterator[None]:
        """Hold the controller's lock, which a thread renews.

        Args:
            stop_file: The file of a request to end, which is created when such a request is stored.

        Raises:
            LockedError: another controller holds it.
            CloudError: AWS refused or cannot be reached.
        """
        owner = f"{_machine()}/{os.getpid()}/{secrets.token_hex(4)}"
        self.etag = self._acquire(owner)
        ended = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(owner, ended, stop_file), daemon=True)
        renewal.start()
        try:
            if stop_file is not None:
                self.fetch_stop(stop_file)
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
            raise LockedError(
                f"a controller of this {self.noun} runs already: {holder or _UNKNOWN_OWNER}", hint
            )
        return etag

    def _renew(self, owner: str, ended: threading.Event, stop_file: Path | None) -> None:
        """Renew the lock until the end; a lock that another controller has replaced is lost."""
        while not ended.wait(_RENEW_SECONDS):
            with contextlib.suppress(CloudError), aws_errors(f"renew the lock of the {self.noun}"):
                renewed = self._write_lock(owner, self.etag)
                if renewed is None:
                    self.is_lost = True
                    return
                self.etag = renewed
                if stop_file is not None:
                    self.fetch_stop(stop_file)

    def _lost_error(self) -> LostError:
        return LostError(
            f"another controller has taken over this {self.noun}", "follow it on its machine"
        )

    def _find(self, file: Path) -> ReadObject | None:
        return find_object(self.s3, f"{self.uri}/{file.name}", HIDDEN_OBJECT)

    @property
    def _lock(self) -> S3Lock:
        return S3Lock(self.s3, f"{self.uri}/{LOCK_OBJECT}", _OWNER)

    def _write_lock(self, owner: str, etag: str | None) -> str | None:
        return self._lock.write(owner, etag=etag, time=datetime.now(UTC).isoformat())


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


def _machine() -> str:
    """Return the name of this machine, within which process ids are unique."""
    stream = os.environ.get(_LAMBDA_VARIABLE)
    return stream.replace("/", "-") if stream else socket.gethostname()


def _is_dead_here(owner: str) -> bool:
    """Return whether a lock's owner was a process of this machine that has ended."""
    host, _, rest = owner.partition("/")
    process = rest.partition("/")[0]
    if host != _machine() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
