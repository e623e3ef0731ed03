"""The reference page of job.yaml, generated from the models."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cloudtrain.job.diagnostics import to_flow_style
from cloudtrain.job.fields import Section, sections_of
from cloudtrain.job.schema import display_default, field_docs
from cloudtrain.job.spec import JobSpec
from cloudtrain_runtime.contract.strict_json import dump_json

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
        default = f"`{dump_json(value) if isinstance(value, bool) else value}`"
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
        options = [_type_name(option, schema) for option in content["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    return _quantity(content) or _TYPE_NAMES.get(str(content.get("type")), "text")


def _quantity(content: Mapping[str, Any]) -> str:
    """Return what a field with a unit measures, such as a duration; an empty string for other fields."""
    pattern = str(content.get("pattern") or content.get("anyOf", [{}])[0].get("pattern", ""))
    for unit, quantity in (("USD", "money"), ("KMGT", "size"), ("smhd", "duration")):
        if unit in pattern:
            return quantity + (" or steps" if "anyOf" in content else "")
    return ""
