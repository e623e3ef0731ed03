"""The client's side of the sandbox: SageMaker's backend with a session that leads to the local AWS."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cloudtrain.aws.retry import LOOPBACK_POLL_SECONDS
from cloudtrain.aws.session import NO_SHARED_FILES
from cloudtrain.backends.base import make_storage_environ
from cloudtrain.backends.sagemaker.backend import SageMakerBackend
from cloudtrain.backends.sandbox.process import Sandbox
from cloudtrain.catalog import Prices
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import SIMULATED_BACKEND
from cloudtrain.support.proxies import exclude_loopback


class SandboxBackend(SageMakerBackend):
    """Training jobs in a sandbox, with its role, bucket and region as settings."""

    name = SIMULATED_BACKEND
    only_checkpoint_checks = True
    capacity_pause_seconds = LOOPBACK_POLL_SECONDS

    def __init__(self, sandbox: Sandbox, settings: Settings, prices: Prices) -> None:
        super().__init__(
            settings, prices=prices, poll_seconds=LOOPBACK_POLL_SECONDS, session=sandbox.session()
        )
        self._sandbox = sandbox

    def with_settings(self, settings: Settings) -> SandboxBackend:
        """Return the backend of the same sandbox with other settings."""
        return SandboxBackend(self._sandbox, settings, self.prices)

    def may_have(self, run: str) -> bool:
        """Return whether the sandbox has a run. The sandbox answers at once."""
        return self.has(run)

    def storage_environ(self) -> Mapping[str, str]:
        """Return the environment of a process that reads the checkpoints of the sandbox's runs."""
        # A profile, a file, a proxy or an endpoint of the real account would redirect the process there.
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        sandbox = {**self._sandbox.environment, **exclude_loopback(os.environ), **NO_SHARED_FILES}
        return make_storage_environ({**own, **sandbox}, self.settings)
