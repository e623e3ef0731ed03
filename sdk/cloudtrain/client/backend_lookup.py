"""The backends at hand: local, SageMaker, and the sandbox of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.home import find_home
from cloudtrain.client.sandbox import SANDBOX, find_sandbox
from cloudtrain.errors import RunNotFoundError
from cloudtrain.planning.plan import LOCAL, SAGEMAKER
from cloudtrain.runs.run import parse_reference
from cloudtrain.settings.settings import Settings

if TYPE_CHECKING:
    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.local.backend import LocalBackend
    from cloudtrain.backends.sagemaker import SageMakerBackend
    from cloudtrain.backends.sandbox import Sandbox

_SANDBOX_POLL_SECONDS = 0.5
"""The sandbox has no request limits."""


def find_backend(reference: str, settings: Settings | None) -> tuple[Backend, str]:
    """Return the backend that has a run, and the run's id.

    Args:
        reference: `<backend>:<run id>` or a run id.
        settings: The account; by default from environment and files.

    Raises:
        RunNotFoundError: No backend at hand has this run.
    """
    backend, run = parse_reference(reference)
    local = local_backend()
    sandbox = _sandbox_with(run) if backend in (SANDBOX, None) and not local.has(run) else None
    if backend == SANDBOX and sandbox is None:
        hint = "the runs of a sandbox end with it; see: cloudtrain list"
        raise RunNotFoundError(f"no sandbox that runs here has a run {run}", hint)
    if sandbox is not None:
        return sandbox, run
    if backend == LOCAL or (backend is None and local.has(run)):
        return local, run
    if backend == SAGEMAKER or (settings or find_settings()).region is not None:
        return sagemaker_backend(settings or find_settings()), run
    raise RunNotFoundError(
        f"there is no local run {run} in {local.runs}",
        "see: cloudtrain list; for a run on SageMaker set CLOUDTRAIN_REGION (and credentials)",
    )


def local_backend() -> LocalBackend:
    """Return the backend of this machine."""
    from cloudtrain.backends.local.backend import LocalBackend

    return LocalBackend(find_home())


def sagemaker_backend(settings: Settings) -> SageMakerBackend:
    """Return the backend of the account.

    Raises:
        UntrustedSettingsError: A file beside the job gives a role, bucket or key that the user has not agreed to.
    """
    settings.require_trust()
    from cloudtrain.backends.sagemaker import SageMakerBackend

    return SageMakerBackend(settings, prices=known_prices())


def sandbox_backend(sandbox: Sandbox, settings: Settings) -> SageMakerBackend:
    """Return the backend that sends to a sandbox."""
    from cloudtrain.backends.sagemaker import SageMakerBackend

    return SageMakerBackend(
        settings,
        prices=known_prices(),
        poll_seconds=_SANDBOX_POLL_SECONDS,
        session=sandbox.session(),
        name=SANDBOX,
    )


def _sandbox_with(run: str) -> SageMakerBackend | None:
    """Return the backend of this machine's sandbox when it has a run, else None."""
    sandbox = find_sandbox()
    if sandbox is None:
        return None
    backend = sandbox_backend(sandbox, sandbox.settings(Settings()))
    return backend if backend.has(run) else None
