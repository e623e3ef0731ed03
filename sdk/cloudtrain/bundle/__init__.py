"""Bundles: deterministic, content-addressed archives of a job's code.

A bundle holds the user's code folder, the runtime package and the root script that starts one rank. Its digest covers
names, modes and contents, so the same code has the same digest on every machine and is uploaded once. A plan needs
only the digest; `cloudtrain.bundle.archive` writes the archive.
"""

from __future__ import annotations

from cloudtrain.bundle.code_folder import BUNDLES_FOLDER, ExcludedPath
from cloudtrain.bundle.contents import Contents, Entry, ProgressCallback, collect, list_contents
from cloudtrain.bundle.rejections import printable_name

__all__ = [
    "BUNDLES_FOLDER",
    "Contents",
    "Entry",
    "ExcludedPath",
    "ProgressCallback",
    "collect",
    "list_contents",
    "printable_name",
]
