"""Output about runs: list, submit, status, logs, events and explanation. `follow` shows a run until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cloudtrain.client.next_step import begin_again, run_to_continue, submit_again
from cloudtrain.console import (
    coloured,
    column_lines,
    command_name,
    print_columns,
    print_message,
)
from cloudtrain.console.status_fields import (
    alarm_rows,
    as_one_line,
    checkpoint_row,
    describe_environment,
    describe_phases,
    device_row,
    host_rows,
    limit_row,
    pool_rows,
    progress_row,
    spent_row,
    state_rows,
    step_row,
    warning_rows,
)
from cloudtrain.console.terminal import unfiltered, visible_part
from cloudtrain.errors import EXIT_DONE, EXIT_INTERRUPTED, CloudtrainError, UserError, did_you_mean
from cloudtrain.runs.log_lines import ALL_LINES, LogFilter
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.shown_metrics import describe_metric, plain_metrics
from cloudtrain.runs.status import (
    HIGH_DATA_WAIT,
    State,
    describe_fresh_start,
    describe_lost_files,
    describe_progress,
    describe_state,
    shown_reason,
)
from cloudtrain.support.notebook.summary import Row, count
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.hosts import sort_hosts
from cloudtrain_runtime.contract.metric_values import EVALUATION_FIELDS
from cloudtrain_runtime.contract.strict_json import dump_json

if TYPE_CHECKING:
    from cloudtrain.failure_rules import Explanation, Facts
    from cloudtrain.runs.log_lines import LogLine
    from cloudtrain.runs.run import Run
    from cloudtrain.runs.status import Status


def print_submitted(run: Run, *, as_json: bool) -> None:
    """Print the run's id to standard output, unless that gets JSON, and the next commands to standard error."""
    if run.attached:
        print_message(
            f"{run.reference} is the same request and code, so nothing was started (to start another run: --new)"
        )
    else:
        print_message(f"{run.reference} submitted")
    called = command_name()
    for verb in ("status", "follow", "stop"):
        print_message(f"  {called} {verb} {run.reference}")
    if not as_json:
        print(run.id, flush=True)


def status_json(run: Run, status: Status) -> dict[str, Any]:
    """Return the status of a run with the warnings of its plan before its own, as `submit --json` prints it."""
    content = status.to_json()
    return {**content, "warnings": [*run.warnings, *content["warnings"]]}


def status_rows(status: Status, now: float | None = None) -> list[Row]:
    """Return a run's status as names and values. `now` is in seconds since the epoch."""
    moment = time.time() if now is None else now
    progress = status.progress
    rows = [("run", status.reference), ("state", describe_state(status))]
    if shown_reason(status) and len(status.reason.strip().splitlines()) > 1:
        rows.append(("", f"the traceback is in: {command_name()} logs {status.reference}"))
    rows += [(name, coloured(text, "1;31")) for name, text in alarm_rows(status, moment)]
    rows += warning_rows(status)
    if phases := describe_phases(status, moment):
        rows.append(("phases", phases))
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
    seen = (step_row(status), device_row(status), checkpoint_row(status, moment))
    rows += [row for row in seen if row is not None]
    for name, place in location_rows(status)[1:]:
        # The row of the checkpoint, just above, has the label already.
        label = "" if name == "checkpoint" else name
        rows.append((label, place))
    spent = spent_row(status, moment, status_time=moment)
    if spent is not None:
        rows.append(spent)
    return [*rows, *pool_rows(status)]


_STATUS_METRICS = ("train/samples_per_second", "train/grad_norm")
"""Metrics that `status` lists although the live view does not."""


def location_rows(status: Status) -> list[Row]:
    """Return the run's reference and the locations of its checkpoint and outputs."""
    checkpoint = status.progress.checkpoint
    rows = [("run", status.reference)]
    if checkpoint is not None:
        rows.append(("checkpoint", checkpoint.uri))
    rows += [(name, str(place)) for name, place in status.artifacts.items()]
    return rows


def print_detached(run: Run, verb: str) -> int:
    """Print that a run continues and which command (`verb`) attaches to it again; return the exit code."""
    print_message("")
    print_message(
        f"{run.reference} continues. To attach again: {command_name()} {verb} {run.reference}"
    )
    print_message(f"To stop it: {command_name()} stop {run.reference}")
    return EXIT_INTERRUPTED


def explanation_lines(found: Explanation, reference: str) -> list[str]:
    """Return why a run has failed, and what to do, as lines."""
    state = str(found.state)
    if found.message:
        state = f"{found.state}: {found.message}"
    rows = [("state", state)]
    if found.failure is not None:
        rows.append(("why", found.failure.words))
    if found.where:
        rows.append(("where", found.where))
    rows += [("" if index else "traceback", line) for index, line in enumerate(found.traceback)]
    rows += [("" if index else "last lines", line) for index, line in enumerate(found.last_lines)]
    if len(found.ranks) > 1 and not found.is_of_all_ranks:
        hosts = f" on {', '.join(found.hosts)}" if found.hosts else ""
        rows.append(("reported by", f"ranks {_spans(found.ranks)}{hosts}"))
    if found.action:
        rows.append(("action", found.action))
    if found.failure is not None:
        rows.append(("full log", f"{command_name()} logs {reference}"))
    return column_lines(rows)


def _spans(ranks: Sequence[int]) -> str:
    """Return sorted numbers as ranges: `0-7, 9`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def next_command(
    status: Status, job: str | None, cause: Explanation | None = None, facts: Facts | None = None
) -> str:
    """Return the next command after a run has ended.

    Args:
        status: How it ended.
        job: The job file and its options as typed, where they are known.
        cause: Why it has failed. What lies in the job or its code is fixed there and submitted: a resumed run has the
            old ones.
        facts: The known values of its job.
    """
    facts = facts or {}
    if cause is not None:
        again = submit_again(status, cause, facts, job or "JOB", program=command_name())
        if again is not None:
            is_installed = cause.failure is not None and cause.failure.is_installed
            place = None if is_installed else cause.place
            return f"fix {place or 'it'}, then: {again}"
    if status.exit_code == 0 and not status.uses_account and job is not None:
        return f"{command_name()} plan {job}   (the request and price of the same job on SageMaker)"
    continued = run_to_continue(status, facts)
    if status.exit_code == 0 or continued is None:
        return f"{command_name()} logs {status.reference}"
    if continued != status.run:
        return begin_again(status.reference, continued, program=command_name())
    return f"{command_name()} resume {status.reference}"


def format_log_line(line: LogLine) -> str | None:
    """Return a log line with its event as text; None for an event that users need not see."""
    from cloudtrain_runtime.contract import parse_event

    event = parse_event(line.text)
    if event is None:
        return visible_part(line.text)
    describe = _EVENTS.get(event["event"])
    if describe is None:
        return visible_part(line.text)
    try:
        return describe(event)
    except (KeyError, TypeError, ValueError):
        # Fields are missing: an event of another version, or of a script.
        return visible_part(line.text)


def _started(event: Event) -> str:
    resumed = ""
    if event.get("resumed_from"):
        resumed = f", resumed from step {event['step']}"
    # The number of steps of a stream is unknown.
    steps = "" if event["total_steps"] is None else f", {count(event['total_steps'], 'step')}"
    return (
        f"training {event['parameters']:,} parameters on {count(event['world_size'], 'rank')} "
        f"({event['device']}, {event['backend']}){steps}{resumed}"
    )


def _step(event: Event) -> str:
    if "epoch" not in event:
        return _step_of_script(event)
    wait = event.get("data_wait") or 0
    slow = ""
    # The first step always waits for the loader's workers to start.
    if event["step"] > 1 and wait > HIGH_DATA_WAIT:
        slow = f"  {wait:.0%} of the step waits for data"
    return (
        f"step {event['step']:>6}  epoch {event['epoch']:>3}  loss {_number(event['loss'])}  "
        f"{event['samples_per_second'] or 0:,.0f} samples/s{slow}"
    )


def _step_of_script(event: Event) -> str:
    """Return a step that `report` or a pattern has found: its metrics have any names."""
    total = f"/{event['total_steps']}" if event.get("total_steps") else ""
    loss = {} if event.get("loss") is None else {"loss": event["loss"]}
    values = {**loss, **(event.get("metrics") or {})}
    words = [f"{name} {_number(value)}" for name, value in values.items()]
    return "  ".join([f"step {event['step']}{total}", *words])


def _evaluation(event: Event) -> str:
    values = "  ".join(
        f"{name} {_number(value)}" for name, value in event.items() if name not in EVALUATION_FIELDS
    )
    return f"{event['split']} after step {event['step']}: {values}"


def _checkpoint(event: Event) -> str:
    stall = event.get("stall_seconds")
    waited = "" if stall is None else f", training waited {stall:.3f} s"
    return f"checkpoint of step {event['step']}: {event['bytes'] / 1e6:.1f} MB in {event['seconds']:.2f} s{waited}"


def _straggler(event: Event) -> str:
    where = f"rank {event['rank']} on {event['host']}"
    if event["is_over"]:
        return f"{where} keeps up again"
    return f"{where} is slow: {event['ratio']:.2f} x the median of all ranks, most of it in {event['part']}"


def _bandwidth(event: Event) -> str:
    rated = ""
    if event.get("rated_gbps"):
        rated = f", the network is rated {event['rated_gbps']:,.0f}"
    return f"{event['world_size']} ranks exchange data at {event['gbps']:,.1f} Gbit/s{rated}"


def _pipeline(event: Event) -> str:
    stages = zip(event["links"], event["stage_seconds"], strict=True)
    text = ", ".join(f"{modules} ({1e3 * seconds:.3g} ms)" for modules, seconds in stages)
    return (
        f"pipeline: modules by stage {text}; the slowest takes {event['imbalance']:.2f} x the mean"
    )


def _missed(event: Event) -> str | None:
    if event.get("repeated"):
        return None
    alarm = f"ALARM, {event['missed']} in a row: " if event.get("alarm") else ""
    detail = event.get("detail") or "unknown reason"
    return f"{alarm}no checkpoint of step {event['step']}, {event['reason']}: {detail}; the run continues"


def _failed(event: Event) -> str:
    """Return the exit code; the message is printed on a line of its own."""
    why = ", after another rank's failure" if event.get("secondary") else ""
    return f"ends with exit code {event['exit_code']}{why}"


def _ranks(event: Event) -> str:
    words = []
    # The ranks of a command record nothing.
    if event["ranks"]:
        words = [f"{event['joined']} of {event['ranks']} ranks have joined a process group"]
    if event.get("unused"):
        words.append("no data has moved in the group")
    if not event["saved"]:
        words.append("no new file in /opt/ml/checkpoints")
    # The field is missing where nothing measures progress.
    if event.get("progressed") is False:
        words.append("no rank has reported progress")
    return ", ".join(words)


def _stopped(event: Event) -> str:
    if "step" in event:
        return f"stopped after step {event['step']}"
    return f"ended by {event.get('signal', 'a signal')}"


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4f}"


_EVENTS: dict[str, Callable[[Event], str | None]] = {
    "environment": describe_environment,
    "attempt": lambda event: None,  # noqa: ARG005 (the launcher prints restarts)
    "started": _started,
    "step": _step,
    "evaluation": _evaluation,
    "best": lambda event: (
        f"best so far: {event['metric']} {_number(event['value'])}, at step {event['step']}"
    ),
    "skipped": lambda event: (
        f"step {event['step']} skipped: its gradient is not finite; loss {_number(event['loss'])}"
    ),
    "checkpoint": _checkpoint,
    "checkpoint_missed": _missed,
    "checkpoint_damaged": lambda event: (
        f"the checkpoint of step {event['step']} is damaged and set aside, at {event['uri']}: {event['detail']}"
    ),
    "straggler": _straggler,
    "bandwidth": _bandwidth,
    "pipeline": _pipeline,
    "tracking": lambda event: (
        event.get("detail") or f"logs to the MLflow run {event['mlflow_run']}"
    ),
    "profile": lambda event: (
        f"profile of steps {event['first_step']} to {event['last_step']} of every rank: {event['uri']}"
    ),
    "failed": _failed,
    "hang": lambda event: f"stacks of its ranks: {event['stacks']}",
    "left": lambda event: None,  # noqa: ARG005 (only a failure of another host gives it a meaning)
    "outputs": lambda event: describe_lost_files(event) if event["unkept_files"] else None,
    "fresh_start": describe_fresh_start,
    "patterns": lambda event: None,  # noqa: ARG005 (the status has a warning)
    "ranks": _ranks,
    "leaving": lambda event: None,  # noqa: ARG005 (the rank prints it, too)
    "stopped": _stopped,
    "finished": lambda event: (
        f"finished {count(event['step'], 'step')} in {event['seconds']:.1f} s"
    ),
}


_HEADER = ("run", "state", "submitted (UTC)", "took", "on", "metric", "")
_LEFT_OUT_FIRST = ("on", "took", "submitted (UTC)", "metric", "")
_LEAST_TEXT = 16
_GAP = 2
_COLOURS: Mapping[str, str] = {
    State.SUCCEEDED: "32",
    State.FAILED: "1;31",
    State.STOPPED: "33",
    State.STOPPING: "33",
    State.INTERRUPTED: "33",
    State.UNKNOWN: "33",
    State.RUNNING: "36",
    State.STARTING: "36",
}


def print_runs(runs: Sequence[Status], *, is_filtered: bool) -> None:
    """Print runs in columns; empty columns are left out. On a terminal, columns are left out and texts cut to fit."""
    # Its import takes 5 ms.
    import shutil

    if not runs:
        if is_filtered:
            print("no run matches")
        else:
            print("no runs here yet; start one with: cloudtrain submit JOB --local")
        return
    now = datetime.now(UTC)
    rows = [_HEADER, *(_row(status, now) for status in runs)]
    if sys.stdout.isatty():
        rows = fit_columns(rows, shutil.get_terminal_size().columns, _LEFT_OUT_FIRST)
    print_columns(rows, skip_empty=True, colours=_COLOURS)


def fit_columns(
    rows: Sequence[Sequence[str]], width: int, left_out_first: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return rows of cells without the columns for which a line of this width has no room.

    A last column without a name is text, which is cut to the rest of the line.

    Args:
        rows: The rows; the first is the header.
        width: Characters of a line.
        left_out_first: The names of the columns that can be left out, in this order.
    """
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    for name in left_out_first:
        if _room(columns, width) >= (0 if columns[-1][0] else _LEAST_TEXT):
            break
        columns = [column for column in columns if column[0] != name]
    if not columns[-1][0]:
        room = _room(columns, width)
        columns[-1] = tuple(
            text if len(text) <= room else f"{text[: room - 1]}…" for text in columns[-1]
        )
    return list(zip(*columns, strict=True))


def _room(columns: Sequence[Sequence[str]], width: int) -> int:
    """Return the characters of a line that the columns leave for the last one, if that is text."""
    fixed = [max(map(len, column)) for column in columns if column[0]]
    return width - sum(fixed) - _GAP * (len(columns) - 1)


def _row(status: Status, now: datetime) -> tuple[str, ...]:
    submitted = ""
    if status.created:
        submitted = f"{status.created.astimezone(UTC):%Y-%m-%d %H:%M}"
    metrics = status.progress.metrics
    name = main_metric(metrics)
    metric = ""
    if name is not None:
        metric = as_one_line(f"{name} {describe_metric(metrics[name])}")
    words = [_summary(status)]
    # A kept warm pool costs money after the run has ended.
    if status.warm_pool is not None and status.warm_pool.is_available:
        words.append("warm pool kept")
    return (
        status.reference,
        str(status.state),
        submitted,
        _duration(status, now),
        _machines(status),
        metric,
        as_one_line("; ".join(filter(None, words))),
    )


def _machines(status: Status) -> str:
    if not status.instance_type:
        return ""
    if not status.instances:
        return status.instance_type
    return f"{status.instances} x {status.instance_type}"


def _duration(status: Status, now: datetime) -> str:
    """Return the run's duration so far: from its start, else from its submit."""
    started = status.started or status.created
    ended = status.ended
    if ended is None and not status.state.is_final:
        ended = now
    if started is None or ended is None:
        return ""
    return format_duration((ended - started).total_seconds())


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
