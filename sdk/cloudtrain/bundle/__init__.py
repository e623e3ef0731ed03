"""`Bundle`: the deterministic, content-addressed archive that travels.

It holds the user's code folder, the runtime package and the root script that starts one rank. Its digest is over
names, modes and contents, so the same code has the same digest on every machine and day, and is uploaded once. It is
written by `cloudtrain.bundle.archive`, which a plan does without.
"""

from __future__ import annotations

from cloudtrain.bundle.contents import (
    BUNDLES_FOLDER,
    Contents,
    Entry,
    ExcludedPath,
    ProgressCallback,
    collect,
    list_contents,
    printable_name,
)

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
