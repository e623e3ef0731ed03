"""Retries of the runtime's AWS clients: how often a request is attempted, and sessions with loaded credentials."""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain_runtime.process.event_log import log_line

if TYPE_CHECKING:
    from boto3.session import Session

_ATTEMPTS = 10
_ENDPOINT_VARIABLES = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_MAX_PAUSE_SECONDS = 20.0


def max_attempts(default: int = _ATTEMPTS) -> int:
    """Return the maximum number of attempts of a request, with the first; AWS_MAX_ATTEMPTS overrides the default."""
    text = os.environ.get("AWS_MAX_ATTEMPTS") or str(default)
    attempts = int(text) if text.strip().isdecimal() else 0
    if attempts < 1:
        _report_invalid(text)
    return attempts if attempts > 0 else default


# Cached, so that a process logs it once.
@functools.cache
def _report_invalid(text: str) -> None:
    log_line(f"AWS_MAX_ATTEMPTS is {text!r}, which is not a positive integer: the default applies")


def client_retries(default: int = _ATTEMPTS) -> Any:
    """Return the `retries` of a botocore `Config`: standard mode, which backs off with jitter.

    It returns Any, because botocore has no public name for the type of this dictionary.
    """
    return {"mode": "standard", "total_max_attempts": max_attempts(default)}


def is_container_endpoint(environ: Mapping[str, str]) -> bool:
    """Return whether credentials come from the endpoint of a container, as those of a training job's role do."""
    return "AWS_ACCESS_KEY_ID" not in environ and any(
        name in environ for name in _ENDPOINT_VARIABLES
    )


def open_session() -> Session:
    """Return a boto3 session that has loaded its credentials.

    botocore queries a container's endpoint three times within three seconds, outside of its retry policy. This function
    retries like a client: `AWS_MAX_ATTEMPTS` attempts with exponential back-off, about two minutes in total.

    Raises:
        botocore.exceptions.CredentialRetrievalError: no attempt returned credentials.
    """
    from boto3.session import Session
    from botocore.exceptions import CredentialRetrievalError

    last = max_attempts() if is_container_endpoint(os.environ) else 1
    for attempt in itertools.count(1):
        session = Session()
        try:
            session.get_credentials()
            break
        except CredentialRetrievalError as error:
            if attempt == last:
                raise
            if attempt == 1:
                log_line(
                    f"the container's credentials endpoint fails; trying up to {last} times: {error}"
                )
            time.sleep(min(2.0 ** (attempt - 1), _MAX_PAUSE_SECONDS) * random.uniform(0.5, 1.0))  # noqa: S311
    return session
