"""Text for people, JSON for programs. With `cli/`, the only place that prints.

People's text about a running command goes to standard error when `--json` asks for one object on standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import EXIT_INTERRUPTED, CloudtrainError, SpecError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from cloudtrain.bundle import Contents
    from cloudtrain.catalog import Prices
    from cloudtrain.plan import LengthPlan, Plan
    from cloudtrain.preflight import Check
    from cloudtrain.run import LogLine, Run, Status

# ---------------------------------------------------------------- JSON and errors


def print_json(content: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    print(json.dumps(content, indent=2, default=str))


def print_text(text: str) -> None:
    """Print text to standard output as it is."""
    print(text, end="" if text.endswith("\n") else "\n")


def say(text: str) -> None:
    """Print a line for people to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_error(error: CloudtrainError, *, as_json: bool) -> None:
    """Print what is wrong and what to do."""
    if isinstance(error, SpecError):
        print_problems(error, as_json=as_json)
        return
    say(f"error: {error}")
    if as_json:
        print_json_error(error.message, error.hint, error.exit_code)


def print_json_error(message: str, hint: str, exit_code: int) -> None:
    """Print an error as the one JSON object."""
    print_json({"error": {"message": message, "hint": hint, "exit_code": exit_code}})


def print_bug(error: Exception, *, as_json: bool) -> None:
    """Print that it is our fault."""
    say(f"error: this is a bug in cloudtrain: {type(error).__name__}: {error}")
    if as_json:
        print_json_error(f"bug: {type(error).__name__}: {error}", "", 1)


def print_problems(error: SpecError, *, as_json: bool) -> None:
    """Print every problem of a job, a line each."""
    for problem in error.problems:
        say(str(problem))
    count = len(error.problems)
    say(f"{count} problem{'s' if count != 1 else ''}")
    if as_json:
        fields = ("file", "line", "column", "path", "message", "hint")
        problems = [{name: getattr(problem, name) for name in fields} for problem in error.problems]
        print_json({"ok": False, "problems": problems})


def print_valid(job: str, name: str, *, as_json: bool) -> None:
    """Print that a job validates."""
    if as_json:
        print_json({"ok": True, "problems": []})
    else:
        print(f"{job}: {name} is valid")


# ---------------------------------------------------------------- the plan


def print_plan(plan: Plan) -> None:
    """Print a plan as a table."""
    from cloudtrain.units import format_duration, format_size

    cluster = plan.cluster
    ranks = f"{cluster.processes_per_instance or '?'} ranks each, world size {cluster.world_size or '?'}"
    where = "instances on this machine" if plan.target == "local" else f"x {cluster.instance_type}"
    rows = [
        ("run", plan.run),
        ("cluster", f"{cluster.instances} {where}, {ranks}"),
        ("distribution", f"{cluster.distribution}, started by the {cluster.launcher} launcher, {cluster.backend}"),
        ("image", "this machine's Python and torch" if plan.target == "local" else plan.image),
    ]
    if plan.length.steps is not None or plan.length.epochs is not None:
        rows.append(("length", _length(plan.length)))
    if plan.batch is not None:
        per_step = f"{plan.batch.per_rank} per rank x {plan.batch.accumulate} x {cluster.world_size or '?'} ranks"
        rows.append(("global batch", f"{plan.batch.global_ or '?'} samples ({per_step})"))
    rows += [
        ("code", f"{plan.bundle.files} files, {format_size(plan.bundle.bytes)}, sha256 {plan.bundle.digest[:12]}"),
        *_source_rows(plan),
        ("checkpoints", f"{plan.locations.checkpoints}, {_checkpoints(plan)}"),
        ("runtime", f"at most {format_duration(plan.max_runtime_seconds)}"),
    ]
    if plan.max_wait_seconds is not None:
        rows.append(("spot", f"waiting and training together at most {format_duration(plan.max_wait_seconds)}"))
    if plan.target != "local":
        rows.append(("cost", _cost(plan)))
    _table(rows)
    for decision in plan.decisions:
        print(f"  {decision}")
    for warning in plan.warnings:
        print(f"  warning: {warning}")


def _source_rows(plan: Plan) -> list[tuple[str, str]]:
    source = plan.bundle.source
    if source is None:
        return []
    commit = f"commit {source.commit[:12]}" if source.commit else "no commit yet"
    branch = f" on {source.branch}" if source.branch else ""
    return [("source", f"{commit}{branch}{', with changes that are not committed' if source.dirty else ''}")]


def _length(length: LengthPlan) -> str:
    if length.steps is None:
        return f"{length.epochs} epochs; how many steps these are, the dataset tells"
    samples = f", {length.samples:,} samples" if length.samples is not None else ""
    return f"{length.steps:,} steps{samples}"


def _checkpoints(plan: Plan) -> str:
    every = plan.to_json()["checkpoint"]["every"]
    at_most = f", at most {plan.length.checkpoints:,} of them" if plan.length.checkpoints is not None else ""
    return f"every {every}{at_most}"


def _cost(plan: Plan) -> str:
    cost = plan.cost
    if cost.usd_per_hour is None or cost.max_usd is None:
        return "unknown"
    on_demand = " on demand; spot is cheaper" if plan.max_wait_seconds is not None else ""
    age = (plan.created.date() - date.fromisoformat(cost.price_as_of)).days if cost.price_as_of else 0
    dated = f"prices of {cost.price_as_of}, {age} days old"
    return f"{cost.usd_per_hour:,.2f} USD per hour{on_demand}, at most {cost.max_usd:,.2f} USD ({dated})"


def _table(rows: Sequence[tuple[str, str]]) -> None:
    for line in _table_lines(rows):
        print(line)


def _table_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in rows]


# ---------------------------------------------------------------- prices


def prices_to_json(prices: Prices, region: str, today: date) -> dict[str, Any]:
    """Return the prices of a region, each with its day and source; those of CPU instances, too."""
    table = prices.by_region.get(region, {})
    return {
        "region": region,
        "as_of": prices.as_of(region),
        "age_days": prices.age_days(region, today),
        "prices": {
            name: {"usd_per_hour": price.usd_per_hour, "as_of": price.as_of, "source": price.source.name}
            for name, price in sorted(table.items())
        },
    }


def print_prices(prices: Prices, region: str, today: date) -> None:
    """Print the prices of a region's instances with GPUs, cheapest first, and how old they are."""
    from cloudtrain.catalog import find_instance

    table = prices.by_region.get(region, {})
    if not table:
        print(f"no price is known for {region}; known regions: {', '.join(prices.regions)}")
        print(f"to fetch them, with AWS credentials: {_program()} prices --region {region} --refresh")
        return
    rows = []
    for name, price in sorted(table.items(), key=lambda entry: (entry[1].usd_per_hour, entry[0])):
        instance = find_instance(name)
        if instance is not None and instance.gpus:
            each = price.usd_per_hour / instance.gpus
            gpus = f"{instance.gpus} x {instance.gpu}"
            rows.append((name, gpus, f"{price.usd_per_hour:,.4f}", f"{each:,.4f}", price.as_of))
    _columns([("instance type", "GPUs", "USD/hour", "USD/GPU-hour", "as of"), *rows])
    others = len(table) - len(rows)
    print(f"{region}: the oldest price is of {prices.as_of(region)}, {prices.age_days(region, today)} days ago")
    if others:
        print(f"{others} instance types without GPUs: {_program()} prices --region {region} --json")
    for source in dict.fromkeys(price.source for price in table.values()):
        print(f"source of {source.date}: {source.name}")


def _columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


# ---------------------------------------------------------------- the checks of the account

_WORDS = {"pass": ("pass", "green"), "fail": ("fail", "bold red"), "unknown": ("could not check", "yellow")}
_WORD_WIDTH = max(len(word) for word, _ in _WORDS.values())


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that something takes a while."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def print_checks(checks: Sequence[Check]) -> None:
    """Print checks, a line each; below one that did not pass its fix, whole, so that it can be copied."""
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False)
    width = max(len(check.name) for check in checks)
    for check in checks:
        word, style = _WORDS[check.result]
        lines = [Text.assemble((f"{word:<{_WORD_WIDTH}}", style), f"  {check.name:<{width}}  {check.detail}")]
        if check.fix:
            lines.append(Text(f"{'':<{_WORD_WIDTH + width + 2}}  fix: {check.fix}"))
        out.print(*lines, sep="\n", soft_wrap=True)
    out.print(Text(_count_checks(checks)), soft_wrap=True)


def _count_checks(checks: Sequence[Check]) -> str:
    results = [str(check.result) for check in checks]
    counts = [(results.count("pass"), "passed"), (results.count("fail"), "failed")]
    counts.append((results.count("unknown"), "could not be made"))
    return f"{len(checks)} checks: " + ", ".join(f"{count} {verb}" for count, verb in counts if count)


def say_unknown_checks(checks: Sequence[Check]) -> None:
    """Say in one line what a submit could not check; nothing when it could check all."""
    names = [check.name for check in checks if check.result == "unknown"]
    if names:
        say(f"could not check: {', '.join(names)} (why: {_program()} check JOB)")


# ---------------------------------------------------------------- the code that travels

_MOST_LINES = 40
_PROGRESS_AFTER_SECONDS = 1.0


def print_files(contents: Contents, *, show_all: bool) -> None:
    """Print what travels and what stays behind; folders in one line where the list would be long."""
    from cloudtrain.bundle import shown
    from cloudtrain.units import format_size

    rows = [(entry.size, shown(entry.name), entry.why) for entry in contents.entries]
    for size, name, why in rows if show_all or len(rows) <= _MOST_LINES else _by_folder(rows):
        print(f"{format_size(size):>10}  {name}  ({why})")
    info = contents.info
    print(f"{format_size(info.bytes):>10}  in {info.files} files, sha256 {info.digest}")
    if contents.left_out:
        print("left out:")
        lines = [(left.bytes, left.name, left.reason) for left in contents.left_out]
        for left_bytes, name, reason in lines if show_all else lines[:_MOST_LINES]:
            print(f"{'' if left_bytes is None else format_size(left_bytes):>10}  {name}  ({reason})")
        if not show_all and len(lines) > _MOST_LINES:
            print(f"{'':>10}  and {len(lines) - _MOST_LINES} more, named with --all")
        if any(left.by_default for left in contents.left_out):
            print("  a line such as !/model.pt in .cloudtrainignore lets something travel")
    if contents.refused:
        say("refused, because they look like secrets:")
        for finding in contents.refused:
            say(f"  {shown(str(finding))}")
        say(f"  {contents.way_out}")


def _by_folder(rows: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Return files of the root as they are, and one row for each folder in it."""
    sums: dict[tuple[str, str], list[int]] = {}
    for size, name, why in rows:
        top, slash, _ = name.partition("/")
        sums.setdefault((f"{top}{slash}", why), []).append(size)
    return [
        (sum(sizes), f"{name} {len(sizes)} files" if name.endswith("/") else name, why)
        for (name, why), sizes in sums.items()
    ]


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told (bytes done, bytes in all) and draws a bar on standard error.

    Only on a terminal, and only when the work takes longer than a second.
    """
    began = time.monotonic()
    bar: Bar | None = None
    task: TaskID | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar, task
        if bar is None:
            if time.monotonic() - began < _PROGRESS_AFTER_SECONDS or not sys.stderr.isatty():
                return
            bar = _start_bar()
        if task is None:
            task = bar.add_task(text, total=total)
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def _start_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar


# ---------------------------------------------------------------- runs

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
    program = _program()
    for verb in ("status", "logs -f", "stop"):
        say(f"  {program} {verb} {run.reference}")


def print_status(status: Status) -> None:
    """Print a run's status as a table."""
    _table(_status_rows(status))


def _status_rows(status: Status) -> list[tuple[str, str]]:
    content = status.to_json()
    progress = status.progress
    reason = status.reason.strip().splitlines()
    rows = [("run", status.reference), ("state", str(status.state) + (f": {reason[0]}" if reason else ""))]
    if len(reason) > 1:
        rows.append(("", f"the traceback is in: {_program()} logs {status.reference}"))
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


def print_logs(run: Run, lines: Iterable[LogLine], *, follow: bool, raw: bool) -> int:
    """Print log lines with their host, events as people read them unless raw; Ctrl-C leaves the run alone."""
    try:
        for line in lines:
            print(f"{line.host}  {line.text if raw else _readable(line)}", flush=follow)
    except KeyboardInterrupt:
        return _detached(run)
    return 0


def follow(run: Run, *, job: str, as_json: bool) -> int:
    """Show a run until it ends; return the exit code. Ctrl-C leaves the run going."""
    from cloudtrain.run import State

    out = _people(as_json=as_json)
    try:
        run.wait(until=State.RUNNING, on_change=_show_change)
        for line in run.logs(follow=True):
            out.print(f"{line.host}  {_readable(line)}", markup=False, highlight=False, soft_wrap=True)
        status = run.wait()
    except KeyboardInterrupt:
        if as_json:
            print_json(run.status().to_json())
        return _detached(run)
    _summary(out, status, job)
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


def _detached(run: Run) -> int:
    say("")
    say(f"{run.reference} goes on. To come back: {_program()} logs -f {run.reference}")
    say(f"To end it: {_program()} stop {run.reference}")
    return EXIT_INTERRUPTED


def _people(*, as_json: bool) -> Console:
    from rich.console import Console

    return Console(stderr=as_json)


def _summary(out: Console, status: Status, job: str) -> None:
    """Print how a followed run has ended, and what to type next. Paths stay whole, so that they can be copied."""
    lines = ["", *_table_lines(_status_rows(status)), "", f"next: {_next_command(status, job)}"]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _next_command(status: Status, job: str) -> str:
    local = " --local" if status.backend == "local" else ""
    if status.exit_code == 0 and local:
        return f"{_program()} plan {job}   (the same job on SageMaker: what would be sent, and its price)"
    if status.exit_code == 0 or status.progress.checkpoint is None:
        return f"{_program()} logs {status.reference}"
    return f"{_program()} submit{local} {job} --set checkpoint.resume={status.run}"


def _program() -> str:
    """Return what to type to call this command again: its path, where it is not the one on PATH."""
    called = sys.argv[0]
    import shutil  # 5 ms that only some commands need

    found = shutil.which("cloudtrain")
    is_script = Path(called).name == "cloudtrain"
    return called if is_script and (found is None or Path(found).resolve() != Path(called).resolve()) else "cloudtrain"


def _readable(line: LogLine) -> str:
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
