"""Agreement between the hosts of a run on the cause of a failure, through torchrun's rendezvous store.

A healthy rank that loses a peer fails with a secondary error ("Connection closed by peer"), and SageMaker may show the
failure file of any host. A host that knows the cause therefore publishes it, and a host with only a secondary error
writes the published cause. The first host holds the store and waits for the others before it exits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

_CAUSE = "cloudtrain/cause"
_READERS = "cloudtrain/cause-readers"
_WAIT_SECONDS = 5.0
"""How long a host waits for another host's cause, and the first host for the others."""

_POLL_SECONDS = 0.02


def agree_on_cause(
    reason: str, *, is_secondary: bool, endpoint: str, hosts: int, options: str
) -> str:
    """Return the text for this host's failure file; empty if another host has the cause and it is unknown here.

    Args:
        reason: The failure that this host observed.
        is_secondary: Whether it is only a consequence of another rank's failure.
        endpoint: Address of the rendezvous store, `host:port`, or its file.
        hosts: Number of hosts of the run.
        options: torchrun's `--rdzv-conf`.
    """
    if hosts == 1:
        return reason
    from torch import distributed

    from cloudtrain_runtime.launcher.rendezvous import open_store

    holds_store = "is_host=true" in options
    try:
        store = open_store(endpoint, options, timedelta(seconds=_WAIT_SECONDS))
        if not is_secondary:
            store.compare_set(_CAUSE, "", reason)
        _wait(lambda: store.check([_CAUSE]))
        is_known = store.check([_CAUSE])
        # Without a cause, all hosts observed the same kind of error, so it may be the cause.
        found = str(store.get(_CAUSE), "utf-8", "replace") if is_known else reason
        store.add(_READERS, 1)
        if holds_store:
            _wait(lambda: store.add(_READERS, 0) >= hosts)
    except distributed.DistError:
        # The first host has ended, and the store with it.
        return "" if is_secondary else reason
    return found


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not is_done() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
