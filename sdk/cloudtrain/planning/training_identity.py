"""The identity of a job's training, as `run.json` and each checkpoint hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cloudtrain.job.sections.train import Train
from cloudtrain.job.spec import JobSpec
from cloudtrain_runtime.contract.strict_json import decode_floats, dump_json, encode_floats
from cloudtrain_runtime.contract.training_identity import LENGTH_FIELDS


def identify_training(
    spec: JobSpec, args: Mapping[str, Any] | list[str], uploaded: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what makes a training this one: entry, arguments, data and `train`, but for how long.

    Args:
        spec: The job.
        args: Keyword arguments of the Task, or argv of the script.
        uploaded: What the user wrote for data of an earlier run, by the uri that this run has it at.
    """
    identity = {
        "entry": spec.code.task or spec.code.script,
        "args": args,
        "data": {name: (uploaded or {}).get(channel.uri, channel.uri) for name, channel in spec.data.items()},
        "train": {} if spec.train is None else _given(spec.train),
    }
    identity = {name: value for name, value in identity.items() if value}
    return decode_floats(json.loads(dump_json(encode_floats(identity))))  # type: ignore[no-any-return]


def _given(train: Train) -> dict[str, Any]:
    """Return what differs from the defaults, so that a field that a later version adds changes no identity."""
    defaults = Train(epochs=1).model_dump(mode="json", exclude=set(LENGTH_FIELDS))
    return _changed(train.model_dump(mode="json", exclude=set(LENGTH_FIELDS)), defaults)


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _changed(value, default)  # noqa: PLW2901 (only what was changed in it)
            default = {}
        if value != default:
            found[name] = value
    return found
