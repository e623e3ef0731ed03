"""Event lines: their format, and the schema with which SDK, launcher and sandbox read them.

Events come from logs, to which a job's own code also prints. `parse_event` and `check_event` validate them: a valid
event has an `event` of type text, the fields that its kind requires, and no field of a wrong type. Unknown kinds and
fields are kept, so that older readers accept what newer writers add. A field that only other kinds have is omitted:
readers that treat several kinds alike trust its type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from cloudtrain_runtime.contract.json_checks import (
    MismatchError,
    ObjectSchema,
    Validator,
    array,
    boolean,
    count,
    integer,
    mapping,
    measurement,
    nullable,
    number,
    text,
    timestamp,
)
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern
from cloudtrain_runtime.contract.strict_json import check_depth, dump_json

Event = Mapping[str, Any]
"""An event from `parse_event` or `check_event`, whose fields have the types of the schema."""

EVENT_PREFIX: Final = "CLOUDTRAIN "

_EVENT = lazy_pattern(re.escape(EVENT_PREFIX) + r"(?=\{)")
# null represents a value that is not finite.
_VALUE: Final = measurement

SCORES: Final = ("precision", "recall", "f1")
"""Scores of a class in an analysis."""

_COMMON: Final[Mapping[str, Validator]] = {
    "event": text,
    "time": timestamp,
    "step": count,
    "epoch": count,
    "host": text,
    "rank": nullable(count),
}
"""Fields that mean the same in every kind of event. `time` is in seconds since the epoch."""


CLASSES: Final = array(
    ObjectSchema({"name": text, "support": count}, dict.fromkeys(SCORES, nullable(number)))
)
"""Scores by class, in an analysis and in the results of an evaluation."""


def _kind(
    required: Mapping[str, Validator] | None = None,
    *,
    others: Validator | None = None,
    **optional: Validator,
) -> ObjectSchema:
    return ObjectSchema(required or {}, {**_COMMON, **optional}, others)


EVENTS: Final[Mapping[str, ObjectSchema]] = {
    "environment": _kind(
        {"host": text},
        python=text, driver=nullable(text), cuda=nullable(text), cuda_compat=nullable(text), gpus=array(text),
        efa=array(text), efa_provider=nullable(text), shm_bytes=nullable(count), disk_free_bytes=count,
        memory_bytes=count, packages=ObjectSchema(others=text), warnings=array(text),
    ),
    "attempt": _kind({"host": text}, restarts=count),
    "started": _kind(
        run=text, total_steps=nullable(count), world_size=count, hosts=count, device=text, backend=text,
        parameters=count, train_samples=nullable(count), global_batch=count, resumed_from=nullable(text),
        continues=nullable(text), restarts=count,
    ),
    "step": _kind(
        {"step": count},
        loss=_VALUE, samples_per_second=_VALUE, tokens_per_second=_VALUE, grad_norm=_VALUE, data_wait=_VALUE,
        mfu=_VALUE, memory_bytes=_VALUE, learning_rate=_VALUE, split=mapping(_VALUE), metrics=mapping(_VALUE),
        total_steps=nullable(count),
    ),
    "evaluation": _kind(split=text, samples=count, others=_VALUE),
    "best": _kind({"step": count, "metric": text}, value=_VALUE),
    "skipped": _kind({"step": count}, loss=_VALUE, grad_norm=_VALUE, in_row=count),
    "checkpoint": _kind(
        {"uri": text, "step": count, "time": timestamp}, bytes=number, seconds=number, stall_seconds=nullable(number)
    ),
    "checkpoint_missed": _kind(
        {"step": count}, reason=text, detail=nullable(text), missed=count, alarm=boolean, repeated=boolean,
    ),
    "checkpoint_damaged": _kind({"step": count, "uri": text}, detail=nullable(text)),
    "straggler": _kind({"rank": count, "host": text, "ratio": number, "part": text}, is_over=boolean),
    "bandwidth": _kind(
        {"gbps": number}, bytes=number, seconds=number, world_size=count, hosts=count, backend=text,
        rated_gbps=_VALUE, warning=nullable(text),
    ),
    "pipeline": _kind(links=array(count), stage_seconds=array(number), imbalance=number),
    "tracking": _kind(
        tracker=text, detail=text, dropped=count, mlflow_run=text, wandb_run=text, url=text, files=text
    ),
    "profile": _kind({"uri": text}, first_step=count, last_step=count),
    "failed": _kind(
        message=text, exit_code=integer, local_rank=nullable(count), secondary=boolean, failed_at=timestamp
    ),
    "left": _kind({"host": text, "ranks": array(count)}),
    "hang": _kind(seconds=number, ranks=array(count), stacks=nullable(text)),
    "outputs": _kind(
        {
            "host": text, "model_is_empty": boolean, "unkept_files": count, "unkept_bytes": count,
            "unkept": array(ObjectSchema({"path": text, "files": count, "bytes": count})),
        },
        is_complete=boolean, unwritten=array(text),
    ),
    "fresh_start": _kind({"checkpoint": text, "method": text, "argument": text}),
    "patterns": _kind({"unmatched": array(text)}),
    "ranks": _kind(
        {"host": text, "ranks": count, "joined": count, "alone": count, "saved": boolean},
        seconds=number, progressed=nullable(boolean), cuda_on_cpu=count, unused=count,
    ),
    "analysis": _kind(
        {"split": text, "samples": count}, classes=CLASSES, confusion=nullable(array(array(count))),
    ),
    "leaving": _kind({"held_by": array(text)}, seconds=number),
    "stopped": _kind(signal=text),
    "finished": _kind(
        epochs=count, seconds=number, samples_per_second=_VALUE, best_step=count, skipped=count, start_step=count
    ),
}  # fmt: skip
"""Schema by kind of event."""

_FORMER_KINDS: Final = {"surroundings": "environment"}
"""Present kinds by the names that older logs have for them."""


def _foreign(value: Any) -> Any:
    raise MismatchError("no such field", value)


def _without_foreign(schema: ObjectSchema, names: Iterable[str]) -> ObjectSchema:
    """Return a schema that omits fields of these names unless it has them itself."""
    if schema.others is not None:
        return schema
    return replace(schema, optional={**dict.fromkeys(names, _foreign), **schema.optional})


_NAMES: Final = {name for kind in EVENTS.values() for name in (*kind.required, *kind.optional)}
_CHECKS: Final = {kind: _without_foreign(schema, _NAMES) for kind, schema in EVENTS.items()}
_UNKNOWN: Final = _kind()


def format_event(event: str, fields: dict[str, Any]) -> str:
    """Return one event line, `CLOUDTRAIN {"event": ..., ...}`, without newline."""
    return EVENT_PREFIX + dump_json({"event": event, **fields})


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the event in a log line, or None if the line has no valid event.

    The marker may be anywhere in the line: another process may have left an unfinished line before it.
    """
    # Most lines have none, and this search is much faster than that of the pattern.
    match = _EVENT.search(line) if EVENT_PREFIX in line else None
    if match is None:
        return None
    try:
        content, end = json.JSONDecoder().raw_decode(line, match.end())
        check_depth(line[match.end() : end], content)
    except (ValueError, RecursionError):
        # Python's decoder raises both.
        return None
    return check_event(content)


def check_event(content: Any) -> dict[str, Any] | None:
    """Return an event without fields of a wrong type; None if a required field is missing or wrong."""
    if not isinstance(content, dict) or not isinstance(content.get("event"), str):
        return None
    name = str(content["event"])
    kind = _FORMER_KINDS.get(name, name)
    try:
        return _CHECKS.get(kind, _UNKNOWN)({**content, "event": kind})
    except MismatchError:
        return None
