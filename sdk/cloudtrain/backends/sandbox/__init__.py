"""The sandbox: a local AWS whose training jobs really run.

One process serves on loopback: moto implements S3, IAM, STS, CloudWatch Logs and other services. SageMaker's training
jobs and AWS Batch's service jobs are implemented here and run each CreateTrainingJob request with
`cloudtrain.backends.container`. The server does not read plans: it runs the request of any client, or rejects it as
AWS does. `backend` is the client's side: SageMaker's backend with a session that leads to the server.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.support.home_folder import make_home

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.context import BackendContext
    from cloudtrain.backends.sandbox.process import Sandbox
    from cloudtrain.planning.targets import Target

NAME = "sandbox"


def make_target(context: BackendContext) -> Target:
    """Return the target of a plan for the sandbox: the account's, with the sandbox's role and bucket if one runs."""
    from cloudtrain.backends.sagemaker.target import SageMakerTarget

    running = _find(context.home)
    own = context.load_settings()
    return SageMakerTarget(own if running is None else running.settings(own), context.load_prices())


def find_backends(context: BackendContext) -> Iterator[Backend]:
    """Yield the backends of the sandboxes that run on this machine, at most one per folder of local runs."""
    for home in context.homes:
        running = _find(home)
        if running is not None:
            yield _connect(running, context)


def open_backend(context: BackendContext) -> Backend:
    """Return the backend of the sandbox of this machine; start one in the background when none runs."""
    from cloudtrain.backends.sandbox.process import start_sandbox

    # The sandbox reports that its own folder cannot be created.
    with contextlib.suppress(OSError):
        make_home(context.home)
    return _connect(start_sandbox(sandbox_home(context.home)), context)


def sandbox_home(home: Path) -> Path:
    """Return the sandbox's folder in a folder of local runs."""
    return home / NAME


def _find(home: Path) -> Sandbox | None:
    folder = sandbox_home(home)
    if not folder.is_dir():
        return None
    from cloudtrain.backends.sandbox.process import find_sandbox

    return find_sandbox(folder)


def _connect(running: Sandbox, context: BackendContext) -> Backend:
    from cloudtrain.backends.sandbox.backend import SandboxBackend

    return SandboxBackend(running, running.settings(context.load_settings()), context.load_prices())
