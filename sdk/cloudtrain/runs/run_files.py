"""Schemas of the files that describe a run: plan.json, request.json and run.json.

Any program, or an older cloudtrain, can have written them. What has a wrong type is left out, so that a reader finds a
field with the type that it expects or does not find it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from cloudtrain_runtime.contract.json_checks import (
    MismatchError,
    ObjectSchema,
    array,
    boolean,
    count,
    mapping,
    normalise,
    nullable,
    number,
    text,
)

_CHANNEL: Final = ObjectSchema(
    {"ChannelName": text, "DataSource": ObjectSchema({"S3DataSource": ObjectSchema({"S3Uri": text})})}
)

REQUEST: Final = ObjectSchema(
    optional={
        "TrainingJobName": text,
        "RoleArn": text,
        "AlgorithmSpecification": ObjectSchema(optional={"TrainingImage": text}),
        "ResourceConfig": ObjectSchema(
            optional={
                "InstanceType": text,
                "InstanceCount": count,
                "SelectedInstanceType": text,
                "SelectedInstanceCount": count,
                "VolumeSizeInGB": count,
            }
        ),
        "StoppingCondition": mapping(count),
        "VpcConfig": ObjectSchema(optional={"Subnets": array(text), "SecurityGroupIds": array(text)}),
        "InputDataConfig": array(_CHANNEL),
        "OutputDataConfig": ObjectSchema({"S3OutputPath": text}, {"KmsKeyId": nullable(text)}),
        "EnableNetworkIsolation": boolean,
        "Tags": array(ObjectSchema({"Key": text, "Value": text})),
    }
)
"""The CreateTrainingJob document, as far as cloudtrain reads it back."""

CONFIG: Final = ObjectSchema(
    optional={
        "script": nullable(text),
        "task": nullable(text),
        "requirements": nullable(text),
        "hang_seconds": nullable(number),
        "local_rank_option": nullable(text),
        "outputs": array(text),
        "starts_ranks": boolean,
        "train": nullable(ObjectSchema()),
        "checkpoint": ObjectSchema(optional={"uri": text}),
    }
)
"""The part of a plan that the container reads."""

PLAN: Final = ObjectSchema(
    optional={
        "run": text,
        "job": ObjectSchema(),
        "request": REQUEST,
        "bundle": ObjectSchema({"digest": text, "bytes": count, "files": count}),
        "cluster": ObjectSchema(optional={"world_size": nullable(count)}),
        "checkpoint": ObjectSchema({"uri": text}),
        "config": CONFIG,
        "left_out": array(ObjectSchema({"name": text, "reason": text})),
    }
)
"""Everything that was decided for a run."""


def read_fields(content: Any, schema: ObjectSchema) -> dict[str, Any]:
    """Return an object's fields of the right types; nothing where the content is no object."""
    try:
        return schema(normalise(content))
    except MismatchError:
        return {}


def read_file(path: Path, schema: ObjectSchema) -> dict[str, Any]:
    """Return the fields of the right types of the JSON object in a file; nothing where it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return read_fields(content, schema)
