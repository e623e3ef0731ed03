"""The accounts in which endpoints are: the user's, and those of sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain.backends.base import HostingAccount
from cloudtrain.backends.registry import backend_package
from cloudtrain.client.session import Session
from cloudtrain.errors import SettingsError
from cloudtrain.support.backend_facts import BACKENDS


def open_account(session: Session, backend: str) -> HostingAccount:
    """Return the account of a backend; a sandbox is started in the background when none runs.

    Raises:
        SettingsError: A setting is missing.
        UserError: The backend has no endpoints.
    """
    account = backend_package(backend).open_backend(session.context()).hosting_account()
    if account.settings.missing:
        names = ", ".join(account.settings.missing)
        raise SettingsError(
            f"settings are missing: {names}", "cloudtrain configure, or add --sandbox"
        )
    return account


def accounts_in_use(session: Session) -> Iterator[HostingAccount]:
    """Yield those of the sandboxes that run, and the account if its settings are complete. Nothing is started."""
    context = session.context()
    for name, facts in BACKENDS.items():
        if not facts.uses_account:
            continue
        for backend in backend_package(name).find_backends(context):
            if backend.is_configured:
                yield backend.hosting_account()
