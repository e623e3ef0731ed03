"""The protocol of backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from cloudtrain.planning.plan import Plan
from cloudtrain.runs.run import Run, RunOperations
from cloudtrain.runs.run_filter import ALL_RUNS, RunFilter
from cloudtrain.runs.status import Status

if TYPE_CHECKING:
    from cloudtrain.bundle import ProgressCallback
    from cloudtrain.bundle.archive import Bundle


class Backend(RunOperations, Protocol):
    """Runs plans.

    Guarantees:

    1. `submit` sends exactly `plan.request`, or nothing.
    2. After `submit` has returned, the run continues without this process.
    3. Every operation works with the run id alone, in a new process.
    4. `status` reports SUCCEEDED only for a run that succeeded, and keeps the reason of a failure.
    5. `logs` yields each line once.
    6. `stop` returns at once; all processes of the run end within the grace time.
    """

    def submit(self, plan: Plan, bundle: Bundle, *, progress: ProgressCallback | None = None) -> Run:
        """Start a run.

        Args:
            plan: The plan.
            bundle: Its code.
            progress: Callback `(bytes_done, bytes_total)`.

        Raises:
            CloudError: AWS refused the request; nothing was started.
        """
        ...

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the selected runs, newest first. Pages are fetched lazily.

        The statuses include progress only if reading it is cheap.
        """
        ...
