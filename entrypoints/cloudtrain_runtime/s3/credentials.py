"""boto3 sessions with loaded credentials; credentials from a container's endpoint are fetched with retries."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from typing import Any

from cloudtrain_runtime.process.event_log import log_line
from cloudtrain_runtime.s3.retry import max_attempts

_ENDPOINT_VARIABLES = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_MAX_PAUSE_SECONDS = 20.0


def is_container_endpoint(environ: Mapping[str, str]) -> bool:
    """Return whether credentials come from the endpoint of a container, as those of a training job's role do."""
    return "AWS_ACCESS_KEY_ID" not in environ and any(name in environ for name in _ENDPOINT_VARIABLES)


def open_session() -> Any:
    """Return a boto3 session that has loaded its credentials.

    botocore queries a container's endpoint three times within three seconds, outside of its retry policy. This function
    retries like a client: `AWS_MAX_ATTEMPTS` attempts with exponential back-off, about two minutes in total.

    Raises:
        botocore.exceptions.CredentialRetrievalError: no attempt returned credentials.
    """
    from boto3.session import Session
    from botocore.exceptions import CredentialRetrievalError

    last = max_attempts() if is_container_endpoint(os.environ) else 1
    attempt = 1
    while True:
        session = Session()
        try:
            session.get_credentials()
        except CredentialRetrievalError as error:
            if attempt == last:
                raise
            if attempt == 1:
                log_line(f"the container's credentials endpoint fails; trying up to {last} times: {error}")
            time.sleep(min(2.0 ** (attempt - 1), _MAX_PAUSE_SECONDS) * random.uniform(0.5, 1.0))  # noqa: S311
            attempt += 1
        else:
            return session
