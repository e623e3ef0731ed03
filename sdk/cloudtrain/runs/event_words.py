"""Events of a run as sentences. One rule for the terminal, notebooks and reports: no event is shown as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cloudtrain.runs.titles import ENVIRONMENT, Unit, environment_value
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_duration, format_number, format_size
from cloudtrain.support.web_links import web_link
from cloudtrain_runtime.contract import EVENT_PREFIX, parse_event
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.metric_values import EVALUATION_FIELDS
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

HIGH_DATA_WAIT = 0.2
"""Share of a step that waits for data from which on the log and the status say so."""

_MOST_NAMED = 4
_MOST_FIELDS = 4
_MOST_CHARACTERS = 60
_SMALLEST = 1e-3
_LARGEST = 1e6
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w./-]*")
"""A name that YAML reads as it is."""


def word_line(text: str) -> str | None:
    """Return a log line with its event as a sentence; None for an event that says nothing to a reader of the log."""
    event = parse_event(text)
    return _word_invalid(text) if event is None else word_event(event)


def word_event(event: Event) -> str | None:
    """Return an event as a sentence; None for one that says nothing to a reader of the log."""
    if event["event"] in _NOT_IN_LOGS or _is_silent(event):
        return None
    return describe_event(event)


def describe_event(event: Event) -> str:
    """Return an event as one sentence. One that this version does not know is its name and its first fields."""
    describe = _WORDS.get(event["event"], _describe_unknown)
    try:
        text = describe(event)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        # Fields are missing or odd: an event of another version, or of a script.
        text = _describe_unknown(event)
    return _one_line(text)


def _one_line(text: str) -> str:
    """Return a text without line breaks, which would look like lines of others, and without halves of characters."""
    if text.isprintable():
        return text
    # No stream can encode half of a character, which JSON can have.
    text = text.encode("utf-8", "backslashreplace").decode()
    return " ".join(part.strip() for part in re.split(r"[\r\n\v\f\x85\u2028\u2029]+", text))


def _word_invalid(text: str) -> str:
    """Return a line without a valid event; the JSON of an invalid one is shortened."""
    before, mark, rest = text.partition(EVENT_PREFIX + "{")
    if not mark:
        return text
    try:
        content = load_json("{" + rest)
    except ValueError:
        return text
    if not isinstance(content.get("event"), str):
        return text
    return before + _one_line(_describe_unknown(content))


def _is_silent(event: Event) -> bool:
    """Return whether an event of this kind matters only with other values."""
    kind = event["event"]
    if kind == "outputs":
        return not event.get("unkept_files")
    return kind == "checkpoint_missed" and bool(event.get("repeated"))


def describe_environment(event: Event) -> str:
    """Return what a host has, by its event `environment`: devices, versions and sizes in rounded numbers."""
    sizes = [
        f"{environment_value(event, name)} {title.text}"
        for name, title in ENVIRONMENT.items()
        if title.unit is Unit.BYTES and event.get(name) is not None
    ]
    return ", ".join([describe_devices(event), *sizes])


def describe_devices(event: Event) -> str:
    """Return the devices and versions in an event `environment`, which hosts of one type share."""
    gpus: Counter[str] = Counter(event.get("gpus", ()))
    efa = event.get("efa", ())
    packages = event.get("packages", {})
    driver = event.get("driver")
    parts = [f"{count} x {name}" for name, count in gpus.items()] or ["no GPU"]
    if driver is not None:
        compat = f" with {event['cuda_compat']}" if event.get("cuda_compat") else ""
        parts.append(f"driver {driver}{compat}")
    if event.get("cuda"):
        parts.append(f"CUDA {event['cuda']}")
    if efa:
        parts.append(f"{len(efa)} EFA ({event.get('efa_provider') or 'no provider'})")
    if "torch" in packages:
        parts.append(f"torch {packages['torch']}")
    if "python" in event:
        parts.append(f"Python {event['python']}")
    return ", ".join(parts)


def describe_analysis(event: Event) -> str:
    """Return the errors of a classification: `5 of 270 wrong; weakest: 8 (precision 0.93)`."""
    words = []
    matrix = event.get("confusion")
    if matrix:
        right = sum(row[index] for index, row in enumerate(matrix) if index < len(row))
        total = sum(map(sum, matrix))
        words.append(f"{total - right:,} of {total:,} wrong")
    worst = _weakest(event.get("classes") or ())
    if worst is not None:
        name, score, value = worst
        words.append(f"weakest: {name} ({score} {value:.2f})")
    return "; ".join(words) or count(event["samples"], "sample")


def _weakest(classes: Iterable[Mapping[str, Any]]) -> tuple[str, str, float] | None:
    """Return the name of the class with the lowest precision or recall below 1, which of them, and its value."""
    scores = [
        (each[score], str(each["name"]), score)
        for each in classes
        for score in ("precision", "recall")
        if each.get(score) is not None
    ]
    if not scores:
        return None
    value, name, score = min(scores)
    return None if value >= 1 else (name, score, value)


def describe_fresh_start(event: Event) -> str:
    """Return a message about a trainer that begins at step 0 over a checkpoint, by its event `fresh_start`."""
    return (
        f"the trainer begins at step 0, although {event['checkpoint']} is there: pass {event['argument']} to its "
        f"{event['method']}"
    )


def describe_unmatched(names: Iterable[str]) -> str:
    """Return a message about metrics whose patterns have found no value in a run's output."""
    return f"metrics: no line of rank 0's output had a value of {', '.join(names)}; compare the patterns with the log"


def describe_lost_files(event: Event) -> str:
    """Return a message about the files that a host loses, by its event `outputs`: the job created them."""
    # The largest first; the path of a folder ends with a slash.
    lost = event["unkept"]
    named = ", ".join(map(_describe_lost, lost[:_MOST_NAMED]))
    if len(lost) > _MOST_NAMED:
        named += ", ..."
    least = "" if event.get("is_complete", True) else "at least "
    files = event["unkept_files"]
    verb = "is" if files == 1 else "are"
    size = format_size(event["unkept_bytes"])
    return (
        f"{least}{count(files, 'file')} ({size}) {verb} not kept: {named}. "
        f"Only SM_MODEL_DIR, SM_OUTPUT_DATA_DIR and a script's code.outputs are kept{_outputs_line(lost)}"
    )


def _outputs_line(lost: Iterable[Event]) -> str:
    """Return the words that keep what is below the code folder, with `code: {outputs: [checkpoints/]}`; may be empty."""
    names = [
        str(each["path"]) for each in lost if not str(each["path"]).startswith(("/", "~", "../"))
    ]
    if not names:
        return ""
    quoted = [name if _PLAIN_NAME.fullmatch(name) else dump_json(name) for name in names]
    return f", which these are with code: {{outputs: [{', '.join(quoted)}]}}"


def _describe_lost(lost: Mapping[str, Any]) -> str:
    size = format_size(lost["bytes"])
    is_folder = lost["path"].endswith("/")
    if is_folder and lost["files"] > 1:
        return f"{lost['path']} ({count(lost['files'], 'file')}, {size})"
    return f"{lost['path']} ({size})"


def _describe_started(event: Event) -> str:
    what = "training"
    if event.get("parameters"):
        what = f"training {event['parameters']:,} parameters"
    where = ""
    if event.get("world_size"):
        how = ", ".join(filter(None, (event.get("device"), event.get("backend"))))
        where = f" on {count(event['world_size'], 'rank')}" + (f" ({how})" if how else "")
    # The number of steps of a stream is unknown.
    total = event.get("total_steps")
    steps = "" if total is None else f", {count(total, 'step')}"
    resumed = f", resumed from step {event['step']:,}" if event.get("resumed_from") else ""
    return f"{what}{where}{steps}{resumed}"


def _describe_step(event: Event) -> str:
    if "epoch" not in event or event.get("loss", "") == "":
        return _describe_step_of_script(event)
    wait = event.get("data_wait") or 0
    words = [f"step {event['step']:>6}  epoch {event['epoch']:>3}  loss {_number(event['loss'])}"]
    if event.get("samples_per_second"):
        words.append(f"{event['samples_per_second']:,.0f} samples/s")
    # The first step always waits for the loader's workers to start.
    if event["step"] > 1 and wait > HIGH_DATA_WAIT:
        words.append(f"{wait:.0%} of the step waits for data")
    return "  ".join(words)


def _describe_step_of_script(event: Event) -> str:
    """Return a step that `report` or a pattern has found: its metrics have any names."""
    total = f"/{event['total_steps']}" if event.get("total_steps") else ""
    loss = {} if event.get("loss") is None else {"loss": event["loss"]}
    values = {**loss, **(event.get("metrics") or {})}
    words = [f"{name} {_number(value)}" for name, value in values.items()]
    return "  ".join([f"step {event['step']}{total}", *words])


def _describe_evaluation(event: Event) -> str:
    values = [
        f"{name} {_number(value)}" for name, value in event.items() if name not in EVALUATION_FIELDS
    ]
    at = f" after step {event['step']}" if "step" in event else ""
    return f"{event.get('split', 'evaluation')}{at}: {'  '.join(values) or 'no values'}"


def _describe_best(event: Event) -> str:
    value = f" {_number(event['value'])}" if "value" in event else ""
    return f"best so far: {event['metric']}{value}, at step {event['step']}"


def _describe_skipped(event: Event) -> str:
    loss = f"; loss {_number(event['loss'])}" if "loss" in event else ""
    return f"step {event['step']} skipped: its gradient is not finite{loss}"


def _describe_checkpoint(event: Event) -> str:
    details = []
    if "bytes" in event:
        took = f" in {event['seconds']:.2f} s" if "seconds" in event else ""
        details.append(f"{event['bytes'] / 1e6:.1f} MB{took}")
    if event.get("stall_seconds") is not None:
        details.append(f"training waited {event['stall_seconds']:.3f} s")
    what = f"checkpoint of step {event['step']}"
    return f"{what}: {', '.join(details)}" if details else what


def _describe_missed(event: Event) -> str:
    alarm = f"ALARM, {event['missed']} in a row: " if event.get("alarm") else ""
    detail = event.get("detail") or "unknown reason"
    why = f", {event['reason']}" if "reason" in event else ""
    return f"{alarm}no checkpoint of step {event['step']}{why}: {detail}; the run continues"


def _describe_damaged(event: Event) -> str:
    detail = f": {event['detail']}" if event.get("detail") else ""
    return f"the checkpoint of step {event['step']} is damaged and set aside, at {event['uri']}{detail}"


def _describe_straggler(event: Event) -> str:
    where = f"rank {event['rank']} on {event['host']}"
    if event.get("is_over"):
        return f"{where} keeps up again"
    return f"{where} is slow: {event['ratio']:.2f} x the median of all ranks, most of it in {event['part']}"


def _describe_bandwidth(event: Event) -> str:
    who = count(event["world_size"], "rank") if "world_size" in event else "the ranks"
    rated = ""
    if event.get("rated_gbps"):
        rated = f", the network is rated {event['rated_gbps']:,.0f}"
    return f"{who} exchange data at {event['gbps']:,.1f} Gbit/s{rated}"


def _describe_pipeline(event: Event) -> str:
    stages = zip(event["links"], event["stage_seconds"], strict=True)
    text = ", ".join(f"{modules} ({1e3 * seconds:.3g} ms)" for modules, seconds in stages)
    return (
        f"pipeline: modules by stage {text}; the slowest takes {event['imbalance']:.2f} x the mean"
    )


def _describe_failed(event: Event) -> str:
    """Return the exit code; the message is printed on a line of its own."""
    why = ", after another rank's failure" if event.get("secondary") else ""
    return f"ends with exit code {event['exit_code']}{why}"


def _describe_hang(event: Event) -> str:
    if event.get("stacks"):
        return f"stacks of its ranks: {event['stacks']}"
    silent = f" for {format_duration(event['seconds'])}" if "seconds" in event else ""
    return f"no progress{silent}"


def _describe_left(event: Event) -> str:
    ranks = ", ".join(map(str, event["ranks"][:_MOST_NAMED]))
    return f"ranks {ranks} of {event['host']} have ended while others work"


def _describe_outputs(event: Event) -> str:
    return describe_lost_files(event) if event["unkept_files"] else "all files of the job are kept"


def _describe_ranks(event: Event) -> str:
    words = []
    # The ranks of a command record nothing.
    if event["ranks"] and event["joined"] < event["ranks"]:
        alone = event["ranks"] - event["joined"]
        words.append(f"{alone} of {count(event['ranks'], 'rank')} not in a process group of torch")
    elif event["ranks"]:
        words.append(f"{count(event['ranks'], 'rank')} in a process group of torch")
    if event.get("unused"):
        words.append("the group has moved no data")
    if not event["saved"]:
        words.append("nothing saved to /opt/ml/checkpoints yet")
    # The field is missing where nothing measures progress.
    if event.get("progressed") is False:
        words.append("no progress reported yet")
    return ", ".join(words) or "its ranks are ready"


def _describe_leaving(event: Event) -> str:
    names = ", ".join(map(str, event["held_by"][:_MOST_NAMED])) or "exit handlers"
    rank = f"rank {event['rank']}" if event.get("rank") is not None else "a rank"
    return f"{rank} has done its work and waits for {names}"


def _describe_stopped(event: Event) -> str:
    if "step" in event:
        return f"stopped after step {event['step']}"
    return f"ended by {event.get('signal', 'a signal')}"


def _describe_finished(event: Event) -> str:
    took = f" in {event['seconds']:.1f} s" if "seconds" in event else ""
    if "step" not in event:
        return f"finished{took}"
    if (first := event.get("start_step", 0)) == 0 or first > event["step"]:
        return f"finished {count(event['step'], 'step')}{took}"
    # The time is that of this attempt.
    done = count(event["step"] - first, "step")
    return f"finished step {event['step']:,}: {done}{took}, from step {first:,} on"


def _describe_tracking(event: Event) -> str:
    if event.get("detail"):
        return str(event["detail"])
    if event.get("files"):
        return f"writes offline files of Weights & Biases to {event['files']}"
    name = "MLflow run" if "mlflow_run" in event else "run of Weights & Biases"
    identifier = event.get("mlflow_run") or event["wandb_run"]
    link = web_link(event.get("url", ""))
    return f"logs to the {name} {link or identifier}"


def _describe_profile(event: Event) -> str:
    steps = ""
    if "first_step" in event and "last_step" in event:
        steps = f" of steps {event['first_step']} to {event['last_step']}"
    return f"profile{steps} of every rank: {event['uri']}"


def _describe_unknown(event: Event) -> str:
    """Return the name and the first plain fields of an event that this version does not know."""
    kind = str(event["event"]).replace("_", " ")[:_MOST_CHARACTERS]
    fields = [
        f"{name.replace('_', ' ')} {_plain(value)}"
        for name, value in event.items()
        if name not in ("event", "time", "host") and not isinstance(value, dict | list)
    ]
    if not fields:
        return kind
    return f"{kind}: {', '.join(fields[:_MOST_FIELDS])}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).partition("\n")[0][:_MOST_CHARACTERS]


def _number(value: Any) -> str:
    """Return a metric's value; those of a usual size have four decimals, so that columns of a log are aligned."""
    if value is None:
        return "not finite"
    is_usual = value == 0 or _SMALLEST <= abs(value) < _LARGEST
    return f"{value:.4f}" if is_usual else format_number(value)


_NOT_IN_LOGS = frozenset({"attempt", "left", "patterns", "leaving", "ranks"})
"""Kinds that are not shown in logs: the launcher, the rank or the status prints the same."""

_WORDS: Mapping[str, Callable[[Event], str]] = {
    "environment": describe_environment,
    "attempt": lambda event: f"its ranks start, after {count(event['restarts'], 'restart')}",
    "started": _describe_started,
    "step": _describe_step,
    "evaluation": _describe_evaluation,
    "best": _describe_best,
    "skipped": _describe_skipped,
    "checkpoint": _describe_checkpoint,
    "checkpoint_missed": _describe_missed,
    "checkpoint_damaged": _describe_damaged,
    "straggler": _describe_straggler,
    "bandwidth": _describe_bandwidth,
    "pipeline": _describe_pipeline,
    "tracking": _describe_tracking,
    "profile": _describe_profile,
    "failed": _describe_failed,
    "left": _describe_left,
    "hang": _describe_hang,
    "outputs": _describe_outputs,
    "fresh_start": describe_fresh_start,
    "patterns": lambda event: describe_unmatched(event["unmatched"]),
    "ranks": _describe_ranks,
    "analysis": lambda event: f"{event['split']} in detail: {describe_analysis(event)}",
    "leaving": _describe_leaving,
    "stopped": _describe_stopped,
    "finished": _describe_finished,
}
