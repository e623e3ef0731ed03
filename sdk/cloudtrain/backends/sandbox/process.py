"""Discovery, start and stop of the sandbox that belongs to a home folder."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from cloudtrain.aws.session import make_isolated_session
from cloudtrain.backends.container.background import start_background
from cloudtrain.backends.container.state_file import is_held
from cloudtrain.errors import CloudtrainError, MissingExtraError, UserError
from cloudtrain.settings.settings import Settings
from cloudtrain.support.home_folder import make_folder
from cloudtrain.support.installation import install_command
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

if TYPE_CHECKING:
    from boto3.session import Session

REGION: Final = "us-west-2"
"""A region whose prices `cloudtrain.catalog` knows, so that runs in the sandbox have cost estimates."""

ACCOUNT = "123456789012"
"""The account that moto simulates."""

STATE_FILE = "sandbox.json"
LOG_FILE = "sandbox.log"
_LOCK_FILE = "sandbox.lock"
_LOCK_SECONDS = 1.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Sandbox:
    """A running sandbox.

    Attributes:
        endpoint: Its URL, for AWS_ENDPOINT_URL.
        role: ARN of a role that SageMaker may assume and that has a job's permissions.
        bucket: Name of an empty bucket.
        environment: Environment variables that clients must export.
        process: Its process id.
    """

    endpoint: str
    role: str
    bucket: str
    environment: Mapping[str, str]
    process: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that `cloudtrain sandbox` prints first."""
        return dataclasses.asdict(self)

    def settings(self, own: Settings) -> Settings:
        """Return settings for this sandbox; only settings that do not belong to an account are taken from `own`."""
        named = {name: source for name, source in own.sources.items() if name == "transport"}
        return Settings(
            role=self.role, bucket=self.bucket, prefix=own.prefix, region=REGION,
            transport=own.transport,
            subnets=own.subnets, security_groups=own.security_groups,
            sources={**named, **dict.fromkeys(("role", "bucket", "region"), "sandbox")},
        )  # fmt: skip

    def session(self) -> Session:
        """Return a boto3 session whose clients always use this sandbox, whatever the environment holds."""
        return make_isolated_session(
            self.endpoint,
            self.environment["AWS_ACCESS_KEY_ID"],
            self.environment["AWS_SECRET_ACCESS_KEY"],
            REGION,
        )


def require_packages() -> None:
    """Raise a MissingExtraError if a package that the sandbox needs is not installed."""
    for module in ("moto", "flask", "psutil", "torch", "numpy"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"the sandbox needs {module}", install_command("sandbox"))


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def lock_home(home: Path) -> IO[str]:
    """Lock a home folder until this process ends.

    Raises:
        UserError: Another sandbox holds the lock, or the folder cannot be created or used.
    """
    try:
        # The folder is readable by its owner only.
        make_folder(home, 0o700)
        _check_state_file(home)
        lock = (home / _LOCK_FILE).open("a")
    except OSError as error:
        raise UserError(
            f"cannot use {home} as a sandbox's folder: {error.strerror}",
            "choose another folder with --home",
        ) from None
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Commands that check whether a sandbox runs hold the lock for a moment, too.
            if time.monotonic() > deadline:
                lock.close()
                hint = "use it, stop it with `cloudtrain sandbox --stop`, or choose another folder with --home"
                raise UserError(f"a sandbox is already running in {home}", hint) from None
            time.sleep(_POLL_SECONDS)
        else:
            return lock


def _check_state_file(home: Path) -> None:
    """Raise a UserError if the folder has a file of others in the place of the state file."""
    path = home / STATE_FILE
    try:
        content = load_json(path.read_bytes() or b"{}")
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        content = None
    # Any version's file, or an empty one, which a full disk may leave.
    if not isinstance(content, dict) or (content and "endpoint" not in content):
        raise UserError(
            f"{path} is no file of a sandbox, which would replace it",
            "rename it, or choose another folder with --home",
        )


def write_state(home: Path, sandbox: Sandbox) -> IO[str]:
    """Write the state file, readable by its owner only, because it holds the access key.

    The file is locked before it gets its name, and the lock ends with this process. The file of a sandbox that was
    killed is therefore never taken for that of the next one, not even while the next one starts.

    Returns:
        The locked file. Keep it open as long as the sandbox runs.
    """
    path = home / STATE_FILE
    new = path.with_name(f".{path.name}.{os.getpid()}")
    state = open(new, "w", encoding="utf-8", opener=_open_private)  # noqa: SIM115 (stays open)
    fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
    state.write(dump_json(sandbox.to_json(), indent=1) + "\n")
    state.flush()
    new.replace(path)
    return state


def find_sandbox(home: Path) -> Sandbox | None:
    """Return the running sandbox of this folder, or None."""
    try:
        if not is_held(home / STATE_FILE):
            return None
        return Sandbox(**load_json((home / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def start_sandbox(home: Path) -> Sandbox:
    """Return the sandbox of this folder; start one in the background if none runs.

    It runs until `stop_sandbox`.

    Raises:
        MissingExtraError: A package that the sandbox needs is not installed.
        UserError: The disk is full.
        CloudtrainError: It did not start; the message holds the end of its log.
    """
    running = find_sandbox(home)
    if running is not None:
        return running
    require_packages()
    make_folder(home, 0o700)
    # The log is readable by its owner only, because it has access keys.
    open(home / LOG_FILE, "ab", opener=_open_private).close()
    return start_background(
        "the sandbox",
        ["cloudtrain", "sandbox", "--home", str(home)],
        home / LOG_FILE,
        lambda _: find_sandbox(home),
        # A sandbox that another command starts at the same moment is accepted, too.
        is_elsewhere=lambda: _is_held(home),
    )


def stop_sandbox(home: Path) -> bool:
    """Stop the sandbox of this folder and all its processes; return False if none runs.

    Raises:
        CloudtrainError: It did not stop in time.
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
            raise CloudtrainError(
                f"the sandbox (process {running.process}) did not stop", f"see {home / LOG_FILE}"
            )
        time.sleep(_POLL_SECONDS)
    return True


def _is_held(home: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        return is_held(home / _LOCK_FILE)
    except OSError:
        return False
