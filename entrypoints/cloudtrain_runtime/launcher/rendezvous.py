"""The rendezvous of a run's agents, which accepts no state of a stranger.

torchrun's agents agree through a store that everybody who reaches its port may write, and read what is there as a
pickle. So where all hosts are on this machine, the state is in a file that only this user can write, and the ranks meet
at a store that listens on loopback. Elsewhere, agents sign the state with the key of the run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from cloudtrain_runtime.contract import RENDEZVOUS_BACKEND
from cloudtrain_runtime.process.environment import read_run_config

_RANKS_STORE = "cloudtrain.ranks_store"
_SIGNATURE_BYTES = hashlib.sha256().digest_size


def register_rendezvous() -> None:
    """Make torchrun know the backend that the launcher's arguments name."""
    # torch's own store for the ranks listens on all interfaces, and is kept when ranks are restarted, which then read the
    # addresses of their predecessors (pytorch#135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, _create_handler)


def is_file_store(options: str) -> bool:
    """Return whether the options of a rendezvous (`--rdzv-conf`) choose a file."""
    return "store_type=file" in options.split(",")


def open_store(endpoint: str, options: str, timeout: timedelta) -> Any:
    """Open the store of a rendezvous, for values that are not read as pickles."""
    if is_file_store(options):
        store = distributed.FileStore(endpoint)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    host, _, port = endpoint.rpartition(":")
    return distributed.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=False, timeout=timeout, wait_for_workers=False
    )


def _create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    is_local = is_file_store(f"store_type={parameters.get('store_type', '')}")
    key = b"" if is_local else _run_key(parameters)
    backend, store = create_backend(parameters)
    handler: _Rendezvous = _Rendezvous.from_backend(
        parameters.run_id,
        store,
        backend if is_local else SignedBackend(backend, key),
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(join=timedelta(seconds=parameters.get_as_int("join_timeout") or 600)),
    )
    handler.address = parameters.local_addr or "127.0.0.1"
    handler.is_local = is_local
    return handler


def _run_key(parameters: RendezvousParameters) -> bytes:
    """Return the run's key, which the hosts get with their configuration; a new one for a single host."""
    config = read_run_config(os.environ)
    if config is not None and config.key:
        return config.key.encode()
    if parameters.max_nodes > 1:
        raise RendezvousStateError("run.json has no key, which the hosts of a run need to agree")
    return secrets.token_bytes(_SIGNATURE_BYTES)


class SignedBackend(RendezvousBackend):
    """Signs the state of a rendezvous, and reads no state without a signature.

    Args:
        backend: The backend that keeps the state.
        key: The key that all hosts of the run have.
    """

    def __init__(self, backend: RendezvousBackend, key: bytes) -> None:
        self._backend, self._key = backend, key

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
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if the token is that of the present one; return the state after that, and whether it was."""
        found = self._backend.set_state(self._signature(state) + state, token)
        return None if found is None else (self._verified(found[0]), found[1], found[2])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _verified(self, signed: bytes) -> bytes:
        signature, state = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError(
                "the rendezvous has a state that no host of this run has written; it was not read"
            )
        return state


class _Rendezvous(DynamicRendezvousHandler):
    """A rendezvous whose first agent has the store at which the ranks meet; on one machine, it listens on loopback.

    Each round has a store of its own: restarted ranks must not read the addresses of their predecessors.
    """

    address = "127.0.0.1"
    """Where the other hosts reach this one."""

    is_local = True
    """Whether all hosts are on this machine."""

    _ranks_store: Any = None

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return RENDEZVOUS_BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks only connect to their store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round; return the place of the ranks' store."""
        found = super().next_rendezvous()
        if found.rank == 0:
            # The name of a host can be an address that the other hosts do not reach.
            listener = socket.create_server((self.address if self.is_local else "", 0))
            port = listener.getsockname()[1]
            self._ranks_store = distributed.TCPStore(  # type: ignore[attr-defined]
                self.address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            found.store.set(_RANKS_STORE, f"{self.address} {port}")
        address, _, text = found.store.get(_RANKS_STORE).decode().partition(" ")
        info = RendezvousStoreInfo(address, int(text))
        return RendezvousInfo(found.store, found.rank, found.world_size, info)
