"""Schemas of the files that describe a run: plan.json, request.json and run.json.

Another program or an older cloudtrain may have written these files. Fields of a wrong type are dropped, so that every
field that is present has the expected type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from cloudtrain.runs.moved_home import relocate
from cloudtrain.support.regular_files import read_regular
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
from cloudtrain_runtime.contract.strict_json import load_json

_CHANNEL: Final = ObjectSchema(
    {
        "ChannelName": text,
        "DataSource": ObjectSchema(optional={"S3DataSource": ObjectSchema({"S3Uri": text})}),
    }
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
        "VpcConfig": ObjectSchema(
            optional={"Subnets": array(text), "SecurityGroupIds": array(text)}
        ),
        "InputDataConfig": array(_CHANNEL),
        "OutputDataConfig": ObjectSchema({"S3OutputPath": text}, {"KmsKeyId": nullable(text)}),
        "EnableNetworkIsolation": boolean,
        "Tags": array(ObjectSchema({"Key": text, "Value": text})),
    }
)
"""The fields of the CreateTrainingJob document that cloudtrain reads."""

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
        "evaluation": nullable(ObjectSchema(optional={"run": text})),
    }
)
"""The part of a plan that the container reads."""

PLAN: Final = ObjectSchema(
    optional={
        "version": count,
        "run": text,
        "job": ObjectSchema(
            optional={
                "name": text,
                "train": nullable(ObjectSchema()),
                "data": nullable(ObjectSchema()),
            }
        ),
        "request": REQUEST,
        "bundle": ObjectSchema({"digest": text, "bytes": count, "files": count}),
        "cluster": ObjectSchema(optional={"world_size": nullable(count)}),
        "source": nullable(
            ObjectSchema(
                {"commit": text},
                {"branch": nullable(text), "dirty": boolean, "diff": nullable(text)},
            )
        ),
        "batch": nullable(ObjectSchema(optional={"global": nullable(count)})),
        "command": nullable(ObjectSchema(optional={"text": text, "entry": nullable(text)})),
        "warnings": array(text),
        "decisions": array(text),
        "checkpoint": ObjectSchema({"uri": text}),
        "config": CONFIG,
        "left_out": array(ObjectSchema({"name": text, "reason": text})),
        "modules": array(ObjectSchema({"name": text, "path": text})),
        "submitter": text,
    }
)
"""The fields of plan.json that cloudtrain reads."""


def read_fields(content: Any, schema: ObjectSchema) -> dict[str, Any]:
    """Return the fields of an object that have the right types; empty if the content is no object."""
    try:
        return schema(normalise(content))
    except MismatchError:
        return {}


def read_file(path: Path, schema: ObjectSchema) -> dict[str, Any]:
    """Return the valid fields of the JSON object in a file; empty if the file cannot be read."""
    try:
        content = relocate(load_json(read_regular(path)), path)
    except (OSError, ValueError):
        return {}
    return read_fields(content, schema)
