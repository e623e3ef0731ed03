"""The SageMaker backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend, BackendContext
    from cloudtrain.planning.targets import Target


def make_target(context: BackendContext) -> Target:
    """Return the account as the target of a plan."""
    from cloudtrain.planning.targets import SageMakerTarget

    return SageMakerTarget(context.load_settings(), context.load_prices())


def find_backend(context: BackendContext) -> Backend:
    """Return the backend of the account.

    Raises:
        UntrustedSettingsError: A file beside the job gives a role, bucket or key that the user has not agreed to.
    """
    return open_backend(context)


def open_backend(context: BackendContext) -> Backend:
    """Return the backend of the account.

    Raises:
        UntrustedSettingsError: A file beside the job gives a role, bucket or key that the user has not agreed to.
    """
    from cloudtrain.backends.sagemaker.backend import SageMakerBackend

    settings = context.load_settings()
    settings.require_trust()
    return SageMakerBackend(settings, prices=context.load_prices())
