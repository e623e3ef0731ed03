"""The engine of a sweep: what proposes, starts and ranks its trials. The field `engine` of the sweep file chooses it."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.bundle import Contents
from cloudtrain.client.client import Client
from cloudtrain.client.home import make_home
from cloudtrain.features.sweeps.loader import LoadedSweep
from cloudtrain.features.sweeps.planning import EngineRules, SweepPlan, plan_sweep
from cloudtrain.features.sweeps.results import SweepStatus
from cloudtrain.features.sweeps.stored_sweep import StoredSweep
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import facts_of


@dataclass(frozen=True)
class Engine(abc.ABC):
    """The engine of one sweep.

    Attributes:
        sweep: The sweep.
        backend: Where its trials run.
        settings: The account; None for the settings of environment and files.
        home: Folder of local runs; None for the one of environment and working folder.
    """

    sweep: LoadedSweep
    backend: str
    settings: Settings | None = None
    home: Path | None = None

    @property
    @abc.abstractmethod
    def rules(self) -> EngineRules:
        """What the engine means for the plan."""

    @property
    @abc.abstractmethod
    def poll_seconds(self) -> float:
        """Seconds between two looks at the sweep: more where each of them calls AWS."""

    def plan(self, code: Contents | None = None) -> SweepPlan:
        """Return the plan of the sweep. Offline.

        Args:
            code: Its code; by default that of the job's folders is read.

        Raises:
            SpecError: A value of the space, or the job itself, cannot work.
            BundleError: The code folder cannot be packed.
        """
        planner = self.client(code).planner(self.sweep.job, backend=self.backend)
        is_free = not facts_of(self.backend).uses_account
        return plan_sweep(self.sweep, planner, self.rules, is_free=is_free)

    def client(self, code: Contents | None = None) -> Client:
        """Return a client of its account and folder of local runs.

        Args:
            code: The code of the trials; by default that of the job's folders is read.
        """
        return Client(self.settings, home=self.home, code=code)

    def store(self, planned: SweepPlan) -> StoredSweep:
        """Create the folder of the sweep."""
        lowest = 0.0 if planned.trial_usd is None else planned.trial_usd[0]
        plan = (planned.digest, lowest, planned.trials)
        return StoredSweep.create(self.home or make_home(), self.sweep, self.backend, plan)

    @abc.abstractmethod
    def find_elsewhere(self, *, new: bool) -> StoredSweep | None:
        """Check that the engine can run here; return the unfinished equal sweep of another machine, unless `new`.

        Raises:
            MissingExtraError: A package of the engine is not installed.
            CloudtrainError: The backend is not ready, for example because settings are missing.
        """

    @abc.abstractmethod
    def create(self) -> tuple[StoredSweep, SweepPlan]:
        """Plan the sweep and create its folder; nothing is started."""

    @abc.abstractmethod
    def start(self, stored: StoredSweep, environ: Mapping[str, str], *, new: bool) -> None:
        """Start or continue the sweep. If it runs already, do nothing.

        Args:
            stored: The sweep.
            environ: Additional environment variables of a process that this starts.
            new: Do not continue an unfinished equal sweep that the account has.
        """

    @abc.abstractmethod
    def look(self, stored: StoredSweep) -> tuple[SweepStatus, bool]:
        """Return the present status, and whether something continues the sweep now."""

    @abc.abstractmethod
    def stop(self, stored: StoredSweep) -> None:
        """Ask the sweep to stop, and its active runs."""

    @abc.abstractmethod
    def has_other_code(self, stored: StoredSweep) -> bool:
        """Return whether the trials certainly run with other code than the code folder now has."""
