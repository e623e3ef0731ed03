"""Import of the SageMaker SDK v2 in the background, without side effects. Support of v2 ends on 2027-07-06."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cloudtrain.aws.session import NO_SHARED_FILES
from cloudtrain.errors import MissingExtraError
from cloudtrain.support.installation import install_command

NO_TELEMETRY: Mapping[str, Any] = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""Configuration of a session. By default, v2 sends telemetry with the account id and error messages."""

_PROFILE_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_JUMPSTART_LOGGER = "sagemaker.jumpstart"
_VERBOSE_LOGGERS = ("sagemaker", "sagemaker.config", _JUMPSTART_LOGGER, "botocore", "boto3")


class Sdk(NamedTuple):
    """The classes of the SDK that cloudtrain uses."""

    FileSystemInput: Any
    PyTorch: Any
    Session: Any
    TensorBoardOutputConfig: Any
    TrainingInput: Any


def start_import() -> None:
    """Start to import the SDK in the background; the import takes longer than the rest of a submit.

    Import boto3 before: if two threads import a module at the same time, one can see it incomplete.
    """
    _loading()


def load_sdk() -> Sdk:
    """Wait for the import and return the SDK.

    Raises:
        MissingExtraError: the SDK is not installed.
    """
    loading = _loading()
    loading.join()
    if loading.sdk is not None:
        return loading.sdk
    from botocore.exceptions import BotoCoreError

    try:
        # This raises the reason, or succeeds because no other thread imports now.
        return _import()
    except ImportError:
        raise missing_sdk_error() from None
    except BotoCoreError:
        # The import opens sessions of its own. In a sandbox, a profile that does not exist is no reason to fail.
        with _without_aws_files():
            return _import()


def missing_sdk_error() -> MissingExtraError:
    """Return the error for a missing SageMaker SDK."""
    return MissingExtraError(
        "sending through the SageMaker SDK needs sagemaker 2.x",
        f"{install_command('sagemaker')}, or send the same document without it: CLOUDTRAIN_TRANSPORT=boto3",
    )


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress the SDK's output in this thread, and restore the user's logging and hooks."""
    hook = sys.excepthook
    loggers = [logging.getLogger(name) for name in _VERBOSE_LOGGERS]
    levels = [logger.level for logger in loggers]
    # The SDK adds a handler to these loggers if they have none: one would print the SDK's settings to standard output,
    # the other the messages of all libraries.
    guarded = [logging.getLogger(name) for name in ("", "sagemaker.config")]
    guard = logging.NullHandler()
    stdout = _MutedStdout(sys.stdout)
    sys.stdout = stdout
    for logger in loggers:
        logger.setLevel(max(logger.level, _least_level(logger.name)))
    for logger in guarded:
        logger.addHandler(guard)
    try:
        yield
    finally:
        for logger in guarded:
            logger.removeHandler(guard)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        stdout.end()
        sys.excepthook = hook


@contextlib.contextmanager
def _without_aws_files() -> Iterator[None]:
    """Take the profile and AWS's files out of the environment for a moment, in which no session of them could open."""
    names = (*_PROFILE_VARIABLES, *NO_SHARED_FILES)
    before = {name: os.environ[name] for name in names if name in os.environ}
    for name in _PROFILE_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(NO_SHARED_FILES)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def _least_level(logger: str) -> int:
    # At its import, the SDK opens a session for JumpStart, which cloudtrain does not use, and warns where it cannot.
    return logging.ERROR if logger == _JUMPSTART_LOGGER else logging.WARNING


class _Loading(threading.Thread):
    """The import in a daemon thread, which does not delay the end of the process."""

    def __init__(self) -> None:
        super().__init__(name="import of the SageMaker SDK", daemon=True)
        self.sdk: Sdk | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(Exception):
            self.sdk = _import()


@functools.cache
def _loading() -> _Loading:
    return _Loading()


def _import() -> Sdk:
    """Import the SDK."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    with suppress_output(), _without_garbage_collection():
        from sagemaker import utils
        from sagemaker.debugger.debugger import TensorBoardOutputConfig
        from sagemaker.inputs import FileSystemInput, TrainingInput
        from sagemaker.pytorch.estimator import PyTorch
        from sagemaker.session import Session
    _accept_settings(utils)
    return Sdk(
        FileSystemInput=FileSystemInput,
        PyTorch=PyTorch,
        Session=Session,
        TensorBoardOutputConfig=TensorBoardOutputConfig,
        TrainingInput=TrainingInput,
    )


def _accept_settings(utils: Any) -> None:
    """Skip the SDK's validation of our own settings.

    The SDK validates them at each of 20 reads, and validates their schema, too, which takes longer than all other work
    of an estimator. Other settings are validated as before.
    """
    check = getattr(utils, "validate_sagemaker_config", None)
    if check is None:
        return

    def check_others(sagemaker_config: Any = None) -> None:
        if sagemaker_config is not NO_TELEMETRY:
            check(sagemaker_config)

    utils.validate_sagemaker_config = check_others


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which would scan the SDK's million permanent objects again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # Freezing moves the objects to the oldest generation, which young collections skip.
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


class _MutedStdout:
    """Standard output that drops the text of the thread that created it.

    All other attributes are those of the wrapped stream.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def end(self) -> None:
        """Restore standard output, and drop nothing any more."""
        self._thread = None
        if sys.stdout is self:
            sys.stdout = self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
