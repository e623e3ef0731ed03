"""The copy of a chain in S3, with which another machine continues it."""

from __future__ import annotations

from cloudtrain.client.account_chains import AccountChains
from cloudtrain.client.client import Client
from cloudtrain.client.home import make_home
from cloudtrain.controllers.shared_folder import SharedFolder
from cloudtrain.errors import UnreachableError
from cloudtrain.features.recovery.stored_chain import StoredChain
from cloudtrain.runs.attempt_chain import CHAINS_FOLDER


def account_chains(client: Client, backend: str) -> AccountChains | None:
    """Return the chains of an account; None for a backend without one.

    Raises:
        CloudError: The backend cannot be reached, or there are no credentials.
    """
    for opened in client.session.find_backends((backend,), is_named=True):
        return AccountChains.of(opened)
    raise UnreachableError(f"the runs of {backend} cannot be reached", "see: cloudtrain check")


def copy_of(chains: AccountChains, chain: str) -> SharedFolder:
    """Return the copy of a chain."""
    return SharedFolder(chains.s3, chains.uri_of(chain), StoredChain.noun)


def find_copy(stored: StoredChain, backend: str, client: Client) -> SharedFolder | None:
    """Return the copy of a chain in the account; None for local runs."""
    chains = account_chains(client, backend)
    return None if chains is None else copy_of(chains, stored.id)


def adopt(client: Client, chain: str, backend: str) -> StoredChain | None:
    """Return the folder of a chain that another machine has begun, with its record; None if there is no such chain.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    chains = account_chains(client, backend)
    if chains is None or chains.read(chain) is None:
        return None
    folder = (client.session.home or make_home()) / CHAINS_FOLDER / chain
    folder.mkdir(parents=True, exist_ok=True)
    stored = StoredChain(chain, folder)
    copy_of(chains, chain).fetch_state(stored.file)
    return stored
