"""The cause of a failure, exchanged between the hosts of a run through torchrun's rendezvous store.

A healthy rank that loses a peer fails with the effect ("Connection closed by peer"), and SageMaker may show the failure
file of any host. So a host that knows a cause publishes it, and a host that saw only an effect writes what was
published. The first host keeps the store; it waits for the others before it leaves.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

_CAUSE, _READERS = "cloudtrain/cause", "cloudtrain/cause-readers"
_WAIT_SECONDS = 5.0
"""How long a host waits for the cause of another one, and the first host for the others."""

_POLL_SECONDS = 0.02


def agree_on_cause(reason: str, *, is_effect: bool, endpoint: str, hosts: int, keeps_store: bool) -> str:
    """Return the text for this host's failure file; an empty string where the cause is another host's and not known.

    Args:
        reason: What this host saw.
        is_effect: Whether that only followed another rank's failure.
        endpoint: Address of the rendezvous store, `host:port`.
        hosts: Hosts of the run.
        keeps_store: Whether the store is in this process.
    """
    if hosts == 1:
        return reason
    from torch import distributed

    host, _, port = endpoint.rpartition(":")
    wait = timedelta(seconds=_WAIT_SECONDS)
    try:
        store: Any = distributed.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=wait, wait_for_workers=False
        )
        if not is_effect:
            store.compare_set(_CAUSE, "", reason)
        try:
            store.wait([_CAUSE], wait)
            found = str(store.get(_CAUSE), "utf-8", "replace")
        except distributed.DistStoreError:  # all hosts saw the same kind of error, so it may be the cause
            found = reason
        store.add(_READERS, 1)
        if keeps_store:
            _wait_for_readers(store, hosts)
    except distributed.DistError:  # the first host has gone, and with it what was known
        return "" if is_effect else reason
    return found


def _wait_for_readers(store: Any, hosts: int) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while store.add(_READERS, 0) < hosts and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
