"""Where a value of the catalog comes from."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Source:
    """Where a value comes from.

    Attributes:
        name: What was read; says so when it was read second-hand.
        url: Where it can be read.
        date: The day that it bears or, where it bears none, the day it was read, as YYYY-MM-DD.
    """

    name: str
    url: str
    date: str

    def to_json(self) -> dict[str, str]:
        """Return what `Source(**content)` takes."""
        return {"name": self.name, "url": self.url, "date": self.date}


@functools.cache
def load(name: str) -> Any:
    """Return the content of one of the catalog's data files."""
    return json.loads(resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def sources(name: str) -> Mapping[str, Source]:
    """Return the sources of one data file by their keys."""
    return {key: Source(**source) for key, source in load(name)["sources"].items()}
