"""Summary of a job, for `repr` and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.support.notebook.summary import Summary

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec

_SECTIONS = (
    "code",
    "cluster",
    "data",
    "train",
    "checkpoint",
    "limits",
    "metrics",
    "tracking",
    "tags",
)


def summarize_job(spec: JobSpec) -> Summary:
    """Return a summary of a job: one row per section that was given, with its fields as in a job file."""
    document = spec.to_document()
    rows = [(name, ", ".join(_fields(document[name]))) for name in _SECTIONS if document.get(name)]
    return Summary(f"JobSpec {spec.name}", rows)


def _fields(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the fields of a section as `path: value`. Values of environment variables can be secrets, so only names."""
    for name, value in section.items():
        if name == "env" and isinstance(value, Mapping):
            yield f"env: {', '.join(value)}"
        elif isinstance(value, Mapping) and list(value) == ["uri"]:
            yield f"{prefix}{name}: {value['uri']}"
        elif isinstance(value, Mapping) and value:
            yield from _fields(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}: {_show(value)}"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_show, value))}]" if isinstance(value, list | tuple) else str(value)
