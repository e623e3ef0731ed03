"""SageMaker SDK v2 sessions that send their requests to a server on loopback."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

CREATE = "sagemaker.CreateTrainingJob"
NO_TELEMETRY = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}
BUCKET = "cloudtrain-test"
REGION = "us-west-2"


def boto_session() -> Any:
    """Return a session whose clients use AWS_ENDPOINT_URL and, if it is set, AWS_ACCESS_KEY_ID."""
    import boto3

    key = os.environ.get("AWS_ACCESS_KEY_ID", "testing")
    return boto3.Session(aws_access_key_id=key, aws_secret_access_key="testing", region_name=REGION)


@contextlib.contextmanager
def sdk_session(session: Any, client: Any, bucket: str = BUCKET) -> Iterator[Any]:
    """Yield a SageMaker SDK session of a boto3 session and client, without telemetry and logs."""
    with settings_checked_once():
        from sagemaker.session import Session

        yield Session(
            boto_session=session,
            sagemaker_client=client,
            default_bucket=bucket,
            sagemaker_config=NO_TELEMETRY,
        )


@contextlib.contextmanager
def settings_checked_once() -> Iterator[None]:
    """Make the SDK validate the same settings only once, and disable its log.

    In each fit, the SDK validates its settings and its schema 19 times, which takes 1.1 s of 1.2 s.
    """
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    with contextlib.redirect_stdout(io.StringIO()):  # the import prints
        import sagemaker.utils

    accepted: set[str] = set()
    validate = sagemaker.utils.validate_sagemaker_config

    def validate_once(config: dict[str, Any]) -> None:
        if (text := json.dumps(config)) not in accepted:
            validate(config)
            accepted.add(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sagemaker.utils, "validate_sagemaker_config", validate_once)
        for name in ("sagemaker", "sagemaker.config", "sagemaker.telemetry.telemetry_logging"):
            patch.setattr(logging.getLogger(name), "disabled", True)
        yield
