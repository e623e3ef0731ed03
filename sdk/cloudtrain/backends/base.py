"""What a backend promises."""

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
    """A place that runs plans.

    Its promises:

    1. `submit` sends exactly `plan.request`, or nothing.
    2. After `submit` has returned, the run goes on without this process.
    3. Every verb works from the run id alone, in a new process.
    4. `status` never says SUCCEEDED of a run that has not, and never forgets a reason.
    5. `logs` yields each line once.
    6. `stop` returns at once; the run ends within the grace time, with every process of it.
    """

    def submit(self, plan: Plan, bundle: Bundle, *, progress: ProgressCallback | None = None) -> Run:
        """Start a run.

        Args:
            plan: What to run.
            bundle: Its code.
            progress: Told how many bytes have been uploaded, and how many there are.

        Raises:
            CloudError: AWS refused it; nothing runs.
        """
        ...

    def list(self, wanted: RunFilter = ALL_RUNS) -> Iterator[Status]:
        """Yield the runs of this backend, newest first. Reports progress where that is cheap.

        Nothing is asked or read before it is needed: who takes ten runs pays for ten.
        """
        ...
