"""The identity of a training, which `run.json` and each checkpoint contain."""

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
    """Return the identity of a training: entry, arguments, data and `train`, without its length.

    Args:
        spec: The job.
        args: Keyword arguments of the Task, or argv of the script.
        uploaded: Data paths in an earlier run's job file, by the uri to which that run uploaded them.
    """
    identity = {
        "entry": spec.code.task or spec.code.script,
        "args": args,
        "data": {name: (uploaded or {}).get(channel.uri, channel.uri) for name, channel in spec.data.items()},
        "train": {} if spec.train is None else _changed_fields(spec.train),
    }
    identity = {name: value for name, value in identity.items() if value}
    return decode_floats(json.loads(dump_json(encode_floats(identity))))  # type: ignore[no-any-return]


def _changed_fields(train: Train) -> dict[str, Any]:
    """Return the values that differ from the defaults, so that a field of a later version changes no identity."""
    defaults = Train(epochs=1).model_dump(mode="json", exclude=set(LENGTH_FIELDS))
    return _without_defaults(train.model_dump(mode="json", exclude=set(LENGTH_FIELDS)), defaults)


def _without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _without_defaults(value, default)  # noqa: PLW2901 (reduced to its changes)
            default = {}
        if value != default:
            found[name] = value
    return found
