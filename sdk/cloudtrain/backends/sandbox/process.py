"""The sandbox that runs below a home folder: found, started in the background, stopped."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cloudtrain.backends.container.state_file import is_held
from cloudtrain.errors import CloudtrainError, UserError
from cloudtrain.settings.settings import Settings
from cloudtrain.support.atomic_write import write_atomically
from cloudtrain_runtime.contract.strict_json import dump_json

REGION = "us-west-2"
"""Where prices are known (`cloudtrain.catalog`), so that a run in the sandbox shows what it would cost."""

STATE_FILE = "sandbox.json"
LOG_FILE = "sandbox.log"
_LOCK_FILE = "sandbox.lock"
_LOCK_SECONDS = 1.0
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that serves.

    Attributes:
        endpoint: Its address, for AWS_ENDPOINT_URL.
        role: ARN of a role that SageMaker may take and that may do what a job needs.
        bucket: Name of an empty bucket.
        environment: What a client must export to talk to it.
        process: Id of its process.
    """

    endpoint: str
    role: str
    bucket: str
    environment: Mapping[str, str]
    process: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that `cloudtrain sandbox` prints first."""
        return {
            "endpoint": self.endpoint,
            "role": self.role,
            "bucket": self.bucket,
            "environment": dict(self.environment),
            "process": self.process,
        }

    def settings(self, own: Settings) -> Settings:
        """Return settings that send to this sandbox; of the account's own only what is no property of the account."""
        return Settings(
            role=self.role, bucket=self.bucket, prefix=own.prefix, region=REGION, transport=own.transport,
            sources=dict.fromkeys(("role", "bucket", "region"), "sandbox"),
        )  # fmt: skip

    def session(self) -> Any:
        """Return a boto3 session whose every client talks to this sandbox, whatever the environment says."""
        import boto3

        endpoint = self.endpoint  # also where a caller names another, as the SageMaker SDK does for STS

        class SandboxSession(boto3.Session):  # type: ignore[misc]
            def client(self, *arguments: Any, **options: Any) -> Any:
                return super().client(*arguments, **{**options, "endpoint_url": endpoint})

            def resource(self, *arguments: Any, **options: Any) -> Any:
                return super().resource(*arguments, **{**options, "endpoint_url": endpoint})

        return SandboxSession(
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=REGION,
        )


def client_environment(endpoint: str, role: str, bucket: str, access_key: str) -> dict[str, str]:
    """Return what a client must export. The access key id is what the sandbox asks for; signatures are not verified."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": "sandbox",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "CLOUDTRAIN_ROLE": role,
        "CLOUDTRAIN_BUCKET": bucket,
        "CLOUDTRAIN_REGION": REGION,
    }


def make_home(home: Path) -> None:
    """Create a sandbox's folder, for its owner only; one that exists keeps its mode.

    Raises:
        OSError: it cannot be created.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def lock_home(home: Path) -> IO[str]:
    """Take a home folder for this process until it ends.

    Raises:
        UserError: another sandbox has it, or it cannot be made.
    """
    try:
        make_home(home)
        lock = (home / _LOCK_FILE).open("w")
    except OSError as error:
        raise UserError(f"{home}: cannot be a sandbox's folder: {error.strerror}", "choose one with --home") from None
    (home / ".gitignore").write_text("*\n", encoding="utf-8")  # nobody's source code
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Who only looks whether a sandbox runs holds the lock for a moment, too.
            if time.monotonic() > deadline:
                lock.close()
                hint = "use it, end it with `cloudtrain sandbox --stop`, or choose another folder with --home"
                raise UserError(f"a sandbox runs already in {home}", hint) from None
            time.sleep(_POLL_SECONDS)
        else:
            return lock


def write_state(home: Path, sandbox: Sandbox) -> None:
    """Write down where the sandbox is, in one step. Only its owner may read it: it holds the access key."""
    write_atomically(home / STATE_FILE, dump_json(sandbox.to_json(), indent=1) + "\n", private=True)


def find_sandbox(home: Path) -> Sandbox | None:
    """Return the sandbox that serves from this folder, or None."""
    if not _is_held(home):
        return None
    try:
        return Sandbox(**json.loads((home / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def start_sandbox(home: Path) -> Sandbox:
    """Return the sandbox of this folder; start one in the background when there is none.

    It lives until `stop_sandbox`.

    Raises:
        CloudtrainError: it did not start; the message holds the end of its log.
    """
    running = find_sandbox(home)
    if running is not None:
        return running
    make_home(home)
    with open(home / LOG_FILE, "ab", opener=_open_private) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cloudtrain", "sandbox", "--home", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while (started := find_sandbox(home)) is None:
        # One that another command starts at this moment is as good.
        has_ended = process.poll() is not None and not _is_held(home)
        if has_ended or time.monotonic() > deadline:
            tail = (home / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            raise CloudtrainError(f"the sandbox did not start:\n{tail}", f"see {home / LOG_FILE}")
        time.sleep(_POLL_SECONDS)
    # A process of its own from here on.
    process.returncode = 0
    return started


def stop_sandbox(home: Path) -> bool:
    """End the sandbox of this folder and everything that it has started; return False when there was none.

    Raises:
        CloudtrainError: it did not end in time.
    """
    running = find_sandbox(home)
    if running is None:
        return False
    try:
        os.kill(running.process, signal.SIGTERM)
    except ProcessLookupError:
        return False
    deadline = time.monotonic() + _STOP_SECONDS
    while _is_held(home):
        if time.monotonic() > deadline:
            raise CloudtrainError(f"the sandbox (process {running.process}) did not end", f"see {home / LOG_FILE}")
        time.sleep(_POLL_SECONDS)
    return True


def _is_held(home: Path) -> bool:
    """Whether a living process holds the folder's lock."""
    try:
        return is_held(home / _LOCK_FILE)
    except OSError:
        return False
