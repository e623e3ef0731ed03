"""What is said of runs: status, lists, logs, and how a followed run goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.console import print_json, program, say, table, table_lines
from cloudtrain.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED

if TYPE_CHECKING:
    from rich.console import Console

    from cloudtrain.explain import Explanation
    from cloudtrain.run import LogLine, Run, Status

_ID_WIDTH = 40


def _one_line(status: Status) -> str:
    """Return the reason, or how far a run has come."""
    if status.reason:
        return status.reason.strip().split("\n")[0]
    progress = status.progress
    if progress.last_step is None:
        return ""
    metric = next((name for name in ("test/accuracy", "test/loss", "train/loss") if name in progress.metrics), None)
    shown = f"  {metric} {progress.metrics[metric]:.4g}" if metric else ""
    return f"step {progress.last_step}{shown}"


def print_submitted(run: Run) -> None:
    """Print the run's name and how to come back to it."""
    say(f"{run.reference} submitted")
    called = program()
    for verb in ("status", "logs -f", "stop"):
        say(f"  {called} {verb} {run.reference}")


def print_status(status: Status) -> None:
    """Print a run's status as a table."""
    table(_status_rows(status))


def _status_rows(status: Status) -> list[tuple[str, str]]:
    content = status.to_json()
    progress = status.progress
    reason = status.reason.strip().splitlines()
    rows = [("run", status.reference), ("state", str(status.state) + (f": {reason[0]}" if reason else ""))]
    if len(reason) > 1:
        rows.append(("", f"the traceback is in: {program()} logs {status.reference}"))
    if status.started is not None:
        ended = f", ended {status.ended:%Y-%m-%d %H:%M:%S %Z}" if status.ended else ""
        rows.append(("started", f"{status.started:%Y-%m-%d %H:%M:%S %Z}{ended}"))
    if status.world_size is not None:
        rows.append(("world size", f"{status.world_size}" + (f" ({progress.device})" if progress.device else "")))
    if progress.last_step is not None:
        resumed = f", resumed from step {progress.first_step}" if progress.first_step else ""
        epochs = f", {progress.last_epoch} epochs" if progress.last_epoch else ""
        total = f" of {progress.total_steps}" if progress.total_steps else ""
        rows.append(("progress", f"step {progress.last_step}{total}{epochs}{resumed}"))
    rows += [(name, f"{value:.4g}") for name, value in sorted(progress.metrics.items())]
    if content["last_checkpoint"] is not None:
        last = content["last_checkpoint"]
        rows.append(
            (
                "checkpoint",
                f"{last['uri']} (step {last['step']}, {last['age_seconds']:.0f} s before the end)"
                if status.ended
                else f"{last['uri']} (step {last['step']}, {last['age_seconds']:.0f} s ago)",
            )
        )
    rows += [(name, str(place)) for name, place in status.artifacts.items()]
    if status.cost_usd is not None and status.backend != "local":
        rows.append(("cost", f"{status.cost_usd:,.2f} USD for {status.billable_seconds} billed seconds"))
    return rows


def print_runs(runs: Iterable[Status]) -> None:
    """Print runs, a line each."""
    rows = [
        (
            f"{status.reference:<{_ID_WIDTH}}  {status.started:%Y-%m-%d %H:%M}"
            if status.started
            else f"{status.reference:<{_ID_WIDTH}}  {'':<16}",
            str(status.state),
            _one_line(status),
        )
        for status in runs
    ]
    if not rows:
        print("no runs here yet; start one with: cloudtrain submit JOB --local")
        return
    width = max(len(reference) for reference, _, _ in rows)
    for reference, state, reason in rows:
        print(f"{reference:<{width}}  {state:<11}  {reason}".rstrip())


def follow(run: Run, *, job: str, as_json: bool) -> int:
    """Show a run until it ends; return the exit code. Ctrl-C leaves the run going."""
    from cloudtrain.run import State

    out = _people(as_json=as_json)
    try:
        run.wait(until=State.RUNNING, on_change=_show_change, on_trouble=say)
        for line in run.logs(follow=True, on_trouble=say):
            out.print(f"{line.host}  {readable(line)}", markup=False, highlight=False, soft_wrap=True)
        status = run.wait(on_trouble=say)
    except KeyboardInterrupt:
        if as_json:
            print_json(run.status().to_json())
        return detached(run)
    _summary(out, status, job)
    if status.exit_code == EXIT_RUN_FAILED:
        _explain(out, run)
    if as_json:
        print_json(status.to_json())
    return status.exit_code or 0


def _show_change(status: Status) -> None:
    if not status.state.is_final:
        say(f"{status.state}{': ' if status.reason else ''}{status.reason}")


def wait_for_end(run: Run) -> Status:
    """Wait for a run that was told to stop; Ctrl-C gives up waiting, not stopping."""
    if run.state.is_final:
        say(f"{run.reference} had ended already")
        return run.status()
    say(f"stopping {run.reference}")
    return run.wait()


def detached(run: Run) -> int:
    """Print how to come back to a run that is no longer followed; return the exit code of that."""
    say("")
    say(f"{run.reference} goes on. To come back: {program()} logs -f {run.reference}")
    say(f"To end it: {program()} stop {run.reference}")
    return EXIT_INTERRUPTED


def _people(*, as_json: bool) -> Console:
    from rich.console import Console

    return Console(stderr=as_json)


def _summary(out: Console, status: Status, job: str) -> None:
    """Print how a followed run has ended, and what to type next. Paths stay whole, so that they can be copied."""
    lines = ["", *table_lines(_status_rows(status)), "", f"next: {_next_command(status, job)}"]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _explain(out: Console, run: Run) -> None:
    """Print why a followed run has failed. What cannot be read does not hide how it ended."""
    from cloudtrain import api
    from cloudtrain.errors import CloudError

    try:
        lines = _explanation_lines(api.explain(run), run.reference)
    except CloudError as error:
        lines = [f"not explained: {error}"]
    for line in ("", *lines):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def print_explanation(found: Explanation, reference: str) -> None:
    """Print why a run has failed, and what to do."""
    for line in _explanation_lines(found, reference):
        print(line)


def _explanation_lines(found: Explanation, reference: str) -> list[str]:
    rows = [("state", f"{found.state}: {found.message}" if found.message else str(found.state))]
    if found.failure is not None:
        rows.append(("why", found.failure.words))
    where = [f"rank {found.rank}"] if found.rank is not None else []
    where += [found.host] if found.host is not None else []
    where += [f"after step {found.step}"] if found.step is not None else []
    if where:
        rows.append(("where", ", ".join(where)))
    rows += [("" if index else "traceback", line) for index, line in enumerate(found.traceback)]
    if len(found.ranks) > 1:
        rows.append(
            ("told by", f"ranks {_spans(found.ranks)}" + (f" on {', '.join(found.hosts)}" if found.hosts else ""))
        )
    if found.action:
        rows.append(("do", found.action))
    if found.failure is not None:
        rows.append(("whole log", f"{program()} logs {reference}"))
    return table_lines(rows)


def _spans(ranks: Sequence[int]) -> str:
    """Return numbers in order as people write them: `0-7, 9`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _next_command(status: Status, job: str) -> str:
    local = " --local" if status.backend == "local" else ""
    if status.exit_code == 0 and local:
        return f"{program()} plan {job}   (the same job on SageMaker: what would be sent, and its price)"
    if status.exit_code == 0 or status.progress.checkpoint is None:
        return f"{program()} logs {status.reference}"
    return f"{program()} submit{local} {job} --set checkpoint.resume={status.run}"


def readable(line: LogLine) -> str:
    """Return a log line as people read it."""
    from cloudtrain_runtime.contract import parse_event

    event = parse_event(line.text)
    describe = _EVENTS.get(event["event"]) if event is not None else None
    if event is None or describe is None:
        return line.text
    try:
        return describe(event)
    except (KeyError, TypeError, ValueError):
        return line.text  # of another version, or printed by a script


def _started(event: Mapping[str, Any]) -> str:
    resumed = f", resumed from step {event['step']}" if event.get("resumed_from") else ""
    return (
        f"training {event['parameters']:,} parameters on {event['world_size']} ranks "
        f"({event['device']}, {event['backend']}), {event['total_steps']} steps{resumed}"
    )


def _step(event: Mapping[str, Any]) -> str:
    return (
        f"step {event['step']:>6}  epoch {event['epoch']:>3}  loss {_number(event['loss'])}  "
        f"{event['samples_per_second'] or 0:,.0f} samples/s"
    )


def _evaluation(event: Mapping[str, Any]) -> str:
    hidden = ("event", "split", "step", "epoch", "time", "samples")
    values = "  ".join(f"{name} {_number(value)}" for name, value in event.items() if name not in hidden)
    return f"{event['split']} after step {event['step']}: {values}"


def _checkpoint(event: Mapping[str, Any]) -> str:
    return f"checkpoint of step {event['step']}: {event['bytes'] / 1e6:.1f} MB in {event['seconds']:.2f} s"


def _number(value: Any) -> str:
    return "not finite" if value is None else f"{value:.4f}"


_EVENTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": _started,
    "step": _step,
    "evaluation": _evaluation,
    "checkpoint": _checkpoint,
    "failed": lambda event: f"failed: {event['message']}",
    "stopped": lambda event: f"stopped after step {event['step']}",
    "finished": lambda event: f"finished {event['step']} steps in {event['seconds']:.1f} s",
}
