"""Reading of a run's ledger: from its status, and where that has the newest events only, from its log."""

from __future__ import annotations

import time

from cloudtrain.runs.history import read_events
from cloudtrain.runs.ledger import Ledger, make_ledger
from cloudtrain.runs.log_lines import LogSource
from cloudtrain.runs.status import Status
from cloudtrain.runs.stretches import read_stretches
from cloudtrain.support.backend_facts import facts_of


def has_all_events(status: Status) -> bool:
    """Whether a status was folded from all events of its run. In an account it reads the end of the log only."""
    return not facts_of(status.backend).uses_account


def read_ledger(run: LogSource, status: Status) -> Ledger:
    """Return the ledger of a run so far.

    Args:
        run: The run.
        status: Its status.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    stretches = None if has_all_events(status) else read_stretches(read_events(run))
    return make_ledger(status, time.time(), stretches)
