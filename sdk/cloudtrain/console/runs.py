"""Output about runs: submit, status, events and explanation. `follow` shows a run until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.console import (
    coloured,
    column_lines,
    command_name,
    print_message,
)
from cloudtrain.console.status_fields import (
    alarm_rows,
    checkpoint_row,
    describe_metric,
    describe_phases,
    describe_surroundings,
    device_row,
    host_rows,
    limit_row,
    plain_metrics,
    pool_rows,
    progress_row,
    spent_row,
    state_rows,
    step_row,
    warning_rows,
)
from cloudtrain.console.terminal import visible_part
from cloudtrain.errors import EXIT_INTERRUPTED
from cloudtrain.runs.status import HIGH_DATA_WAIT, State, describe_lost_files
from cloudtrain_runtime.contract.metric_values import EVALUATION_FIELDS

if TYPE_CHECKING:
    from cloudtrain.failure_rules import Explanation
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


def status_rows(status: Status, now: float | None = None) -> list[tuple[str, str]]:
    """Return a run's status as names and values. `now` is in seconds since the epoch."""
    moment = time.time() if now is None else now
    progress = status.progress
    is_ordinary = status.state is State.RUNNING and progress.last_step is not None
    reason = [] if is_ordinary else status.reason.strip().splitlines()
    rows = [("run", status.reference), ("state", str(status.state) + (f": {reason[0]}" if reason else ""))]
    if len(reason) > 1:
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
        rows.append(("world size", f"{status.world_size}" + (f" ({progress.device})" if progress.device else "")))
    rows += host_rows(status)
    rows += [row for row in (progress_row(status, moment), limit_row(status, moment)) if row is not None]
    if progress.first_step:
        rows.append(("resumed", f"from step {progress.first_step:,}"))
    shown = {
        **plain_metrics(status),
        **{name: progress.metrics[name] for name in _STATUS_METRICS if name in progress.metrics},
    }
    rows += [(name, describe_metric(value)) for name, value in sorted(shown.items())]
    seen = (step_row(status), device_row(status), checkpoint_row(status, moment))
    rows += [row for row in seen if row is not None]
    rows += [("" if name == "checkpoint" else name, place) for name, place in location_rows(status)[1:]]
    spent = spent_row(status, moment, status_time=moment)
    return [*rows, *([] if spent is None else [spent]), *pool_rows(status)]


_STATUS_METRICS = ("train/samples_per_second", "train/grad_norm")
"""Metrics that `status` lists although the live view does not."""


def location_rows(status: Status) -> list[tuple[str, str]]:
    """Return the run's reference and the locations of its checkpoint and outputs."""
    checkpoint = status.progress.checkpoint
    newest = [] if checkpoint is None else [("checkpoint", checkpoint.uri)]
    return [("run", status.reference), *newest, *((name, str(place)) for name, place in status.artifacts.items())]


def print_detached(run: Run, verb: str) -> int:
    """Print that a run continues and which command (`verb`) attaches to it again; return the exit code."""
    print_message("")
    print_message(f"{run.reference} continues. To attach again: {command_name()} {verb} {run.reference}")
    print_message(f"To stop it: {command_name()} stop {run.reference}")
    return EXIT_INTERRUPTED


def explanation_lines(found: Explanation, reference: str) -> list[str]:
    """Return why a run has failed, and what to do, as lines."""
    rows = [("state", f"{found.state}: {found.message}" if found.message else str(found.state))]
    if found.failure is not None:
        rows.append(("why", found.failure.words))
    where = [f"rank {found.rank}"] if found.rank is not None else []
    where += [found.host] if found.host is not None else []
    where += [f"after step {found.step}"] if found.step is not None else []
    if where:
        rows.append(("where", ", ".join(where)))
    rows += [("" if index else "traceback", line) for index, line in enumerate(found.traceback)]
    rows += [("" if index else "last lines", line) for index, line in enumerate(found.last_lines)]
    if len(found.ranks) > 1:
        rows.append(
            ("reported by", f"ranks {_spans(found.ranks)}" + (f" on {', '.join(found.hosts)}" if found.hosts else ""))
        )
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


def next_command(status: Status, job: str | None) -> str:
    """Return the next command after a run has ended. `job` is the job file and its options as typed."""
    if status.exit_code == 0 and status.backend == "local" and job is not None:
        return f"{command_name()} plan {job}   (the request and price of the same job on SageMaker)"
    if status.exit_code == 0 or status.progress.checkpoint is None:
        return f"{command_name()} logs {status.reference}"
    return f"{command_name()} resume {status.reference}"


def format_log_line(line: LogLine) -> str | None:
    """Return a log line with its event as text; None for an event that users need not see."""
    from cloudtrain_runtime.contract import parse_event

    event = parse_event(line.text)
    describe = _EVENTS.get(event["event"]) if event is not None else None
    if event is None or describe is None:
        return visible_part(line.text)
    try:
        return describe(event)
    except (KeyError, TypeError, ValueError):
        return visible_part(line.text)  # fields are missing: an event of another version, or of a script


def _started(event: Mapping[str, Any]) -> str:
    resumed = f", resumed from step {event['step']}" if event.get("resumed_from") else ""
    return (
        f"training {event['parameters']:,} parameters on {event['world_size']} ranks "
        f"({event['device']}, {event['backend']}), {event['total_steps']} steps{resumed}"
    )


def _step(event: Mapping[str, Any]) -> str:
    if "epoch" not in event:  # of a script, by `report` or a pattern
        total = f"/{event['total_steps']}" if event.get("total_steps") else ""
        loss = {} if event.get("loss") is None else {"loss": event["loss"]}
        values = {**loss, **(event.get("metrics") or {})}
        return "  ".join([f"step {event['step']}{total}", *(f"{name} {_number(values[name])}" for name in values)])
    # The first step always waits for the loader's workers to start.
    wait = (event.get("data_wait") or 0) if event["step"] > 1 else 0
    slow = f"  {wait:.0%} of the step waits for data" if wait > HIGH_DATA_WAIT else ""
    return (
        f"step {event['step']:>6}  epoch {event['epoch']:>3}  loss {_number(event['loss'])}  "
        f"{event['samples_per_second'] or 0:,.0f} samples/s{slow}"
    )


def _evaluation(event: Mapping[str, Any]) -> str:
    values = "  ".join(f"{name} {_number(value)}" for name, value in event.items() if name not in EVALUATION_FIELDS)
    return f"{event['split']} after step {event['step']}: {values}"


def _checkpoint(event: Mapping[str, Any]) -> str:
    stall = event.get("stall_seconds")
    waited = "" if stall is None else f", training waited {stall:.3f} s"
    return f"checkpoint of step {event['step']}: {event['bytes'] / 1e6:.1f} MB in {event['seconds']:.2f} s{waited}"


def _straggler(event: Mapping[str, Any]) -> str:
    where = f"rank {event['rank']} on {event['host']}"
    if event["is_over"]:
        return f"{where} keeps up again"
    return f"{where} is slow: {event['ratio']:.2f} x the median of all ranks, most of it in {event['part']}"


def _bandwidth(event: Mapping[str, Any]) -> str:
    rated = f", the network is rated {event['rated_gbps']:,.0f}" if event.get("rated_gbps") else ""
    return f"{event['world_size']} ranks exchange data at {event['gbps']:,.1f} Gbit/s{rated}"


def _pipeline(event: Mapping[str, Any]) -> str:
    stages = zip(event["links"], event["stage_seconds"], strict=True)
    text = ", ".join(f"{modules} ({1e3 * seconds:.3g} ms)" for modules, seconds in stages)
    return f"pipeline: modules by stage {text}; the slowest takes {event['imbalance']:.2f} x the mean"


def _missed(event: Mapping[str, Any]) -> str | None:
    if event.get("repeated"):
        return None
    alarm = f"ALARM, {event['missed']} in a row: " if event.get("alarm") else ""
    detail = event.get("detail") or "unknown reason"
    return f"{alarm}no checkpoint of step {event['step']}, {event['reason']}: {detail}; the run continues"


def _failed(event: Mapping[str, Any]) -> str:
    """Return the exit code; the message is printed on a line of its own."""
    why = ", after another rank's failure" if event.get("secondary") else ""
    return f"ends with exit code {event['exit_code']}{why}"


def _ranks(event: Mapping[str, Any]) -> str:
    words = [f"{event['joined']} of {event['ranks']} ranks have joined a process group"]
    words += [] if event["saved"] else ["no new file in /opt/ml/checkpoints"]
    words += ["no rank has reported progress"] if event.get("progressed") is False else []
    return ", ".join(words)


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4f}"


_EVENTS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "surroundings": describe_surroundings,
    "started": _started,
    "step": _step,
    "evaluation": _evaluation,
    "best": lambda event: f"best so far: {event['metric']} {_number(event['value'])}, at step {event['step']}",
    "skipped": lambda event: f"step {event['step']} skipped: its gradient is not finite; loss {_number(event['loss'])}",
    "checkpoint": _checkpoint,
    "checkpoint_missed": _missed,
    "checkpoint_damaged": lambda event: (
        f"the checkpoint of step {event['step']} is damaged and set aside, at {event['uri']}: {event['detail']}"
    ),
    "straggler": _straggler,
    "bandwidth": _bandwidth,
    "pipeline": _pipeline,
    "tracking": lambda event: event.get("detail") or f"logs to the MLflow run {event['mlflow_run']}",
    "profile": lambda event: (
        f"profile of steps {event['first_step']} to {event['last_step']} of every rank: {event['uri']}"
    ),
    "failed": _failed,
    "hang": lambda event: f"stacks of its ranks: {event['stacks']}",
    "outputs": lambda event: describe_lost_files(event) if event["unkept_files"] else None,
    "patterns": lambda event: None,  # noqa: ARG005 (the status has a warning)
    "ranks": _ranks,
    "stopped": lambda event: f"stopped after step {event['step']}",
    "finished": lambda event: f"finished {event['step']} steps in {event['seconds']:.1f} s",
}
