"""`Run`: the handle of a submitted run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cloudtrain.aws.retry import Backoff, OutageTolerance, poll
from cloudtrain.errors import RunNotFoundError, UserError
from cloudtrain.runs.following import follow_run
from cloudtrain.runs.history import read_history
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter, LogLine
from cloudtrain.runs.status import State, Status, parse_state
from cloudtrain.support.argument_types import check_type
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.both_iterator import BothIterator
from cloudtrain.support.notebook.figure import draw_metrics
from cloudtrain.support.notebook.summary import Row, Summary
from cloudtrain.support.one_or_more import one_or_more
from cloudtrain_runtime.contract.redaction import LineRedactor

if TYPE_CHECKING:
    from torch import nn

    from cloudtrain.bundle import ProgressCallback
    from cloudtrain.runs.billing import Billing
    from cloudtrain.runs.downloads import Download, RunStorage
    from cloudtrain.runs.evaluations import Evaluation

_RUN_NAME = re.compile(r"-?[a-zA-Z0-9][a-zA-Z0-9-]*")


def parse_reference(text: str) -> tuple[str | None, str]:
    """Split `<backend>:<name of a run>`, or a name alone, into backend and name.

    Raises:
        RunNotFoundError: the text is neither.
    """
    backend, colon, run = text.rpartition(":")
    if not _RUN_NAME.fullmatch(run) or (colon and not backend.isidentifier()):
        hint = "RUN is an id such as digits-261120-101500-1a2b3c, the beginning or end of one, a job's name or `latest`"
        raise RunNotFoundError(
            f"{text!r} is not the name of a run", f"{hint}; see: cloudtrain list"
        )
    return (backend if colon else None), run


def reference_of(run: RunLike) -> str:
    """Return the reference of a run that is given by its handle, by a status or by text.

    Raises:
        UserError: it is neither.
    """
    if isinstance(run, Run | Status):
        return run.reference
    if not isinstance(run, str):
        raise UserError(
            f"expected a run id or a Run, got {type(run).__name__}",
            "for example cloudtrain.get_run(id)",
        )
    return run


class RunOperations(Protocol):
    """The operations of a backend that `Run` uses.

    Attributes:
        name: Name of the backend.
    """

    name: str

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status."""

    def status(self, run: str) -> Status:
        """Return the present status.

        Raises:
            RunNotFoundError: this backend has no such run.
        """

    def logs(
        self,
        run: str,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Iterator[LogLine]:
        """Yield the selected log lines of all hosts, each once with its time; with `follow` until the run has ended."""

    def facts(self, run: str) -> Mapping[str, str]:
        """Return the known values of the job, by field of job.yaml."""

    def billing(self, run: str) -> Billing:
        """Return what is billed for the run."""

    def plan_of(self, run: str) -> Mapping[str, Any]:
        """Return the run's plan.json."""

    def storage_of(self, run: str) -> RunStorage:
        """Return where the run's results are, which need not exist yet."""

    def stop(self, run: str) -> None:
        """Ask the run to stop, and return at once. A run that has ended is left as it is."""

    def end_warm_pool(self, run: str) -> None:
        """Terminate the warm pool of an ended run.

        Raises:
            UserError: the run has no warm pool.
        """


class Run:
    """A submitted run: its status, logs and metrics. Get one from `submit()`, or from an id with `get_run()`.

    Attributes:
        id: The run id.
        attached: Whether a submit attached to this run of the same request and code instead of starting a new one.
        warnings: The plan's warnings, one sentence each; empty unless `submit` or `resume` returned the run.
        waits: Whether a submit found no capacity, and a process in the background submits it again.
    """

    def __init__(
        self,
        run_id: str,
        operations: RunOperations,
        *,
        attached: bool = False,
        warnings: Iterable[str] = (),
        waits: bool = False,
    ) -> None:
        self.id = run_id
        self.attached = attached
        self.waits = waits
        self.warnings = tuple(warnings)
        self._operations = operations

    def __repr__(self) -> str:
        return _summarize(self).to_text()

    def _repr_html_(self) -> str:
        from cloudtrain.runs.notebook_run import run_html

        return run_html(self, self.status, _summarize(self))

    @property
    def backend(self) -> str:
        """Name of the backend: `local`, `sagemaker` or `sandbox`."""
        return self._operations.name

    @property
    def reference(self) -> str:
        """`<backend>:<run id>`."""
        return f"{self.backend}:{self.id}"

    @property
    def is_billed(self) -> bool:
        """Whether the run costs money while it is active."""
        return facts_of(self.backend).is_billed

    def with_warnings(self, warnings: Iterable[str]) -> Run:
        """Return the same run with the warnings of its plan."""
        return Run(self.id, self._operations, attached=self.attached, warnings=warnings)

    def poll_backoff(self) -> Backoff:
        """Return the waits between polls of the status: a new `Backoff` for each loop."""
        return self._operations.poll_backoff()

    def status(self) -> Status:
        """Return the present status."""
        return self._operations.status(self.id)

    @property
    def state(self) -> State:
        """The present state."""
        return self.status().state

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Latest value of each metric by `split/name`, for example `test/accuracy`."""
        return self.status().progress.metrics

    def logs(
        self,
        *,
        follow: bool = False,
        only: LogFilter = ALL_LINES,
        on_trouble: Callable[[str], None] | None = None,
    ) -> BothIterator[LogLine]:
        """Return the log lines of all hosts, each once, with secrets redacted, for `for` or `async for`.

        Without `follow` the lines are ordered by time; with `follow` they come as they arrive.

        Args:
            follow: Continue until the run has ended, also through an outage of up to an hour.
            only: Filter of the lines.
            on_trouble: Called with a message when an outage begins, and when it ends.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        check_type("only", only, LogFilter)
        lines = self._operations.logs(self.id, follow=follow, only=only, on_trouble=on_trouble)
        return BothIterator(_redacted(lines))

    def history(self, *, fill: bool = False) -> Any:
        """Return all values of all metrics so far: one row per step, ordered by step.

        A row has `step`, `time` (seconds since the epoch) and the values of its step by metric, such as `train/loss`.
        After a restart, the steps of the later attempt replace those of the earlier one.

        Args:
            fill: Give a row that lacks a metric its value of an earlier step, such as the newest evaluation. A value
                that is not finite stays as it is.

        Returns:
            A `pandas.DataFrame` where pandas is installed, with NaN for a value that is missing or not finite; else a
            list of dicts, where a missing value has no key and one that is not finite is None.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        history = read_history(self)
        try:
            return history.to_frame(fill=fill)
        except ImportError:
            return history.rows(fill=fill)

    def plot(self, *metrics: str) -> Any:
        """Return a figure of the history, with the values of all splits of a metric in one diagram.

        Args:
            metrics: Metrics such as `train/loss`, or names such as `loss` for all splits; by default all metrics but
                those of the training's speed.

        Returns:
            A `matplotlib.figure.Figure`: a notebook shows it, `savefig` writes it.

        Raises:
            MissingExtraError: matplotlib is not installed.
            UserError: The run has reported no such metric.
            CloudError: AWS refused or cannot be reached.
        """
        history = read_history(self)
        shown = {name: history.metrics[name] for name in history.select(metrics)}
        return draw_metrics(
            {name: [(each.step, each.value) for each in shown[name]] for name in shown}, self.id
        )

    def follow(self) -> None:
        """Show state, progress and metrics until the run has ended.

        A notebook shows one table that is updated in place; elsewhere lines are printed, one per ten seconds at most.
        An interrupt ends this call, not the run; `get_run(id).follow()` follows it again, in any process.

        Raises:
            CloudError: AWS refused, or could not be reached for an hour. The run continues.
        """
        follow_run(self)

    def plan_document(self) -> Mapping[str, Any]:
        """Return the run's plan.json: the plan that was submitted, with its request.

        Raises:
            UserError: There is none, because something else submitted the job or deleted the file.
            CloudError: AWS refused or cannot be reached.
        """
        return self._operations.plan_of(self.id)

    def evaluations(self) -> tuple[Evaluation, ...]:
        """Return the results of `evaluate` that are kept with the run, newest first.

        Raises:
            CloudError: AWS refused or cannot be reached.
        """
        from cloudtrain.runs.evaluations import read_evaluations

        return read_evaluations(self._operations.storage_of(self.id))

    def billing(self) -> Billing:
        """Return what is billed for the run so far."""
        return self._operations.billing(self.id)

    def storage(self) -> RunStorage:
        """Return where the run's results are, which need not exist yet."""
        return self._operations.storage_of(self.id)

    def facts(self) -> Mapping[str, str]:
        """Return the known values of the job, by field of job.yaml such as `cluster.volume`."""
        return self._operations.facts(self.id)

    def download(
        self,
        to: str | Path | None = None,
        *,
        what: str | Iterable[str] = (),
        step: int | str | None = None,
        unpack: bool = False,
        force: bool = False,
        progress: ProgressCallback | None = None,
    ) -> Download:
        """Copy what the run has stored into a folder, and verify it: model, outputs and checkpoints.

        A file appears when it is complete and verified; equal files that are there already are kept. `SHA256SUMS` in
        the folder records all of them.

        Args:
            to: The folder; by default `<run id>` in the working folder.
            what: Parts: `model`, `outputs`, `checkpoints`; by default all that exist.
            step: Only the checkpoint of this step, or the `best` or `last` one; by default all complete ones.
            unpack: Unpack model.tar.gz and output.tar.gz into `model` and `output`, too.
            force: Replace files with other content.
            progress: Callback `(bytes_done, bytes_total)`.

        Raises:
            UserError: A part does not exist, or the folder has other files of these names; nothing was copied.
            DamagedCheckpointError: A file differs from the manifest of its checkpoint.
            CloudError: AWS refused or cannot be reached.
        """
        from cloudtrain.runs.downloads import Choice, RunResults

        choice = Choice(one_or_more(what), step, unpack=unpack, force=force)
        results = RunResults(self.id, self._operations.storage_of(self.id), self.plan_document)
        return results.download(Path(to or self.id), choice, progress)

    def load_model(self, *, checkpoint: int | str | None = None) -> nn.Module:
        """Return the model that the run has trained: the module of its Task with its weights, on the CPU.

        The code of the run is imported into this process. Modules of the same names that it has already stay as they
        are.

        Args:
            checkpoint: Step of a checkpoint, or `best`; by default the weights that the run exported at its end.

        Raises:
            UserError: The run trained no Task, has no such weights, or its code cannot be imported here.
            MissingExtraError: torch is not installed.
            DamagedCheckpointError: The checkpoint differs from what was written.
            CloudError: AWS refused or cannot be reached.
        """
        from cloudtrain.runs.saved_model import load_model

        return load_model(self, checkpoint)

    def wait(
        self,
        timeout_seconds: float | None = None,
        *,
        until: State | str | None = None,
        on_change: Callable[[Status], None] | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> Status:
        """Wait until the run has ended and return its status. A failed run raises no exception.

        Args:
            timeout_seconds: Longest wait; None waits without limit.
            until: Return in this state, too.
            on_change: Called with the status when state or reason have changed.
            on_trouble: Called with a message when AWS cannot be reached any more, and when it can again.

        Raises:
            TimeoutError: the run has not ended in time. It continues.
            CloudError: AWS refused the request, or could not be reached at first or for an hour.
        """
        wanted = None if until is None else parse_state(until)
        outages = OutageTolerance(on_trouble)
        last: tuple[State, str] | None = None
        for status in poll(
            self.status,
            self.poll_backoff(),
            outages,
            changing=_state_and_reason,
            timeout_seconds=timeout_seconds,
        ):
            if status.state.is_final or status.state is wanted:
                return status
            if _state_and_reason(status) != last and on_change is not None:
                on_change(status)
            last = _state_and_reason(status)
        shown = "in an unknown state" if last is None or outages.last_error() else str(last[0])
        raise TimeoutError(
            f"{self.reference} is {shown} after {timeout_seconds or 0:g} s; it continues"
        )

    def __await__(self) -> Generator[Any, None, Status]:
        """Wait until the run has ended, while the event loop goes on; `await run` returns its status."""
        return self._wait().__await__()

    async def _wait(self) -> Status:
        from cloudtrain.support.awaiting import in_thread

        polled = poll(
            self.status, self.poll_backoff(), OutageTolerance(None), changing=_state_and_reason
        )
        while True:
            status: Status = await in_thread(next, polled)
            if status.state.is_final:
                return status

    def stop(self) -> None:
        """Ask the run to stop, and return at once; `wait()` waits for the end."""
        self._operations.stop(self.id)

    def end_warm_pool(self) -> None:
        """Terminate the warm pool of this run, which must have ended.

        Raises:
            UserError: the run has no warm pool.
        """
        self._operations.end_warm_pool(self.id)


def newest_attempt(run: Run, status: Status) -> Run:
    """Return the run of the newest attempt, whose log says why a run has ended; the run itself without attempts."""
    own = status.attempts[-1].run if status.attempts else ""
    if not own:
        return run
    return Run(own, run._operations)  # noqa: SLF001 (of this module)


RunLike = str | Run | Status
"""A run: its handle, a status, or its name as text: an id, the beginning or end of one, a job's name, or `latest`."""


def _state_and_reason(status: Status) -> tuple[State, str]:
    return status.state, status.reason


def _redacted(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    redactors: dict[str, LineRedactor] = {}
    for line in lines:
        text = redactors.setdefault(line.host, LineRedactor()).redact(line.text)
        yield line if text == line.text else dataclasses.replace(line, text=text, raw=None)


def _summarize(run: Run) -> Summary:
    """Return a summary of a run without calls: its state is in `run.status()`."""
    rows: list[Row] = []
    if run.attached:
        rows.append(("", "attached to this live run of the same request and code"))
    rows += [("warning", text) for text in run.warnings]
    return Summary(f"Run {run.reference}", rows)
