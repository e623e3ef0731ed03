"""The rendezvous of a run's agents, which accepts no state of a stranger.

torchrun's agents agree through a store to which everybody can write who reaches its port, and read its content as a
pickle. So a single host keeps the state in its memory, hosts on one machine keep it in a file that only this user can
write. Elsewhere, agents sign the state with the key of the run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
    create_backend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)

from cloudtrain_runtime.contract import RENDEZVOUS_BACKEND
from cloudtrain_runtime.contract.constants import OWN_STORE_VARIABLE
from cloudtrain_runtime.process.environment import read_run_config

_SIGNATURE_BYTES = hashlib.sha256().digest_size


def register_rendezvous() -> None:
    """Make torchrun know the backend that the launcher's arguments name."""
    # A store that outlives the ranks' groups makes later ones read the addresses of earlier ones
    # (pytorch#135712).
    os.environ[OWN_STORE_VARIABLE] = "1"
    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _create_handler)


def open_store(endpoint: str, options: str, timeout: timedelta) -> Any:
    """Open the store of a rendezvous, for values that are not read as pickles."""
    if "store_type=file" in options.split(","):
        store = distributed.FileStore(endpoint)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    host, _, port = endpoint.rpartition(":")
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=False, timeout=timeout, wait_for_workers=False
    )


def _create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    place = parameters.get("store_type", "tcp")
    key = _run_key() if place == "tcp" else b""
    if place == "hash":
        store: Any = distributed.HashStore()  # type: ignore[attr-defined]
        backend = C10dRendezvousBackend(store, parameters.run_id)
    else:
        backend, store = create_backend(parameters)
    # The other stores are private, and need no key.
    return create_handler(store, SignedBackend(backend, key), parameters)


def _run_key() -> bytes:
    """Return the run's key, which the hosts get with their configuration."""
    config = read_run_config(os.environ)
    if config is None or not config.key:
        raise RendezvousStateError("run.json has no key, which the hosts of a run need to agree")
    return config.key.encode()


class SignedBackend(RendezvousBackend):
    """Signs the state of a rendezvous, and reads no state without a signature.

    Args:
        backend: The backend that keeps the state.
        key: The key that all hosts of the run have.
    """

    def __init__(self, backend: RendezvousBackend, key: bytes) -> None:
        self._backend = backend
        self._key = key

    @property
    def name(self) -> str:
        """Name of the backend."""
        return RENDEZVOUS_BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None if there is none.

        Raises:
            RendezvousStateError: Somebody without the key has written it.
        """
        found = self._backend.get_state()
        if found is None:
            return None
        signed, token = found
        return self._verified(signed), token

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if the token is that of the present one; return the state after that, and whether it was."""
        found = self._backend.set_state(self._signature(state) + state, token)
        if found is None:
            return None
        signed, present, was_replaced = found
        return self._verified(signed), present, was_replaced

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _verified(self, signed: bytes) -> bytes:
        signature = signed[:_SIGNATURE_BYTES]
        state = signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                "the rendezvous has a state that no host of this run has written; it was not read"
            )
        return state
