"""The import of the SageMaker SDK (v2, whose support ends on 2027-07-06): beside other work, without side effects."""

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

from cloudtrain.errors import MissingExtraError

NO_TELEMETRY: Mapping[str, Any] = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
"""Settings of a session. Telemetry is on by default in v2 and would send the account id and error texts."""

_CHATTY = ("sagemaker", "sagemaker.config", "botocore", "boto3")


class Sdk(NamedTuple):
    """What is used of it."""

    PyTorch: Any
    Session: Any
    TensorBoardOutputConfig: Any
    TrainingInput: Any


def start_loading() -> None:
    """Begin to import the SDK in the background; it takes longer than all else of a submit.

    boto3 is imported before: what two threads import at once, one of them may see half of.
    """
    _loading()


def load_sdk() -> Sdk:
    """Return the SDK when it is imported.

    Raises:
        MissingExtraError: it is not installed.
    """
    loading = _loading()
    loading.join()
    if loading.sdk is not None:
        return loading.sdk
    try:
        return _import()  # tells why it failed, or, alone now, does not fail
    except ImportError:
        raise no_sdk() from None


def no_sdk() -> MissingExtraError:
    """Return what is said where the SageMaker SDK is not installed."""
    return MissingExtraError(
        "sending through the SageMaker SDK needs sagemaker 2.x",
        "pip install 'cloudtrain[sagemaker]', or send the same document without it: CLOUDTRAIN_TRANSPORT=boto3",
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the SDK's greetings and notes of its progress to itself, and the user's logging and hooks as they are.

    Only what this thread prints is dropped.
    """
    hook = sys.excepthook
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    # A logger without a handler gets one from the SDK: that of its settings prints to standard output, the root's
    # prints what every library says.
    guarded = [logging.getLogger(name) for name in ("", "sagemaker.config")]
    guard = logging.NullHandler()
    stdout = _Muted(sys.stdout)
    sys.stdout = stdout
    for logger in loggers:
        logger.setLevel(max(logger.level, logging.WARNING))
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


class _Loading(threading.Thread):
    """The import, in a thread that does not keep the process from ending."""

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
    """Import the SDK: the one function that does."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    with quiet(), _uncollected():
        from sagemaker import utils
        from sagemaker.debugger.debugger import TensorBoardOutputConfig
        from sagemaker.inputs import TrainingInput
        from sagemaker.pytorch.estimator import PyTorch
        from sagemaker.session import Session
    _accept_settings(utils)
    return Sdk(PyTorch, Session, TensorBoardOutputConfig, TrainingInput)


def _accept_settings(utils: Any) -> None:
    """Let the SDK check our settings when a session is made, and not again at each of 20 looks into them.

    Each check is one of the settings' schema against the schema of schemas, and together they take longer than all
    else that an estimator does. Settings of anybody else are checked as before.
    """
    check = getattr(utils, "validate_sagemaker_config", None)
    if check is None:
        return

    def check_others(sagemaker_config: Any = None) -> None:
        if sagemaker_config is not NO_TELEMETRY:
            check(sagemaker_config)

    utils.validate_sagemaker_config = check_others


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Make a million objects that stay without a collector that looks through them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # What is frozen and thawed is old, so no collection of the young goes through it.
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


class _Muted:
    """Standard output for all threads but the one that made it, whose text is dropped.

    What it lacks it takes from the stream that it stands for.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        """Write, or drop."""
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def end(self) -> None:
        """Give its place back where it has it still, and drop nothing any more."""
        self._thread = None
        if sys.stdout is self:
            sys.stdout = self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
