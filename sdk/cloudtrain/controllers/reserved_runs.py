"""The runs of a controller: each is submitted under an id that was reserved and recorded before."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime

from cloudtrain.bundle import Contents
from cloudtrain.client.client import Client
from cloudtrain.controllers.folder import ControllerFolder
from cloudtrain.errors import RunNotFoundError, UnreadableStateError
from cloudtrain.runs.run import Run
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.run_id import make_run_id, submitted_at

_CAPACITY_SECONDS = 60.0
"""Where a backend is not there at present, such as a sandbox that has ended."""


@dataclass(frozen=True)
class ReservedRuns:
    """The runs of one controller.

    Attributes:
        place: The controller's folder.
        backend: Where they run.
        code: Their code; None for runs that continue others, whose code is stored.
        settings: The account; None for the settings of environment and files.
    """

    place: ControllerFolder
    backend: str
    code: Contents | None
    settings: Settings | None

    @property
    def is_local(self) -> bool:
        """Whether they run on this machine, where they cost nothing."""
        return facts_of(self.backend).is_local

    def capacity_pause_seconds(self) -> float:
        """Return how long a submit without capacity waits at first."""
        for each in self.client().session.find_backends((self.backend,), is_named=True):
            return each.capacity_pause_seconds
        return _CAPACITY_SECONDS

    def new_id(self, job_name: str, part: str) -> str:
        """Return the id of a run that is about to be recorded.

        Args:
            job_name: Name of its job.
            part: What it is of all that the controller does; equal for equal runs only.
        """
        suffix = hashlib.sha256(f"{self.place.id}/{part}".encode()).hexdigest()[:6]
        return make_run_id(job_name, datetime.now(UTC), suffix)

    def client(self, run_id: str = "") -> Client:
        """Return a client, which gives the run that it submits a reserved id."""
        submitted = submitted_at(run_id) if run_id else None
        stamp = None if submitted is None else (submitted, run_id.rpartition("-")[2])
        client = Client(self.settings, home=self.place.home, stamp=stamp, code=self.code)
        client.session.sees_chains = False
        return client

    def reference(self, run_id: str) -> str:
        """Return the reference of a run."""
        return f"{self.backend}:{run_id}"

    def get(self, run_id: str) -> Run:
        """Return a run.

        Raises:
            RunNotFoundError: It does not exist.
        """
        return self.client().get_run(self.reference(run_id))

    def find_status(self, run_id: str, *, was_submitted: bool) -> Status | None:
        """Return the status of a run; None if it does not exist, or its submit was interrupted.

        Args:
            run_id: Its id.
            was_submitted: Whether its submit is known to have ended.
        """
        try:
            status = self.get(run_id).status()
        except (RunNotFoundError, UnreadableStateError):
            return None
        if not was_submitted and self.never_began(status):
            return None
        return status

    def never_began(self, status: Status) -> bool:
        """Return whether a submit without an account was interrupted before the run had a supervisor."""
        is_in_account = facts_of(self.backend).uses_account
        return not is_in_account and status.state is State.FAILED and status.started is None
