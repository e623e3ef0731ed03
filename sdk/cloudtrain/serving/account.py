"""The account in which endpoints are: the user's, or the sandbox's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cloudtrain.backends.sagemaker.clients import Clients
from cloudtrain.catalog import Prices
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.home import all_homes, make_home
from cloudtrain.errors import SettingsError
from cloudtrain.settings.settings import Settings

_SANDBOX = "sandbox"


@dataclasses.dataclass(frozen=True)
class Account:
    """An account with endpoints.

    Attributes:
        name: `sagemaker` or `sandbox`.
        settings: Its role, bucket and region.
        prices: Prices of instances.
        clients: Clients of its services.
        poll_seconds: Time between two reads of a status.
    """

    name: str
    settings: Settings
    prices: Prices
    clients: Clients
    poll_seconds: float

    @property
    def is_sandbox(self) -> bool:
        """Whether it is a sandbox."""
        return self.name == _SANDBOX

    def usd_per_hour(self, instance_type: str) -> float | None:
        """Return the price of an instance; None if it is unknown, and 0 in a sandbox."""
        if self.is_sandbox:
            return 0.0
        return self.prices.hosting_usd_per_hour(instance_type, self.settings.region or "")

    def client(self, service: str) -> Any:
        """Return the boto3 client of a service."""
        return self.clients.client(service)


def open_account(*, sandbox: bool, settings: Settings | None = None) -> Account:
    """Return the account; a sandbox is started in the background when none runs.

    Raises:
        SettingsError: A setting is missing.
    """
    own = settings or find_settings()
    if sandbox:
        from cloudtrain.backends.sandbox import sandbox_home
        from cloudtrain.backends.sandbox.process import start_sandbox

        return _of_sandbox(start_sandbox(sandbox_home(make_home())), own)
    if own.missing:
        names = ", ".join(own.missing)
        raise SettingsError(
            f"settings are missing: {names}", "cloudtrain configure, or add --sandbox"
        )
    return Account("sagemaker", own, known_prices(), Clients(own), 15.0)


def accounts_in_use() -> Iterator[Account]:
    """Yield the sandboxes that run, and the account if its settings are complete. Nothing is started."""
    from cloudtrain.backends.sandbox import sandbox_home
    from cloudtrain.backends.sandbox.process import find_sandbox

    own = find_settings()
    for home in all_homes():
        folder = sandbox_home(home)
        running = find_sandbox(folder) if folder.is_dir() else None
        if running is not None:
            yield _of_sandbox(running, own)
    if not own.missing:
        yield open_account(sandbox=False, settings=own)


def _of_sandbox(sandbox: Any, own: Settings) -> Account:
    settings = sandbox.settings(own)
    return Account(_SANDBOX, settings, known_prices(), Clients(settings, sandbox.session()), 0.2)
