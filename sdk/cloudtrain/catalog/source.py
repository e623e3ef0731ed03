"""Data files of the catalog, and the sources of their values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain_runtime.contract.strict_json import load_json


@dataclass(frozen=True)
class Source:
    """Source of a value.

    Attributes:
        name: Title of the document; it says so if another document quotes the value.
        url: Address of the document.
        date: Date of the document, or the day when it was read if it has no date, as YYYY-MM-DD.
    """

    name: str
    url: str
    date: str


@functools.cache
def load(name: str) -> Any:
    """Return the content of one of the catalog's data files."""
    return load_json(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def sources(name: str) -> Mapping[str, Source]:
    """Return the sources of one data file by their keys."""
    return {key: Source(**source) for key, source in load(name)["sources"].items()}
