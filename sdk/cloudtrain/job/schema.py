"""The job file's JSON Schema (draft 2020-12) and its reference page, both made from the models."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from cloudtrain import catalog
from cloudtrain.catalog import service_limits
from cloudtrain.job import spec
from cloudtrain.job.fields import STEPS_PATTERN, Section
from cloudtrain.job.spec import NAME_CHARACTERS, JobSpec
from cloudtrain.support.units import format_duration
from cloudtrain_runtime.contract.strict_json import dump_json

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_EITHER: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Code": (("task",), ("script",)),
    "Cluster": (("instance_type",), ("prefer",)),
    "Train": (("epochs",), ("steps",)),
}
"""Fields of which exactly one is given, by section."""
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "code.env": ("Environment",),
    "cluster.prefer": ("ResourceConfig", "InstancePreferences"),
    "cluster.network.subnets": ("VpcConfig", "Subnets"),
    "cluster.network.security_groups": ("VpcConfig", "SecurityGroupIds"),
    "limits.retries": ("RetryStrategy", "MaximumRetryAttempts"),
    "tags": ("Tags",),
}
"""Where AWS's model holds the limit of a field."""
_PATTERNS = (
    ("JobSpec", "name", r"^[a-zA-Z0-9](-*[a-zA-Z0-9])*$"),
    ("Code", "task", r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"),
    ("Cluster", "instance_type", r"^ml\.[a-z0-9-]+\.[a-z0-9]+$"),
    ("EarlyStopping", "metric", r"^validation/.+$"),
    ("Evaluate", "every", STEPS_PATTERN),
)
"""Forms that the models check by code."""
_NONE = catalog.Instance(name="", gpus=0)
_KEYWORDS = {"map": "maxProperties", "list": "maxItems", "integer": "maximum"}


def job_schema() -> dict[str, Any]:
    """Return the schema of job.yaml, with descriptions, examples and enums."""
    schema = JobSpec.model_json_schema(mode="validation")
    sections = {"JobSpec": schema, **schema.get("$defs", {})}
    for name, section in sections.items():
        _describe(name, section)
    for path, request in _LIMITS.items():
        _limit(schema, path.split("."), service_limits.limit_of(*request))
    channels = schema["properties"]["data"]
    channels["additionalProperties"] = {"anyOf": [_uri(), channels["additionalProperties"]]}
    cluster = sections["Cluster"]["properties"]
    cluster["spot"]["anyOf"] = [{"type": "boolean"}, *cluster["spot"]["anyOf"]]
    cluster["queue"]["anyOf"] = [{"type": "string"}, *cluster["queue"]["anyOf"]]
    hang = sections["Limits"]["properties"]["hang"]
    hang["anyOf"] = [*hang["anyOf"], {"enum": [False, "off", "no"]}]
    with_gpu = [name for name in catalog.instance_names() if (catalog.find_instance(name) or _NONE).gpus]
    cluster["instance_type"]["examples"] = with_gpu
    cluster["framework"]["examples"] = [image.framework for image in catalog.images()]
    for section, field, pattern in _PATTERNS:
        text = sections[section]["properties"][field]
        (text["anyOf"][0] if "anyOf" in text else text)["pattern"] = pattern
    schema["properties"]["name"]["maxLength"] = NAME_CHARACTERS
    schema["title"] = "cloudtrain job, version 1"
    return {"$schema": DIALECT, **schema}


def _uri() -> dict[str, Any]:
    return {"type": "string", "description": "s3://bucket/prefix, or a local path relative to the job file."}


def _describe(name: str, section: dict[str, Any]) -> None:
    """Put the docstrings into a section, and what the models check by code."""
    described = _docstrings()[name]
    section["description"] = described[""]
    for field, content in section["properties"].items():
        content["description"] = described[field]
        content.pop("title", None)
        if "default" in content:
            content["default"] = _human(name, field, content["default"])
    if name in _EITHER:
        section["oneOf"] = [{"required": list(fields)} for fields in _EITHER[name]]


def _limit(schema: dict[str, Any], path: list[str], shape: Mapping[str, Any]) -> None:
    target = schema
    for part in path:
        reference = target.get("$ref") or next(
            (option["$ref"] for option in target.get("anyOf", ()) if "$ref" in option), None
        )
        if reference is not None:
            target = schema["$defs"][reference.rpartition("/")[2]]
        target = target["properties"][part]
    most = shape["max"] - 1 if path == ["tags"] else shape["max"]  # cloudtrain adds a tag of its own
    target[_KEYWORDS["map" if path == ["tags"] else shape["type"]]] = most


# ---------------------------------------------------------------- the reference page


def reference_page() -> str:
    """Return the Markdown page that lists every field: type, default, examples and its sentence."""
    lines = [
        "# job.yaml",
        "",
        "Every field of a job file. `cloudtrain schema --reference` generates this page from the models, and a test",
        "compares the two. For completion in an editor, write the schema beside the job (`cloudtrain schema >",
        "job.schema.json`) and begin the job file with `# yaml-language-server: $schema=job.schema.json`.",
        "",
    ]
    for path, section in _sections(JobSpec, ""):
        name = section.__name__
        lines += [f"## {path or 'top level'}", "", _docstrings()[name][""], ""]
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_row(section, field) for field in section.model_fields]
        lines.append("")
    return "\n".join(lines)


def _sections(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, section
    for name, field in section.model_fields.items():
        below = [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)]
        is_mapping = getattr(field.annotation, "__origin__", None) is dict
        step = f"{name}.<name>" if is_mapping else name
        for kind in below:
            yield from _sections(kind, f"{path}.{step}" if path else step)


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _kinds(argument)


def _row(section: type[BaseModel], name: str) -> str:
    schema = _schema_of(section)
    content = schema["properties"][name]
    field = section.model_fields[name]
    given = _human(section.__name__, name, content.get("default"))
    if field.is_required():
        default = "required"
    elif isinstance(given, dict | list) or given is None:
        default = ""
    else:
        default = f"`{dump_json(given) if isinstance(given, bool) else given}`"
    examples = field.examples or content.get("examples") or []
    example = f" For example `{_flow(examples[0])}`." if examples else ""
    text = f"{_docstrings()[section.__name__][name]}{example}".replace("|", "\\|")
    return f"| `{name}` | {_type(content, schema, name)} | {default} | {text} |"


def _human(section: str, name: str, default: Any) -> Any:
    """Return a default as a job file writes it."""
    if (section, name) in (("Limits", "runtime"), ("Limits", "hang")):
        return format_duration(default)
    if (section, name) == ("Checkpoint", "every"):
        return str(spec.Checkpoint().every)
    return f"{default}GB" if (section, name) == ("Cluster", "volume") else default


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return str(value)


@functools.cache
def _schema_of(section: type[BaseModel]) -> dict[str, Any]:
    return section.model_json_schema(mode="validation")


def _type(content: Mapping[str, Any], schema: Mapping[str, Any], name: str = "") -> str:
    """Return the type of a field in words."""
    if name in _SHORT:
        return f"{_SHORT[name]} or mapping"
    if "$ref" in content:
        return "mapping"
    if "enum" in content or "const" in content:
        return ", ".join(f"`{value}`" for value in content.get("enum", [content.get("const")]))
    if "anyOf" in content and "type" not in content:
        options = [_type(option, schema) for option in content["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    return _unit_of(content) or _WORDS.get(str(content.get("type")), "text")


def _unit_of(content: Mapping[str, Any]) -> str:
    """Return what a field of patterned text measures, or an empty string."""
    pattern = str(content.get("pattern") or content.get("anyOf", [{}])[0].get("pattern", ""))
    for mark, word in (("USD", "money"), ("KMGT", "size"), ("smhd", "duration")):
        if mark in pattern:
            return word + (" or steps" if "anyOf" in content else "")
    return ""


_SHORT = {"spot": "true, false", "queue": "text"}
"""What may be written instead of a mapping."""
_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
}


# ---------------------------------------------------------------- the sentences


@functools.cache
def _docstrings() -> Mapping[str, Mapping[str, str]]:
    """Return the sentence of every field, and with an empty name of every section, from the models' source text.

    Pydantic can collect them too, but at every import; only this page and the schema need them.
    """
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(spec)).body:
        if isinstance(node, ast.ClassDef):
            sentences = {"": (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")}
            for statement, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    sentences[statement.target.id] = str(after.value.value) if is_text else ""  # type: ignore[attr-defined]
            found[node.name] = sentences
    return found
