"""Output about runs: list, submit, status, logs, events and explanation. `follow` shows a run until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cloudtrain.client.next_step import begin_again, explain_end, run_to_continue, submit_again
from cloudtrain.console import (
    BOLD,
    DIM,
    coloured,
    command_name,
    print_message,
    print_row,
)
from cloudtrain.console.facts import print_facts
from cloudtrain.console.status_fields import (
    alarm_rows,
    as_one_line,
    attempt_rows,
    checkpoint_row,
    device_row,
    host_rows,
    limit_row,
    pool_rows,
    progress_row,
    spent_row,
    state_rows,
    step_row,
    time_row,
    warning_rows,
)
from cloudtrain.console.tables import Cell, Column, print_table
from cloudtrain.console.tables import Row as TableRow
from cloudtrain.console.terminal import is_terminal, strip_escapes, unfiltered, visible_part
from cloudtrain.errors import EXIT_DONE, EXIT_INTERRUPTED, CloudtrainError, UserError, did_you_mean
from cloudtrain.runs.event_words import word_line
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.phases import describe_phases, run_seconds
from cloudtrain.runs.results import describe_result
from cloudtrain.runs.shown_metrics import describe_metric, plain_metrics
from cloudtrain.runs.status import (
    State,
    describe_progress,
    describe_state,
    shown_reason,
)
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain.support.notebook.summary import Row, name_numbers
from cloudtrain.support.run_id import job_of, short_id
from cloudtrain.support.shown_places import shown_place
from cloudtrain.support.units import format_age, format_duration
from cloudtrain_runtime.contract.hosts import sort_hosts
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.failure_rules import Explanation, Facts
    from cloudtrain.runs.log_lines import LogLine
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import Status


def print_submitted(run: Run, *, as_json: bool, is_followed: bool = False) -> None:
    """Print what was started and how to come back to it.

    A pipe gets the run's id alone on standard output, unless that gets JSON, and the rest on standard error.
    """
    if is_terminal() and not as_json:
        _show_submitted(run, is_followed=is_followed)
        return
    if run.attached:
        print_message(
            f"{run.reference} is the same request and code, so nothing was started (to start another run: --new)"
        )
    elif run.waits:
        print_message(f"{run.reference} waits for capacity, and is submitted again by itself")
    else:
        print_message(f"{run.reference} submitted")
    called = command_name()
    for verb in ("status", "follow", "stop"):
        print_message(f"  {called} {verb} {run.reference}")
    if not as_json:
        print(run.id, flush=True)


def _show_submitted(run: Run, *, is_followed: bool) -> None:
    """Print on a terminal what was started and how to come back to it."""
    called = command_name()
    short = short_id(run.id)
    shown = coloured(run.id.removesuffix(short), DIM) + coloured(short, BOLD)
    print(f"{shown} {_verb(run)} {place_name(run.backend)}")
    if run.attached:
        print("  it has the same request and code, so nothing was started; for another run: --new")
    if is_followed:
        print(f"  Ctrl-C leaves it running; come back: {called} follow {short}")
        return
    print(f"  follow  {called} follow {short}")
    print(f"  stop    {called} stop {short}")


def _verb(run: Run) -> str:
    if run.waits:
        return "waits for capacity, and is submitted again by itself,"
    return "is running" if run.attached else "started"


def status_json(run: Run, status: Status) -> dict[str, Any]:
    """Return the status of a run with the warnings of its plan before its own, as `submit --json` prints it."""
    content = status.to_json()
    return {**content, "warnings": [*run.warnings, *content["warnings"]]}


def print_status(status: Status) -> None:
    """Print a run's status."""
    print_facts(status_rows(status))


def status_rows(status: Status, now: float | None = None) -> list[Row]:
    """Return a run's status as names and values. `now` is in seconds since the epoch."""
    moment = time.time() if now is None else now
    progress = status.progress
    rows = [("run", status.reference), ("state", describe_state(status))]
    if shown_reason(status) and len(status.reason.strip().splitlines()) > 1:
        rows.append(("explain", f"{command_name()} explain {status.reference}"))
    rows += [(name, coloured(text, "1;31")) for name, text in alarm_rows(status, moment)]
    rows += warning_rows(status)
    if phases := describe_phases(status, moment):
        rows.append(("phases", phases))
    rows += attempt_rows(status, moment)
    rows += [row for row in state_rows(status, moment) if row[0] == "for"]
    if status.started is not None:
        ended = f", ended {status.ended:%Y-%m-%d %H:%M:%S %Z}" if status.ended else ""
        rows.append(("started", f"{status.started:%Y-%m-%d %H:%M:%S %Z}{ended}"))
    if status.world_size is not None:
        device = f" ({progress.device})" if progress.device else ""
        rows.append(("world size", f"{status.world_size}{device}"))
    rows += host_rows(status)
    timed = (progress_row(status, moment), limit_row(status, moment))
    rows += [row for row in timed if row is not None]
    if progress.first_step:
        rows.append(("resumed", f"from step {progress.first_step:,}"))
    more = {name: progress.metrics[name] for name in _STATUS_METRICS if name in progress.metrics}
    shown = {**plain_metrics(progress.metrics), **more}
    rows += [(name, describe_metric(value)) for name, value in sorted(shown.items())]
    seen = (
        step_row(status),
        device_row(status),
        checkpoint_row(status, moment),
        time_row(status, moment),
    )
    rows += [row for row in seen if row is not None]
    rows += location_rows(status)
    rows += tracking_rows(status)
    spent = spent_row(status, moment, status_time=moment)
    if spent is not None:
        rows.append(spent)
    return [*rows, *pool_rows(status)]


_STATUS_METRICS = ("train/samples_per_second", "train/grad_norm")
"""Metrics that `status` lists although the live view does not."""


def location_rows(status: Status) -> list[Row]:
    """Return the locations of a run's checkpoint and of its results."""
    checkpoint = status.progress.checkpoint
    rows = []
    if checkpoint is not None:
        rows.append(("checkpoint at", shown_place(checkpoint.uri)))
    places = dict(status.artifacts)
    # A folder says more than the archive of its files, and contains what has names of its own.
    model = places.pop("model_folder", None)
    if model is not None:
        places["model"] = model
    if "folder" in places:
        places.pop("checkpoints", None)
    return [*rows, *((name, shown_place(str(place))) for name, place in places.items())]


def tracking_rows(status: Status) -> list[Row]:
    """Return where the run is logged besides its own log: pages of trackers, and folders of offline files."""
    places = status.progress.tracked.values()
    return [("tracking", strip_escapes(shown_place(place))) for place in places]


def print_detached(run: Run, verb: str) -> int:
    """Print that a run continues and which command (`verb`) attaches to it again; return the exit code."""
    called = command_name()
    print_message("")
    # Not wrapped, so that the commands can be copied.
    print_row(f"{run.reference} continues. To attach again: {called} {verb} {run.reference}")
    print_row(f"To stop it: {called} stop {run.reference}")
    return EXIT_INTERRUPTED


def explanation_rows(found: Explanation, reference: str, *, with_state: bool = True) -> list[Row]:
    """Return why a run has failed, and what to do; below its status, the state need not be repeated."""
    rows: list[Row] = []
    if with_state:
        state = f"{found.state}: {found.message}" if found.message else str(found.state)
        rows.append(("state", state))
    if found.failure is not None:
        rows.append(("cause", found.failure.words))
    if found.where:
        rows.append(("where", found.where))
    rows += [("" if index else "traceback", line) for index, line in enumerate(found.traceback)]
    rows += [("" if index else "last lines", line) for index, line in enumerate(found.last_lines)]
    if len(found.ranks) > 1 and not found.is_of_all_ranks:
        hosts = f" on {', '.join(found.hosts)}" if found.hosts else ""
        rows.append(("reported by", f"ranks {name_numbers(found.ranks)}{hosts}"))
    if found.action:
        rows.append(("action", found.action))
    rows += [("advice", text) for text in found.advice]
    if found.failure is not None:
        rows.append(("full log", f"{command_name()} logs {reference}"))
    return rows


class NextStep(NamedTuple):
    """What to type after a run has ended: what it does, and the words."""

    kind: Literal["fix", "price", "continue", "read"]
    text: str


def next_step(
    status: Status,
    job: str | None,
    cause: Explanation | None = None,
    facts: Facts | None = None,
    *,
    name: Callable[[str], str] = str,
) -> NextStep:
    """Return the next step after a run has ended.

    Args:
        status: How it ended.
        job: The job file and its options as typed, where they are known.
        cause: Why it has failed. What lies in the job or its code is fixed there and submitted: a resumed run has the
            old ones.
        facts: The known values of its job.
        name: Returns the name of a run, from its reference or id, as the command has it.
    """
    facts = facts or {}
    called = command_name()
    if cause is not None:
        again = submit_again(status, cause, facts, job or "JOB", program=called, name=name)
        if again is not None:
            is_installed = cause.failure is not None and cause.failure.is_installed
            place = None if is_installed else cause.place
            return NextStep("fix", f"fix {place or 'it'}, then: {again}")
    if status.exit_code == 0 and facts_of(status.backend).is_local and job is not None:
        note = "   (the request and price of the same job on SageMaker)"
        return NextStep("price", f"{called} plan {job}{note}")
    continued = run_to_continue(status, facts)
    if status.exit_code == 0 or continued is None:
        return NextStep("read", f"{called} logs {name(status.reference)}")
    if continued != status.run:
        return NextStep("continue", begin_again(name(status.reference), continued, program=called))
    return NextStep("continue", f"{called} resume {name(status.reference)}")


def print_old_code_warning(run: Run) -> None:
    """Print a warning before a run is resumed that its own job or code has failed, which a resumed run has, too.

    Nothing is printed for another cause, and where the log cannot be read.
    """
    status = run.status()
    if status.state is not State.FAILED:
        return
    try:
        facts = run.facts()
        cause = explain_end(run, status, facts)
    except (CloudtrainError, OSError):
        return
    name = short_id if is_terminal(sys.stderr) else str
    again = submit_again(status, cause, facts, program=command_name(), name=name)
    if again is None:
        return
    place = f" ({cause.place})" if cause.place else ""
    failed = f"{name(status.run)} has failed with: {as_one_line(cause.message.strip())}{place}"
    print_message(f"warning: {failed}; resume runs the same code again; with new code: {again}")


def format_log_line(line: LogLine) -> str | None:
    """Return a log line with its event as a sentence; None for an event that users need not see."""
    worded = word_line(line.text)
    return None if worded is None else visible_part(worded)


STATE_COLOURS: Mapping[str, str] = {
    State.SUCCEEDED: "32",
    State.FAILED: "1;31",
    State.STOPPED: "33",
    State.STOPPING: "33",
    State.INTERRUPTED: "33",
    State.UNKNOWN: "33",
    State.RUNNING: "36",
    State.STARTING: "36",
}
_RUN_COLUMNS = (
    Column("run", "ID"),
    Column("job", drop=6, least=8, only="terminal"),
    Column("where", drop=3, only="terminal"),
    Column("state"),
    Column("submitted (UTC)", "AGE", drop=4, is_dim=True),
    Column("took", drop=5, is_dim=True),
    Column("attempts", drop=2, is_number=True, is_dim=True),
    Column("on", drop=1, is_dim=True),
    Column("metric", only="pipe"),
    Column("", only="pipe"),
    Column("result", least=16, only="terminal"),
)


def print_runs(runs: Sequence[Status], *, is_filtered: bool, with_ids: bool = False) -> None:
    """Print runs in columns.

    Args:
        runs: The runs.
        is_filtered: Whether the user has asked for some runs only.
        with_ids: Show whole ids on a terminal, too.
    """
    if not runs:
        if is_filtered:
            print("no run matches")
        else:
            print("no runs here yet; start one with: cloudtrain submit JOB --local")
        return
    now = datetime.now(UTC)
    several = len({status.backend for status in runs}) > 1
    rows = [_row(status, now, with_ids=with_ids, with_place=several) for status in runs]
    print_table(_RUN_COLUMNS, rows, colours=STATE_COLOURS)


def _row(status: Status, now: datetime, *, with_ids: bool, with_place: bool) -> TableRow:
    created = status.created
    submitted = Cell("")
    if created is not None:
        age = format_age((now - created).total_seconds())
        submitted = Cell(f"{created.astimezone(UTC):%Y-%m-%d %H:%M}", shown=age)
    metrics = status.progress.metrics
    name = main_metric(metrics)
    metric = ""
    if name is not None:
        metric = as_one_line(f"{name} {describe_metric(metrics[name])}")
    took = run_seconds(status, now.timestamp())
    result = describe_result(status, now.timestamp())
    short = short_id(status.run)
    return (
        Cell(status.reference) if with_ids else Cell(status.reference, shown=short, colour=BOLD),
        job_of(status.run),
        status.backend if with_place else "",
        str(status.state),
        submitted,
        "" if took is None else format_duration(took),
        str(len(status.attempts)) if len(status.attempts) > 1 else "",
        _machines(status),
        metric,
        _and_pool(status, _summary(status)),
        _and_pool(status, result),
    )


def _and_pool(status: Status, text: str) -> str:
    """Return a text, and that a warm pool is kept, which costs money after the run has ended."""
    words = [text]
    if status.warm_pool is not None and status.warm_pool.is_available:
        words.append("warm pool kept")
    return as_one_line("; ".join(filter(None, words)))


def _machines(status: Status) -> str:
    if not status.instance_type:
        return ""
    if not status.instances:
        return status.instance_type
    return f"{status.instances} x {status.instance_type}"


def _summary(status: Status) -> str:
    """Return the run's progress and the time left, or the reason of its state."""
    return shown_reason(status) or describe_progress(status, time.time())


HOST_COLOURS = (
    "cyan",
    "green",
    "yellow",
    "magenta",
    "blue",
    "bright_cyan",
    "bright_green",
    "bright_magenta",
)
"""Colours of hosts, by their names in rich."""
_ANSI_COLOURS = ("36", "32", "33", "35", "34", "96", "92", "95")


def print_logs(
    run: Run, lines: Iterable[LogLine], *, follow: bool, raw: bool, only: LogFilter = ALL_LINES
) -> int:
    """Print log lines with their host; format events as text unless `raw`. Ctrl-C does not end the run.

    Raises:
        UserError: No line matches, and the run has no such host.
    """
    prefix = host_prefixes()
    is_empty = True
    try:
        for line in lines:
            is_empty = False
            if raw:
                _print_raw(prefix(line.host), line, flush=follow)
            elif (text := format_log_line(line)) is not None:
                print(f"{prefix(line.host)}  {text}", flush=follow)
    except KeyboardInterrupt:
        return print_detached(run, "logs -f")
    if is_empty:
        if only.host is not None and not follow:
            _require_host(run, only.host)
        is_filtered = only != ALL_LINES
        print_message("no line of the log matches" if is_filtered else "the log is empty")
    return EXIT_DONE


def _require_host(run: Run, host: str) -> None:
    known = sort_hosts(list({line.host for line in run.logs()}))
    if known and host not in known:
        raise UserError(f"{run.id} has no log of a host {host}", did_you_mean(host, known))


def _print_raw(host: str, line: LogLine, *, flush: bool) -> None:
    """Print a line byte for byte as it was written."""
    out = unfiltered(sys.stdout)
    content = line.raw
    if content is None:
        content = line.text.encode("utf-8", "surrogatepass")
    out.flush()
    out.buffer.write(host.encode() + b"  " + content + b"\n")
    if flush:
        out.buffer.flush()


def print_logs_json(run: Run, lines: Iterable[LogLine], *, follow: bool) -> int:
    """Print one JSON object line by line, so that memory does not grow with the log.

    The object is always complete: an error becomes its last key.
    """
    exit_code = EXIT_DONE
    closing = "]"
    print(f'{{\n  "run": {dump_json(run.id)},\n  "lines": [', end="")
    try:
        for index, line in enumerate(lines):
            content = {"host": line.host, "text": line.text, "time": line.time}
            comma = "," if index else ""
            print(f"{comma}\n    {dump_json(content)}", end="", flush=follow)
            closing = "\n  ]"
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    except CloudtrainError as error:
        print_message(f"error: {error.for_terminal()}")
        exit_code = error.exit_code
        failure = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        closing += f',\n  "error": {dump_json(failure)}'
    print(f"{closing}\n}}")
    return exit_code


def host_prefixes() -> Callable[[str], str]:
    """Return a function that formats a host's name as prefix of its lines, in a colour per host on a terminal."""
    known: dict[str, str] = {}

    def prefix(host: str) -> str:
        next_colour = _ANSI_COLOURS[len(known) % len(_ANSI_COLOURS)]
        return coloured(host, known.setdefault(host, next_colour))

    return prefix
