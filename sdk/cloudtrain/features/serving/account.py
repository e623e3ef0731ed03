"""The accounts in which endpoints are: the user's, and those of sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.backends.base import BackendContext, HostingAccount
from cloudtrain.backends.registry import backend_package
from cloudtrain.client.account import find_settings, known_prices
from cloudtrain.client.home import all_homes
from cloudtrain.errors import SettingsError
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import BACKENDS, choose_backend


def open_account(*, sandbox: bool, settings: Settings | None = None) -> HostingAccount:
    """Return the account; a sandbox is started in the background when none runs.

    Raises:
        SettingsError: A setting is missing.
    """
    package = backend_package(choose_backend(sandbox=sandbox))
    account = package.open_backend(_context(settings)).hosting_account()
    if account.settings.missing:
        names = ", ".join(account.settings.missing)
        raise SettingsError(
            f"settings are missing: {names}", "cloudtrain configure, or add --sandbox"
        )
    return account


def accounts_in_use() -> Iterator[HostingAccount]:
    """Yield those of the sandboxes that run, and the account if its settings are complete. Nothing is started."""
    context = _context()
    for name, facts in BACKENDS.items():
        if not facts.uses_account:
            continue
        for backend in backend_package(name).find_backends(context):
            if backend.is_configured:
                yield backend.hosting_account()


def _context(settings: Settings | None = None) -> BackendContext:
    home, *others = all_homes()
    own = settings or find_settings()
    return BackendContext(
        home=home,
        load_settings=lambda: own,
        load_prices=known_prices,
        other_homes=tuple(others),
    )
