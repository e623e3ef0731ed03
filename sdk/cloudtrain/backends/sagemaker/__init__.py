"""The SageMaker backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cloudtrain.support.proxies import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.context import BackendContext
    from cloudtrain.planning.targets import Target


def make_target(context: BackendContext) -> Target:
    """Return the account as the target of a plan."""
    from cloudtrain.backends.sagemaker.target import SageMakerTarget

    return SageMakerTarget(context.load_settings(), context.load_prices())


def open_backend(context: BackendContext) -> Backend:
    """Return the backend of the account. Its first call to AWS requires trust in the settings."""
    from cloudtrain.aws.retry import LOOPBACK_POLL_SECONDS, POLL_SECONDS
    from cloudtrain.backends.sagemaker.backend import SageMakerBackend

    is_here = is_loopback(os.environ.get("AWS_ENDPOINT_URL", ""))
    return SageMakerBackend(
        context.load_settings(),
        prices=context.load_prices(),
        poll_seconds=LOOPBACK_POLL_SECONDS if is_here else POLL_SECONDS,
    )


def find_backends(context: BackendContext) -> Iterator[Backend]:
    """Yield the backend of the account."""
    yield open_backend(context)
