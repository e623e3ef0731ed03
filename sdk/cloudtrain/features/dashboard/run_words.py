"""What the page of a run says: facts, settings, environment and checkpoints, with the titles and formats of the terminal.

A row is `[label, text, hint]`: the hint is shown while the pointer is over it, and may be empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cloudtrain.console.status_fields import as_one_line
from cloudtrain.runs.comparison import direction_of
from cloudtrain.runs.evaluations import INITIAL_STEP, Evaluation, Measurement
from cloudtrain.runs.event_words import describe_devices, describe_event, word_event
from cloudtrain.runs.history import SPEED_METRICS
from cloudtrain.runs.ledger_words import describe_share
from cloudtrain.runs.main_metric import main_metric
from cloudtrain.runs.shown_metrics import plain_metrics
from cloudtrain.runs.status import (
    Status,
    describe_checkpoint,
    describe_cost,
    describe_steps,
    shown_reason,
)
from cloudtrain.runs.step_parts import describe_seconds
from cloudtrain.runs.titles import (
    ENVIRONMENT,
    SETTINGS,
    STEP_PARTS_TITLE,
    TIMES,
    TRAINING,
    Level,
    Unit,
    describe_metric_value,
    environment_value,
    event_title,
    heading,
    is_step_part,
    metric_title,
    section_title,
    split_title,
    title_of_metric,
)
from cloudtrain.support.backend_facts import facts_of, place_name
from cloudtrain.support.units import format_duration, format_number, format_size, format_usd
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.redaction import redact
from cloudtrain_runtime.contract.strict_json import dump_json

Row = list[str]

_SHORT_DIGEST = 12
_SECONDS = lazy_pattern(r"(\d{1,9})s")
_DIGEST = lazy_pattern(r"[0-9a-f]{40,64}")
_MACHINE = ("gpus", "memory_bytes", "shm_bytes", "disk_free_bytes", "efa", "efa_provider")
_SOFTWARE = ("driver", "cuda", "cuda_compat", "python")
_BAD_KINDS = ("failed", "hang", "straggler")
_DERIVED = {"global batch": "train", "ranks": "cluster"}
"""Values that follow from a job's settings, by the section that they are shown in."""

_SPLIT_ORDER = ("training", "validation", "test")


def worded_event(event: Event) -> dict[str, Any]:
    """Return what an event is in words: a sentence, its level, the lane of a timeline, and whether logs show it."""
    title = event_title(event["event"])
    level = title.level
    if event.get("is_over"):
        level = Level.PLAIN
    if event["event"] == "environment" and event.get("warnings"):
        level = Level.WARNING
    return {
        "text": describe_event(event),
        "title": title.text,
        "lane": title.many if title.is_marked else "",
        "level": level,
        "is_logged": word_event(event) is not None,
    }


def metric_words(names: Iterable[str]) -> dict[str, Any]:
    """Return how curves of metrics are called and grouped: title of the chart, name of the line, unit."""
    return {name: _metric_words(name) for name in names}


def _metric_words(name: str) -> dict[str, Any]:
    title = title_of_metric(name)
    if is_step_part(name):
        return {
            "chart": heading(STEP_PARTS_TITLE.text),
            "line": title.text,
            "title": f"{title.text} of a step",
            "unit": title.unit,
            "kind": "part",
            "hint": STEP_PARTS_TITLE.hint,
        }
    return {
        "chart": heading(title.text),
        "line": split_title(name),
        "title": metric_title(name),
        "unit": title.unit,
        "kind": "speed" if name in SPEED_METRICS else "",
        "hint": title.hint,
        "direction": direction_of(name),
    }


def key_metric(metrics: Mapping[str, float | None]) -> dict[str, Any] | None:
    """Return the metric that the head of a page shows large; None without one."""
    name = main_metric(metrics)
    if name is None:
        return None
    text = describe_metric_value(name, metrics[name])
    return {"name": name, "title": metric_title(name), "text": text}


def result_table(metrics: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the newest values of all metrics but those of speed: a row for each, a column for each split."""
    by_title: dict[str, dict[str, str]] = {}
    for name, value in plain_metrics(metrics).items():
        title = heading(title_of_metric(name).text)
        by_title.setdefault(title, {})[split_title(name)] = describe_metric_value(name, value)
    known = {split for found in by_title.values() for split in found}
    ordered = [split for split in _SPLIT_ORDER if split in known]
    splits = [*ordered, *sorted(known - set(ordered))]
    rows = [
        [title, *(found.get(split, "") for split in splits)] for title, found in by_title.items()
    ]
    return {"heads": ["metric", *splits], "rows": rows}


def fact_rows(status: Status, plan: Mapping[str, Any], now: float) -> list[Row]:
    """Return the facts of a run that its overview shows, each with a value."""
    rows = [
        ["Progress", describe_steps(status), ""],
        ["Time left", status.describe_rest(now), ""],
        ["Where", place_name(status.backend), ""],
        ["Ranks", _ranks(status, plan), ""],
        ["Instances", _instances(status), ""],
        ["Last checkpoint", describe_checkpoint(status, now), ""],
        *_money_rows(status, plan, now),
        ["Time limit", _limit(plan), ""],
        *([name, place, ""] for name, place in status.progress.tracked.items()),
        ["Tags", ", ".join(_tags(plan)), ""],
        ["Model", status.artifacts.get("model", ""), ""],
    ]
    return [row for row in rows if row[1]]


def _ranks(status: Status, plan: Mapping[str, Any]) -> str:
    ranks = status.world_size
    if ranks is None:
        return ""
    hosts = (plan.get("cluster") or {}).get("instances") or len(status.progress.host_environments)
    return f"{ranks:,} on {hosts:,} host{'' if hosts == 1 else 's'}" if hosts else f"{ranks:,}"


def _instances(status: Status) -> str:
    if not status.instance_type:
        return ""
    spot = " spot" if status.is_spot else ""
    return f"{status.instances or 1} x {status.instance_type}{spot}"


def _money_rows(status: Status, plan: Mapping[str, Any], now: float) -> list[Row]:
    if not facts_of(status.backend).uses_account:
        return []
    cost = plan.get("cost") or {}
    risk = status.usd_at_risk(now)
    name = "Would cost" if status.is_simulated else "Cost so far"
    per_hour = status.usd_per_hour or cost.get("usd_per_hour")
    return [
        [name, describe_cost(status, status.cost_usd), ""],
        ["Price per hour", format_usd(per_hour) if per_hour else "", "Of all instances."],
        [
            "Estimate",
            format_usd(cost["max_usd"]) if cost.get("max_usd") else "",
            "If the run takes all the time that its limit allows.",
        ],
        ["At risk", format_usd(risk) if risk else "", "Cost since the last checkpoint."],
    ]


def _limit(plan: Mapping[str, Any]) -> str:
    seconds = plan.get("max_runtime_seconds")
    return format_duration(seconds) if isinstance(seconds, int | float) else ""


def _tags(plan: Mapping[str, Any]) -> list[str]:
    tags = (plan.get("job") or {}).get("tags") or {}
    return [f"{name}={value}" for name, value in tags.items()] if isinstance(tags, Mapping) else []


def plan_rows(plan: Mapping[str, Any], backend: str) -> list[Row]:
    """Return the facts of a plan: code, source, image, batch, checkpoints."""
    bundle = plan.get("bundle") or {}
    source = plan.get("source") or {}
    checkpoint = plan.get("checkpoint") or {}
    rows = []
    if bundle.get("digest"):
        size = f"{bundle.get('files', 0):,} files, {format_size(bundle.get('bytes') or 0)}"
        rows.append(["Code", f"{bundle['digest'][:_SHORT_DIGEST]} ({size})", bundle["digest"]])
    if source.get("commit"):
        changed = " with changes" if source.get("diff") else ""
        branch = f" on {source['branch']}" if source.get("branch") else ""
        commit = source["commit"]
        rows.append(["Commit", f"{commit[:_SHORT_DIGEST]}{changed}{branch}", commit])
    # The image is what a container starts from; the runs of this machine have its own Python.
    if plan.get("image") and not facts_of(backend).is_local:
        rows.append(["Image", str(plan["image"]), ""])
    if checkpoint.get("uri"):
        every = f"every {checkpoint['every']}" if checkpoint.get("every") else ""
        rows += [["Checkpoints", every, ""], ["Checkpoints in", str(checkpoint["uri"]), ""]]
    rows.append(["Time limit", _limit(plan), ""])
    return [row for row in rows if row[1]]


def setting_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return settings in the sections of job.yaml, each sorted by path."""
    groups: dict[str, list[Row]] = {}
    for path, value in sorted(settings.items()):
        section = section_title(_DERIVED.get(path, path))
        groups.setdefault(section, []).append([path, *_setting(value)])
    ordered = [title for title in SETTINGS.values() if title in groups]
    return [{"title": title, "rows": groups[title]} for title in ordered]


def _setting(value: Any) -> Row:
    """Return a setting as people write it, and its whole value where the text is shorter."""
    if isinstance(value, bool) or value is None:
        return [dump_json(value), ""]
    if isinstance(value, float):
        text = format_number(value)
        return [text, "" if float(text.replace(",", "")) == value else repr(value)]
    if not isinstance(value, str):
        return [dump_json(value), ""]
    found = _SECONDS.fullmatch(value)
    if found is not None:
        return [format_duration(int(found[1])), value]
    if _DIGEST.fullmatch(value):
        return [value[:_SHORT_DIGEST], value]
    return [redact(value), ""]


def environment_parts(status: Status, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return what the hosts have and what the training uses, sorted in groups; hosts that have the same together."""
    reports = dict(status.progress.host_environments)
    reports.update({each["host"]: each for each in events if each["event"] == "environment"})
    by_content: dict[str, list[str]] = {}
    for host in sorted(reports):
        by_content.setdefault(_content(reports[host]), []).append(host)
    parts = [
        {"title": ", ".join(hosts), "groups": _groups([reports[host] for host in hosts])}
        for hosts in by_content.values()
    ]
    started = next((each for each in reversed(events) if each["event"] == "started"), None)
    if started is not None:
        rows = [
            [heading(title.text), _plain(started[name]), title.hint]
            for name, title in TRAINING.items()
            if started.get(name) is not None
        ]
        parts.append({"title": "Training", "groups": [{"title": "", "rows": rows}]})
    return parts


def _content(report: Event) -> str:
    """Return what hosts must have in common to be shown together; their free disk differs by some bytes."""
    kept = {name: report.get(name) for name in (*_MACHINE, *_SOFTWARE, "packages")}
    return dump_json({**kept, "disk_free_bytes": None, "memory_bytes": _size(report)})


def _size(report: Event) -> str:
    return environment_value(report, "memory_bytes")


def _groups(reports: Sequence[Event]) -> list[dict[str, Any]]:
    first = min(reports, key=lambda each: each.get("disk_free_bytes") or 0)
    packages = [[name, version, ""] for name, version in (first.get("packages") or {}).items()]
    groups = [
        {"title": "Machine", "rows": _environment_rows(first, _MACHINE)},
        {"title": "Software", "rows": [*_environment_rows(first, _SOFTWARE), *packages]},
    ]
    warnings = sorted({text for each in reports for text in each.get("warnings") or ()})
    if warnings:
        groups.append({"title": "Warnings", "rows": [["", text, ""] for text in warnings]})
    return [group for group in groups if group["rows"]]


def _environment_rows(report: Event, names: Iterable[str]) -> list[Row]:
    rows = []
    for name in names:
        title = ENVIRONMENT[name]
        text = _environment_text(report, name)
        if text:
            exact = f"{report[name]:,} bytes" if title.unit is Unit.BYTES else ""
            rows.append([heading(title.text), text, title.hint or exact])
    return rows


def _environment_text(report: Event, name: str) -> str:
    if name == "gpus":
        models = Counter(report.get("gpus") or ())
        return ", ".join(f"{number} x {model}" for model, number in models.items()) or "none"
    if name == "efa":
        return str(len(report.get("efa") or ()) or "")
    return environment_value(report, name)


def _plain(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def host_rows(status: Status, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return each host with its devices and what has gone wrong there."""
    troubles: dict[str, dict[str, None]] = {}
    for event in events:
        is_bad = event["event"] in _BAD_KINDS and not event.get("is_over")
        # The failure of a rank after that of another one is not its host's fault.
        if is_bad and event.get("host") and not event.get("secondary"):
            rank = f"rank {event['rank']}: " if event.get("rank") is not None else ""
            text = f"{rank}{event_title(event['event']).text}"
            troubles.setdefault(event["host"], {})[text] = None
    reports = status.progress.host_environments
    hosts = sorted({*reports, *troubles})
    return [
        {
            "host": host,
            "devices": as_one_line(describe_devices(reports[host])) if host in reports else "",
            "troubles": list(troubles.get(host, ())),
        }
        for host in hosts
    ]


def checkpoint_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, newest first: state, size, and the share of the training's time that each took."""
    damaged = {
        each["step"]: each.get("detail") or ""
        for each in events
        if each["event"] == "checkpoint_damaged"
    }
    rows = []
    before: float | None = None
    for event in events:
        kind = event["event"]
        if kind == "started":
            before = event.get("time")
        elif kind == "checkpoint":
            rows.append(_saved(event, before, damaged))
            before = event.get("time")
        elif kind == "checkpoint_missed" and not event.get("repeated"):
            rows.append(_missed(event))
    return rows[::-1]


def _saved(event: Event, before: float | None, damaged: Mapping[int, str]) -> dict[str, Any]:
    step = event["step"]
    seconds = event.get("seconds")
    stall = event.get("stall_seconds")
    return {
        "step": f"{step:,}",
        "state": "damaged" if step in damaged else "complete",
        "is_bad": step in damaged,
        "time": event.get("time"),
        "size": "" if event.get("bytes") is None else format_size(event["bytes"]),
        "took": "" if seconds is None else describe_seconds(seconds),
        "waited": "" if stall is None else describe_seconds(stall),
        "share": _stall_share(event, before),
        "place": event["uri"],
        "detail": damaged.get(step, ""),
    }


def _stall_share(event: Event, before: float | None) -> str:
    """Return the share of the time since the checkpoint before for which the training waited."""
    stall = event.get("stall_seconds")
    since = (event.get("time") or 0.0) - (before or 0.0)
    if stall is None or before is None or since <= 0:
        return ""
    return describe_share(min(1.0, stall / since))


def _missed(event: Event) -> dict[str, Any]:
    return {
        "step": f"{event['step']:,}",
        "state": "missed",
        "is_bad": True,
        "time": event.get("time"),
        "size": "",
        "took": "",
        "waited": "",
        "share": "",
        "place": "",
        "detail": ": ".join(filter(None, (event.get("reason"), event.get("detail")))),
    }


def evaluation_rows(evaluations: Iterable[Evaluation]) -> list[dict[str, str]]:
    """Return the metrics of evaluations with their intervals, newest first."""
    return [
        {
            "created": each.created.isoformat(),
            "weights": _weights(each.step),
            "metric": metric_title(f"{split}/{name}"),
            "value": describe_metric_value(name, measured.value),
            "interval": _interval(name, measured),
            "samples": f"{found.samples:,}",
        }
        for each in evaluations
        for split, found in each.splits.items()
        for name, measured in found.metrics.items()
    ]


def _weights(step: int | None) -> str:
    if step is None:
        return ""
    return "initial" if step == INITIAL_STEP else f"step {step:,}"


def _interval(name: str, measured: Measurement) -> str:
    if measured.low is None or measured.high is None:
        return ""
    low, high = (describe_metric_value(name, each) for each in (measured.low, measured.high))
    return f"{low} to {high}"


def time_hints() -> dict[str, str]:
    """Return what each kind of time in a ledger is."""
    return {kind: title.hint for kind, title in TIMES.items()}


def run_words(
    status: Status,
    plan: Mapping[str, Any],
    events: Sequence[Event],
    names: Iterable[str],
    now: float,
) -> dict[str, Any]:
    """Return what the page of a run says that changes while the run is in progress.

    Args:
        status: Its status.
        plan: Its plan.json, which may be empty.
        events: Its events but those of steps, oldest first.
        names: Its metrics.
        now: The present time in seconds since the epoch.
    """
    return {
        "metrics": metric_words(names),
        "key": key_metric(status.progress.metrics),
        "results": result_table(status.progress.metrics),
        "facts": fact_rows(status, plan, now),
        "reason": shown_reason(status),
        "environment": environment_parts(status, events),
        "hosts": host_rows(status, events),
        "checkpoints": checkpoint_rows(events),
    }
