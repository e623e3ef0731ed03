"""Records of the user's configuration folder to which many commands append: one JSON object per line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.support.regular_files import read_regular
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def append_record(file: Path, content: Mapping[str, Any]) -> None:
    """Append an object to a record, which only the user can read. Its folder is created if necessary.

    Raises:
        OSError: The record cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    line = dump_json(content) + "\n"
    with os.fdopen(descriptor, "wb", buffering=0) as opened:
        # With one write, lines of several processes do not mix.
        opened.write(line.encode())


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a record, the oldest first; damaged lines are skipped, and no record has none."""
    try:
        lines = read_regular(file).splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            content = load_json(line)
            if isinstance(content, dict):
                yield content
