"""Changes of single fields of a job: `JobSpec.with_values`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import UserError
from cloudtrain.job.document import Document, SourceLocation

if TYPE_CHECKING:
    from cloudtrain.job.spec import JobSpec

_SHOWN_CHARACTERS = 60


def change_document(spec: JobSpec, values: Mapping[str, Any], known: Document | None) -> Document:
    """Return the document of a job with other values.

    Args:
        spec: The job.
        values: New values by path such as `train.epochs`.
        known: The document that the job comes from, for the locations of the unchanged fields; None without one.

    Raises:
        UserError: these are no values by path, a path is empty, or leads below a single value.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            f"with_values: expected values by path, got {values!r}", 'for example spec.with_values({"train.epochs": 2})'
        )
    name = f"{type(spec).__name__}(...)"
    document = Document(name, spec.to_document(), {(): SourceLocation(name)})
    if known is not None:
        document = Document(known.file, document.data, dict(known.values), dict(known.keys))
    for path, value in values.items():
        parts = tuple(str(path).split("."))
        if not all(parts):
            raise UserError(f"with_values: expected the path of a field, got {path!r}", 'for example "train.epochs"')
        origin = f"with_values({_show(path, value)})"
        document.override(parts, _to_plain(value), origin)
        for depth in range(1, len(parts)):  # a misspelled section has no location yet
            document.keys.setdefault(parts[:depth], SourceLocation(origin))
    return document


def _to_plain(value: Any) -> Any:
    """Return a value as a job file has it: paths are text, tuples are lists, NumPy's numbers are Python's."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(inner) for inner in value]
    return value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value


def _show(path: str, value: Any) -> str:
    text = f"{path!r}: {value!r}"
    return f"{{{text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + '...'}}}"
