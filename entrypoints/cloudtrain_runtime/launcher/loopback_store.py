"""The store of the ranks on loopback, where all of them are on this machine. Standard library only."""

from __future__ import annotations

import sys

from cloudtrain_runtime.process.after_import import call_after_import

TYPE_CHECKING = False  # not from typing: each Python process of the ranks imports this module
if TYPE_CHECKING:
    from typing import Any

_MODULE = "torch.distributed.rendezvous"
"""The module that opens the store for `init_process_group`."""

_PARAMETERS = ("host_name", "port", "world_size", "is_master")
"""Parameters of torch's store that its older versions give by position."""


def listen_on_loopback() -> None:
    """Let this process, as rank 0, accept connections to its store from this machine only.

    torch's store listens on all interfaces, whatever its address, unless it gets a socket that listens. A store with
    an address of another host stays as it is.
    """
    call_after_import(_MODULE, _give_sockets)
    # In a forked worker torch is imported already.
    if module := sys.modules.get(_MODULE):
        _give_sockets(module)


def _give_sockets(module: Any) -> None:
    plain: Any = getattr(module, "TCPStore", None)
    if plain is None:
        # A build of torch without distributed.
        return

    class TCPStore(plain):  # type: ignore[misc] # a class at run time only
        """torch's store, which gets its socket if it listens on this machine's own address."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            given = dict(zip(_PARAMETERS, arguments, strict=False)) | options
            if given.get("is_master") and given.get("master_listen_fd") is None:
                options |= _listen(given["host_name"], given["port"])
            try:
                super().__init__(*arguments, **options)
            except NotImplementedError:
                # In torch 2.5 only the older backend takes a socket.
                super().__init__(*arguments, **{**options, "use_libuv": False})

    module.TCPStore = TCPStore


def _listen(host: str, port: int) -> dict[str, int]:
    """Return a socket that listens on loopback, as torch's option; none for another address.

    Nor if the port is in use: a script that creates its group again has a store there, which torch uses again.
    """
    if not (host == "localhost" or host.startswith("127.")):
        return {}
    import socket

    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1" if host == "localhost" else host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return {}
    return {"master_listen_fd": listener.detach()}
