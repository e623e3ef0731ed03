"""The JSON Schema (draft 2020-12) of job.yaml and its reference page, generated from the models."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from cloudtrain import catalog
from cloudtrain.catalog import service_limits
from cloudtrain.job.diagnostics import to_flow_style
from cloudtrain.job.fields import STEPS_PATTERN, Section, sections_of
from cloudtrain.job.job_fields import MAX_NAME_CHARACTERS
from cloudtrain.job.sections.checkpoint import Checkpoint
from cloudtrain.job.spec import JobSpec
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.strict_json import dump_json

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_EXACTLY_ONE: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Code": (("task",), ("script",), ("module",), ("command",)),
    "Train": (("epochs",), ("steps",)),
    "Channel": (("uri",), ("fsx",), ("efs",)),
}
"""Fields of which exactly one is given, by section."""
_AT_MOST_ONE = {"Cluster": ("instance_type", "prefer")}
"""Fields of which at most one is given, by section."""
_AWS_LIMITS: Mapping[str, tuple[str, ...]] = {
    "code.env": ("Environment",),
    "cluster.prefer": ("ResourceConfig", "InstancePreferences"),
    "cluster.network.subnets": ("VpcConfig", "Subnets"),
    "cluster.network.security_groups": ("VpcConfig", "SecurityGroupIds"),
    "limits.retries": ("RetryStrategy", "MaximumRetryAttempts"),
    "tags": ("Tags",),
}
"""Path of the limit in AWS's model, by field."""
_INSTANCE_TYPE = r"^ml\.[a-z0-9-]+\.[a-z0-9]+$"
_PATTERNS = (
    ("JobSpec", "name", r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$"),
    ("Code", "task", r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"),
    ("Code", "module", r"^(?!.*\.py$)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"),
    ("Cluster", "instance_type", _INSTANCE_TYPE),
    ("Preference", "instance_type", _INSTANCE_TYPE),
    ("EarlyStopping", "metric", r"^validation/.+$"),
    ("Evaluate", "every", STEPS_PATTERN),
)
"""Patterns of fields that the models check in validators, which pydantic cannot export."""
_LIMIT_KEYWORDS = {"map": "maxProperties", "list": "maxItems", "integer": "maximum"}
"""Keyword of JSON Schema by the type in AWS's model."""


def job_schema() -> dict[str, Any]:
    """Return the schema of job.yaml, with descriptions, examples and enums."""
    schema = JobSpec.model_json_schema(mode="validation")
    sections = {"JobSpec": schema, **schema.get("$defs", {})}
    models = {model.__name__: model for _, model in sections_of(JobSpec)}
    for name, section in sections.items():
        describe_section(models[name], section)
    for path, member in _AWS_LIMITS.items():
        _add_limit(schema, path.split("."), service_limits.limit_of(*member))
    channels = schema["properties"]["data"]
    uri = {
        "type": "string",
        "description": "s3://bucket/prefix, or a local path relative to the job file.",
    }
    channels["additionalProperties"] = {"anyOf": [uri, channels["additionalProperties"]]}
    cluster = sections["Cluster"]["properties"]
    cluster["spot"]["anyOf"] = [{"type": "boolean"}, *cluster["spot"]["anyOf"]]
    for field in ("queue", "image"):
        cluster[field]["anyOf"] = [{"type": "string"}, *cluster[field]["anyOf"]]
    preference = {"type": "string", "pattern": _INSTANCE_TYPE}
    cluster["prefer"]["items"] = {"anyOf": [preference, cluster["prefer"]["items"]]}
    schema["properties"]["request"]["propertyNames"] = {"enum": list(service_limits.members_of())}
    hang = sections["Limits"]["properties"]["hang"]
    hang["anyOf"] = [*hang["anyOf"], {"enum": [False, "off", "no"]}]
    cluster["instance_type"]["examples"] = [
        name
        for name in catalog.instance_names()
        if (instance := catalog.find_instance(name)) and instance.gpus
    ]
    cluster["framework"]["examples"] = [image.framework for image in catalog.images()]
    for section_name, field, pattern in _PATTERNS:
        text = sections[section_name]["properties"][field]
        if "anyOf" in text:
            # The other option is null.
            text = text["anyOf"][0]
        text["pattern"] = pattern
    schema["properties"]["name"]["maxLength"] = MAX_NAME_CHARACTERS
    schema["title"] = "cloudtrain job, version 1"
    return {"$schema": DIALECT, **schema}


def describe_section(model: type[Section], section: dict[str, Any]) -> None:
    """Add descriptions, readable defaults and the fields of which exactly one is given to a section's schema."""
    docs = field_docs(model)
    section["description"] = docs[""]
    for field, content in section["properties"].items():
        content["description"] = docs[field]
        content.pop("title", None)
        if "default" in content:
            content["default"] = display_default(model.__name__, field, content["default"])
    if model.__name__ in _EXACTLY_ONE:
        section["oneOf"] = [{"required": list(fields)} for fields in _EXACTLY_ONE[model.__name__]]
    if model.__name__ in _AT_MOST_ONE:
        section["not"] = {"required": list(_AT_MOST_ONE[model.__name__])}


def _add_limit(schema: dict[str, Any], path: list[str], shape: Mapping[str, Any]) -> None:
    """Add AWS's limit to the field at a path; `shape` describes the member in AWS's model."""
    target = schema
    for part in path:
        reference = target.get("$ref") or next(
            (option["$ref"] for option in target.get("anyOf", ()) if "$ref" in option), None
        )
        if reference is not None:
            target = schema["$defs"][reference.rpartition("/")[2]]
        target = target["properties"][part]
    kind = shape["type"]
    limit = shape["max"]
    if path == ["tags"]:
        # AWS has a list of them, and cloudtrain adds one.
        kind = "map"
        limit -= 1
    target[_LIMIT_KEYWORDS[kind]] = limit


@functools.cache
def field_docs(section: type[Section]) -> Mapping[str, str]:
    """Return the docstring of each field of a section, and under an empty name that of the section.

    They are parsed from the source text, because pydantic could collect them only at every import of the models.
    """
    docs: dict[str, str] = {}
    for each in reversed(section.mro()):
        # Fields that a model inherits are described where they are defined.
        if issubclass(each, Section):
            docs |= _own_field_docs(each)
    return docs


def _own_field_docs(section: type[Section]) -> dict[str, str]:
    module = ast.parse(textwrap.dedent(inspect.getsource(section)))
    definition = next(node for node in module.body if isinstance(node, ast.ClassDef))
    docs = {"": (ast.get_docstring(definition) or "").split("\n\n")[0].replace("\n", " ")}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_docstring = isinstance(following, ast.Expr) and isinstance(
                following.value, ast.Constant
            )
            docs[statement.target.id] = str(following.value.value) if is_docstring else ""  # type: ignore[attr-defined]
    return docs


def display_default(section: str, name: str, default: Any) -> Any:
    """Return the default of a field as a job file spells it."""
    if (section, name) in (("Limits", "runtime"), ("Limits", "hang"), ("Recover", "time")):
        return format_duration(default)
    if (section, name) == ("Checkpoint", "every"):
        return str(Checkpoint().every)
    return f"{default}GB" if (section, name) == ("Cluster", "volume") else default


_SHORT_FORMS = {"spot": "true, false", "queue": "text", "image": "text"}
"""Types that are allowed instead of a mapping, by field."""
_TYPE_NAMES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
}


def reference_page() -> str:
    """Return the Markdown page that lists every field with type, default, description and example."""
    lines = [
        "# job.yaml",
        "",
        "Every field of a job file. `cloudtrain schema --reference` generates this page from the models, and a test",
        "compares the two. For completion in an editor, write the schema beside the job (`cloudtrain schema >",
        "job.schema.json`) and begin the job file with `# yaml-language-server: $schema=job.schema.json`.",
        "",
    ]
    for path, section in sections_of(JobSpec):
        lines += [f"## {path or 'top level'}", "", field_docs(section)[""], ""]
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_row(section, field) for field in section.model_fields]
        lines.append("")
    return "\n".join(lines)


def _row(section: type[Section], name: str) -> str:
    schema = _schema_of(section)
    content = schema["properties"][name]
    field = section.model_fields[name]
    value = display_default(section.__name__, name, content.get("default"))
    if field.is_required():
        default = "required"
    elif isinstance(value, dict | list) or value is None:
        default = ""
    else:
        shown = dump_json(value) if isinstance(value, bool) else value
        default = f"`{shown}`"
    examples = field.examples or content.get("examples") or []
    example = f" For example `{to_flow_style(examples[0])}`." if examples else ""
    text = f"{field_docs(section)[name]}{example}".replace("|", "\\|")
    return f"| `{name}` | {_type_name(content, schema, name)} | {default} | {text} |"


@functools.cache
def _schema_of(section: type[Section]) -> dict[str, Any]:
    return section.model_json_schema(mode="validation")


def _type_name(content: Mapping[str, Any], schema: Mapping[str, Any], name: str = "") -> str:
    if name in _SHORT_FORMS:
        return f"{_SHORT_FORMS[name]} or mapping"
    if "$ref" in content:
        return "mapping"
    if "enum" in content or "const" in content:
        return ", ".join(f"`{value}`" for value in content.get("enum", [content.get("const")]))
    if "anyOf" in content and "type" not in content:
        options = [
            _type_name(option, schema)
            for option in content["anyOf"]
            if option.get("type") != "null"
        ]
        return " or ".join(dict.fromkeys(options))
    return _quantity(content) or _TYPE_NAMES.get(str(content.get("type")), "text")


def _quantity(content: Mapping[str, Any]) -> str:
    """Return what a field with a unit measures, such as a duration; an empty string for other fields."""
    pattern = str(content.get("pattern") or content.get("anyOf", [{}])[0].get("pattern", ""))
    for unit, quantity in (("USD", "money"), ("KMGT", "size"), ("smhd", "duration")):
        if unit in pattern:
            return quantity + (" or steps" if "anyOf" in content else "")
    return ""
