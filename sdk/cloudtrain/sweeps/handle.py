"""`Sweep`: the handle of a sweep, and the functions that start and find one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.errors import RunNotFoundError, UserError
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.plan import LOCAL, SAGEMAKER
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain.support.notebook.live_output import LiveTable, is_notebook, write_line
from cloudtrain.support.notebook.summary import printable
from cloudtrain.sweeps import service
from cloudtrain.sweeps.job_file import render_job
from cloudtrain.sweeps.loader import LoadedSweep, load_sweep, make_sweep
from cloudtrain.sweeps.results import SweepStatus
from cloudtrain.sweeps.spec import SAGEMAKER_ENGINE
from cloudtrain.sweeps.stored_sweep import StoredSweep
from cloudtrain.sweeps.summary import describe_trial, summarize_status, summarize_sweep
from cloudtrain.sweeps.trial import Trial, TrialState

_POLL_SECONDS = 1.0
_AWS_POLL_SECONDS = 30.0
_SANDBOX = "sandbox"


class Sweep:
    """A sweep: its status, trials and best job. Get one from `sweep()`, or from an id with `get_sweep()`.

    Attributes:
        id: Id of the sweep.
    """

    def __init__(self, stored: StoredSweep) -> None:
        self.id = stored.id
        self._stored = stored

    def __repr__(self) -> str:
        return summarize_sweep(self.id, str(self._stored.folder)).to_text()

    def _repr_html_(self) -> str:
        return summarize_sweep(self.id, str(self._stored.folder)).to_html()

    @property
    def backend(self) -> str:
        """Where its trials run: `local`, `sagemaker` or `sandbox`."""
        return self._stored.backend

    @property
    def is_controlled(self) -> bool:
        """Whether a controller of the sweep runs on this machine, or its tuning job has not ended."""
        return service.is_running(self._stored)

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks at the sweep: more where each of them calls AWS."""
        is_remote = self._stored.sweep.spec.engine == SAGEMAKER_ENGINE and self.backend == SAGEMAKER
        return _AWS_POLL_SECONDS if is_remote else _POLL_SECONDS

    @property
    def log(self) -> Path:
        """The log of its controller."""
        return self._stored.log

    def status(self) -> SweepStatus:
        """Return the present status: trials, ranking and budget."""
        return service.read_status(self._stored)

    @property
    def best(self) -> Trial:
        """The best of the trials that have succeeded.

        Raises:
            UserError: None has succeeded so far.
        """
        best = self.status().best
        if best is None:
            raise UserError(f"no trial of {self.id} has succeeded so far", f"see: cloudtrain sweep status {self.id}")
        return best

    def trial(self, number: int) -> Trial:
        """Return a trial.

        Raises:
            RunNotFoundError: The sweep has no trial of this number.
        """
        trials = self.status().trials
        for trial in trials:
            if trial.number == number:
                return trial
        hint = f"it has the trials 0 to {len(trials) - 1}" if trials else "it has no trials so far"
        raise RunNotFoundError(f"{self.id} has no trial {number}", hint)

    def run_of(self, trial: Trial) -> Run:
        """Return the last run of a trial.

        Raises:
            RunNotFoundError: It has none, or the run was deleted.
        """
        from cloudtrain.client.client import Client

        if not trial.run or trial.state is TrialState.REFUSED:
            raise RunNotFoundError(f"trial {trial.number} of {self.id} has no run", trial.reason)
        return Client(home=self._stored.folder.parent.parent).get_run(f"{self.backend}:{trial.run}")

    def best_job(self) -> JobSpec:
        """Return the job of the best trial."""
        return service.job_of(self._stored, self.best)

    def write_job(self, path: str | Path, trial: Trial | None = None) -> Trial:
        """Write the job of a trial, by default the best, into a file with comments; return the trial.

        Raises:
            UserError: The file exists, or cannot be written; or no trial has succeeded.
        """
        chosen, target = trial or self.best, Path(path)
        text = render_job(self._stored, chosen, service.job_of(self._stored, chosen), target.absolute().parent)
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{path} exists already", "give another name, or delete it") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}", "give another path") from None
        return chosen

    def wait(self, timeout_seconds: float | None = None) -> SweepStatus:
        """Wait until the sweep has ended, or its controller has, and return its status.

        Raises:
            TimeoutError: It has not ended in time. It continues.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.is_controlled:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} has not ended after {timeout_seconds:g} s; it continues")
            time.sleep(self.poll_seconds / 4)
        return self.status()

    def follow(self) -> None:
        """Show trials and budget until the sweep has ended: a table in a notebook, lines elsewhere.

        An interrupt ends this call, not the sweep.
        """
        table, shown = LiveTable(), dict[int, TrialState]()
        while True:
            status = self.status()
            if is_notebook():
                table.show(summarize_status(status))
            else:
                for trial in status.trials:
                    if shown.get(trial.number) is not trial.state:
                        shown[trial.number] = trial.state
                        write_line(printable(describe_trial(trial)))
            if not self.is_controlled:
                break
            time.sleep(self.poll_seconds)
        if not is_notebook():
            write_line(summarize_status(self.status()).to_text())

    def stop(self) -> None:
        """Ask the sweep to stop, and its active runs. `wait()` waits for the end."""
        service.stop(self._stored)


def sweep(
    job: JobSpec | str | Path,
    space: Mapping[str, Any] | None = None,
    *,
    objective: str | Mapping[str, Any] | Callable[[Run], float] = "validation/loss",
    local: bool = False,
    sandbox: bool = False,
    settings: Settings | None = None,
    new: bool = False,
    **fields: Any,
) -> Sweep:
    """Start a sweep and return it at once; it continues without this process. An unfinished equal sweep continues.

        cloudtrain.sweep("job.yaml", {"train.learning_rate": {"log_uniform": [1e-5, 1e-2]}}, trials=20, local=True)

    Args:
        job: The job or the path of its file; without a space, the path of a sweep file.
        space: Values to search, as in a sweep file.
        objective: The metric, or metric and goal as in a sweep file; or a function that returns the score of a run that
            has succeeded, with `goal="min"` or `goal="max"`. With a function, trials are started by this process, and
            the call returns at the end of the sweep.
        local: Run the trials on this machine.
        sandbox: Run the trials in the sandbox.
        settings: The account, for a sweep that this process controls; by default from environment and files.
        new: Start another sweep beside an unfinished one of the same content.
        fields: Other fields of a sweep file, such as `trials=20, parallel=2, limits={"cost": "50 USD"}`.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong; nothing was started.
    """
    score = objective if callable(objective) else None
    loaded = _load(job, space, objective, fields)
    backend = LOCAL if local else _SANDBOX if sandbox else SAGEMAKER
    stored, _ = service.open_sweep(loaded, backend=backend, settings=settings, new=new)
    if score is None:
        service.start(stored, settings=settings, new=new)
    else:
        stored.clear_stop()
        service.control(stored, report=write_line, score=score, settings=settings)
    return Sweep(stored)


def get_sweep(name: str) -> Sweep:
    """Return a sweep of this machine.

    Args:
        name: Its id, the beginning or end of one, a sweep's name for its newest sweep, or `latest`.

    Raises:
        RunNotFoundError: There is none, or several have this name.
    """
    return Sweep(service.find(name))


def _load(
    job: JobSpec | str | Path,
    space: Mapping[str, Any] | None,
    objective: str | Mapping[str, Any] | Callable[[Run], float],
    fields: dict[str, Any],
) -> LoadedSweep:
    if space is None:
        if isinstance(job, JobSpec) or fields:
            raise UserError("sweep: expected a search space", 'such as {"train.learning_rate": {"uniform": [0, 1]}}')
        return load_sweep(job)
    goal = fields.pop("goal", None)
    if callable(objective):
        if goal is None:
            raise UserError(
                "sweep: it is unknown whether a larger or a smaller score is better", 'give goal="min" or "max"'
            )
        name = getattr(objective, "__name__", "objective").strip("<>")
        wanted: Any = {"metric": f"function/{name}", "goal": goal}
    else:
        wanted = {"metric": objective} if isinstance(objective, str) else dict(objective)
        wanted |= {} if goal is None else {"goal": goal}
    return make_sweep(job, {"space": dict(space), "objective": wanted, **fields})
