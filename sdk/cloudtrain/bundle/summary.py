"""Summary of a bundle's contents, for `repr` and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.bundle.code_folder import RUNTIME
from cloudtrain.support.notebook.summary import Row, Summary, count
from cloudtrain.support.units import format_size

if TYPE_CHECKING:
    from cloudtrain.bundle.contents import Contents

_NAMED = 3
_LISTED = 20


def summarize_contents(contents: Contents) -> Summary:
    """Return a summary of a bundle; the HTML table lists its files, too."""
    own = [entry for entry in contents.entries if entry.why != RUNTIME]
    runtime = len(contents.entries) - len(own)
    rows: list[Row] = [
        ("files", _name([entry.name for entry in own], "file")),
        ("runtime", f"{count(runtime, 'file')} of cloudtrain_runtime"),
        ("sha256", contents.info.digest),
    ]
    if contents.left_out:
        rows.append(("excluded", _name([path.name for path in contents.left_out], "path")))
    if contents.refused:
        rows.append(
            (
                "rejected",
                _name([match.name for match in contents.refused], "file") + ": look like secrets",
            )
        )
    details = [("", f"{entry.name}, {format_size(entry.size)}") for entry in own[:_LISTED]]
    if len(own) > _LISTED:
        details.append(("", f"and {count(len(own) - _LISTED, 'more file')}, in .entries"))
    details += [("excluded", f"{path.name}: {path.reason}") for path in contents.left_out[:_LISTED]]
    return Summary(
        f"Contents of {count(contents.info.files, 'file')}, {format_size(contents.info.bytes)}",
        rows,
        details,
    )


def _name(names: list[str], noun: str) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{count(len(names), noun)}: {', '.join(names[:_NAMED])}{more}" if names else "none"
