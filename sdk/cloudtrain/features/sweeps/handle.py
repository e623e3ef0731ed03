"""`Sweep`: the handle of a sweep, and the functions that start and find one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.aws.retry import Backoff, OutageTolerance, poll
from cloudtrain.client.client import Client, client_of
from cloudtrain.errors import RunNotFoundError, UserError
from cloudtrain.features.sweeps import service
from cloudtrain.features.sweeps.loader import LoadedSweep, load_sweep, make_sweep
from cloudtrain.features.sweeps.planning import describe, job_of
from cloudtrain.features.sweeps.results import (
    SweepState,
    SweepStatus,
    describe_trial,
    summarize_status,
)
from cloudtrain.features.sweeps.space import Space
from cloudtrain.features.sweeps.spec import FUNCTION
from cloudtrain.features.sweeps.stored_sweep import StoredSweep, find_stored
from cloudtrain.features.sweeps.trial import Trial, TrialState
from cloudtrain.job.document import parse_document
from cloudtrain.job.job_text import job_text
from cloudtrain.job.spec import JobSpec
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import choose_backend
from cloudtrain.support.notebook.live_output import LiveTable, is_notebook, write_line
from cloudtrain.support.notebook.summary import Row, Summary, printable
from cloudtrain.support.units import format_plain_number


class Sweep:
    """A sweep: its status, trials and best job. Get one from `sweep()`, or from an id with `get_sweep()`.

    Attributes:
        id: Id of the sweep.
    """

    def __init__(self, stored: StoredSweep, settings: Settings | None = None) -> None:
        self.id = stored.id
        self._stored = stored
        self._engine = service.engine_of_stored(stored, settings)

    def __repr__(self) -> str:
        return self._summary().to_text()

    def _repr_html_(self) -> str:
        return self._summary().to_html()

    def _summary(self) -> Summary:
        """Return a summary without reading the trials."""
        next_calls: Row = (
            "next",
            "sweep.follow(), sweep.status(), sweep.best, sweep.best_job(), sweep.stop()",
        )
        return Summary(f"Sweep {self.id}", [("folder", str(self._stored.folder))], [next_calls])

    @property
    def backend(self) -> str:
        """Where its trials run: `local`, `sagemaker` or `sandbox`."""
        return self._stored.backend

    @property
    def is_controlled(self) -> bool:
        """Whether a controller of the sweep runs on this machine, or its tuning job has not ended."""
        return self._look()[1]

    @property
    def poll_seconds(self) -> float:
        """Seconds between two looks at the sweep: more where each of them calls AWS."""
        return self._engine.poll_seconds

    @property
    def log(self) -> Path:
        """The log of its controller."""
        return self._stored.log

    def status(self) -> SweepStatus:
        """Return the present status: trials, ranking and budget."""
        return self._look()[0]

    @property
    def best(self) -> Trial:
        """The best of the trials that have succeeded.

        Raises:
            UserError: None has succeeded so far.
        """
        best = self.status().best
        if best is None:
            raise UserError(
                f"no trial of {self.id} has succeeded so far",
                f"see: cloudtrain sweep status {self.id}",
            )
        return best

    def trial(self, number: int) -> Trial:
        """Return a trial.

        Raises:
            RunNotFoundError: The sweep has no trial of this number.
        """
        trials = {trial.number: trial for trial in self.status().trials}
        if number not in trials:
            hint = f"it has the trials 0 to {max(trials)}" if trials else "it has no trials so far"
            raise RunNotFoundError(f"{self.id} has no trial {number}", hint)
        return trials[number]

    def run_of(self, trial: Trial) -> Run:
        """Return the last run of a trial.

        Raises:
            RunNotFoundError: It has none, or the run was deleted.
        """
        if not trial.run or trial.state is TrialState.REFUSED:
            raise RunNotFoundError(f"trial {trial.number} of {self.id} has no run", trial.reason)
        return self._engine.client().get_run(f"{self.backend}:{trial.run}")

    def best_job(self) -> JobSpec:
        """Return the job of the best trial."""
        return job_of(self._stored.sweep, self.best)

    def write_job(self, path: str | Path, trial: Trial | None = None) -> Trial:
        """Write the job of a trial, by default the best, into a file with comments; return the trial.

        Raises:
            UserError: The file exists, or cannot be written; or no trial has succeeded.
        """
        chosen = trial or self.best
        target = Path(path)
        text = _render_job(self._stored, chosen, target.absolute().parent)
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{path} exists already", "give another name, or delete it") from None
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written: {error.strerror}", "give another path"
            ) from None
        return chosen

    def wait(self, timeout_seconds: float | None = None) -> SweepStatus:
        """Wait until the sweep has ended, or its controller has, and return its status.

        Raises:
            TimeoutError: It has not ended in time. It continues.
            CloudError: AWS refused, or could not be reached at first or for an hour.
        """
        for status, is_controlled in self._poll(timeout_seconds):
            if not is_controlled:
                return status
        raise TimeoutError(
            f"{self.id} has not ended after {timeout_seconds or 0:g} s; it continues"
        )

    def follow(self) -> None:
        """Show trials and budget until the sweep has ended: a table in a notebook, lines elsewhere.

        An interrupt ends this call, not the sweep.
        """
        if is_notebook():
            table = LiveTable()
            for status in self.statuses(write_line):
                table.show(summarize_status(status))
        else:
            write_line(summarize_status(self.follow_trials(write_line)).to_text())

    def follow_trials(self, show: Callable[[str], None]) -> SweepStatus:
        """Call `show` with one line for each change of a trial's state and each pause; return the status at the end."""
        shown: dict[int, TrialState] = {}
        reason = ""
        for status in self.statuses(show):
            if status.state is SweepState.RUNNING and status.reason != reason:
                reason = status.reason
                show(printable(reason or "the sweep continues"))
            for trial in status.trials:
                if shown.get(trial.number) is not trial.state:
                    shown[trial.number] = trial.state
                    show(printable(describe_trial(trial)))
        return status

    def statuses(self, on_trouble: Callable[[str], None] | None = None) -> Iterator[SweepStatus]:
        """Yield the status at each poll; the last one is that after the sweep, or its controller, has ended.

        Args:
            on_trouble: Called with a message when AWS cannot be reached any more, and when it can again.

        Raises:
            CloudError: AWS refused, or could not be reached at first or for an hour.
        """
        for status, is_controlled in self._poll(on_trouble=on_trouble):
            yield status
            if not is_controlled:
                return

    def _poll(
        self,
        timeout_seconds: float | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[tuple[SweepStatus, bool]]:
        seconds = self.poll_seconds
        return poll(
            self._look,
            Backoff(seconds, seconds),
            OutageTolerance(on_trouble, note="retrying; the sweep continues"),
            timeout_seconds=timeout_seconds,
        )

    def _look(self) -> tuple[SweepStatus, bool]:
        """Return the present status, and whether the sweep is controlled."""
        return self._engine.look(self._stored)

    def stop(self) -> None:
        """Ask the sweep to stop, and its active runs. `wait()` waits for the end."""
        self._engine.stop(self._stored)


def sweep(
    job: JobSpec | str | Path,
    space: Mapping[str, Any] | None = None,
    *,
    objective: str | Mapping[str, Any] | Callable[[Run], float] = "validation/loss",
    backend: str | None = None,
    local: bool = False,
    sandbox: bool = False,
    settings: Settings | None = None,
    client: Client | None = None,
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
        backend: Where the trials run; by default in the account.
        local: The same as `backend="local"`.
        sandbox: The same as `backend="sandbox"`.
        settings: The account, for a sweep that this process controls; by default from environment and files.
        client: The client whose settings and folder of local runs are used, in place of `settings`.
        new: Start another sweep beside an unfinished one of the same content.
        fields: Other fields of a sweep file, such as `trials=20, parallel=2, limits={"cost": "50 USD"}`.

    Raises:
        SpecError, BundleError, SettingsError, MissingExtraError: The input is wrong; nothing was started.
    """
    score = objective if callable(objective) else None
    loaded = _load(job, space, objective, fields)
    chosen = choose_backend(backend, local=local, sandbox=sandbox)
    session = client_of(client, settings).session
    stored, _ = service.open_sweep(
        loaded, backend=chosen, settings=session.settings, home=session.home, new=new
    )
    if score is None:
        service.start(stored, settings=session.settings, new=new)
    else:
        stored.stop_file.unlink(missing_ok=True)
        service.control(stored, report=write_line, score=score, settings=session.settings)
    return Sweep(stored, session.settings)


def get_sweep(
    name: str | Sweep, *, settings: Settings | None = None, client: Client | None = None
) -> Sweep:
    """Return a sweep of this machine.

    Args:
        name: Its id, the beginning or end of one, a sweep's name for its newest sweep, or `latest`; a `Sweep` is
            returned as it is.
        settings: The account, for a sweep that SageMaker runs; by default from environment and files.
        client: The client whose settings and folder of local runs are used, in place of `settings`.

    Raises:
        RunNotFoundError: There is none, or several have this name.
    """
    if isinstance(name, Sweep):
        return name
    session = client_of(client, settings).session
    return Sweep(find_stored(name, session.home), session.settings)


def _load(
    job: JobSpec | str | Path,
    space: Mapping[str, Any] | None,
    objective: str | Mapping[str, Any] | Callable[[Run], float],
    fields: dict[str, Any],
) -> LoadedSweep:
    if space is None:
        if isinstance(job, JobSpec) or fields:
            raise UserError(
                "sweep: expected a search space",
                'such as {"train.learning_rate": {"uniform": [0, 1]}}',
            )
        return load_sweep(job)
    goal = fields.pop("goal", None)
    if callable(objective):
        if goal is None:
            message = "sweep: it is unknown whether a larger or a smaller score is better"
            raise UserError(message, 'give goal="min" or "max"')
        objective = f"{FUNCTION}{getattr(objective, '__name__', 'objective').strip('<>')}"
    wanted = {"metric": objective} if isinstance(objective, str) else dict(objective)
    wanted |= {} if goal is None else {"goal": goal}
    return make_sweep(job, {"space": dict(space), "objective": wanted, **fields})


def _render_job(stored: StoredSweep, trial: Trial, folder: Path) -> str:
    """Return the job of a trial as a job file in a folder, with comments on the sweep and the searched fields."""
    text = job_text(job_of(stored.sweep, trial), folder)
    metric = stored.sweep.spec.objective.metric
    objective = trial.objective
    score = "" if objective is None else f", {metric} {format_plain_number(objective)}"
    head = f"# Trial {trial.number} of the sweep {stored.id}{score}.\n# Its run: {trial.run}\n"
    return head + _with_comments(text, stored, trial)


def _with_comments(text: str, stored: StoredSweep, trial: Trial) -> str:
    """Add a comment to the line of each searched field."""
    lines = text.splitlines()
    document = parse_document(text, "job")
    for dimension in Space.of(stored.sweep.spec.space).dimensions:
        at = document.keys.get(tuple(dimension.path.split(".")))
        if dimension.path in trial.values and at is not None and at.line is not None:
            lines[at.line - 1] += f"  # searched: {describe(dimension)}".replace("\n", " ")
    return "\n".join(lines) + "\n"
