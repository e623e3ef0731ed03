"""The JSON Schema (draft 2020-12) of sweep.yaml, generated from the models."""

from __future__ import annotations

from typing import Any

from cloudtrain.features.sweeps.spec import SweepSpec
from cloudtrain.job.fields import sections_of
from cloudtrain.job.schema import DIALECT, describe_section


def sweep_schema() -> dict[str, Any]:
    """Return the schema of sweep.yaml, with descriptions and examples."""
    schema = SweepSpec.model_json_schema(mode="validation")
    sections = {"SweepSpec": schema, **schema.get("$defs", {})}
    models = {model.__name__: model for _, model in sections_of(SweepSpec)}
    for name, section in sections.items():
        describe_section(models[name], section)
    metric = {"type": "string", "pattern": "^.+/.+$"}
    schema["properties"]["objective"] = {
        "anyOf": [metric, {"$ref": "#/$defs/Objective"}],
        "description": schema["properties"]["objective"]["description"],
    }
    when = sections["Parameter"]["properties"]["when"]
    when["additionalProperties"] = {
        "anyOf": [{"type": ["string", "number", "boolean", "null"]}, {"type": "array"}]
    }
    schema["title"] = "cloudtrain sweep, version 1"
    return {"$schema": DIALECT, **schema}
