"""`BatchJob`: the options of sbatch and the batch script of a run on Slurm, complete, as the submit sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OWN = "cloudtrain"
"""Origin of an option that neither the job nor the site gives."""
EXPORT = "--export"
SIGNAL_SECONDS = 180
"""Time before the end of a job's time limit at which Slurm signals the batch step: the grace period, and a minute."""


@dataclass(frozen=True)
class BatchOption:
    """An option of sbatch.

    Attributes:
        name: Its long name, such as `--nodes`.
        value: Its value, or None for a switch.
        origin: Where it comes from: a field of the job file, `file:line` of the settings, or `cloudtrain`.
    """

    name: str
    value: str | None
    origin: str

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


@dataclass(frozen=True)
class BatchJob:
    """What sbatch receives.

    Attributes:
        site: Name of the site.
        options: The options, each name once.
        script: The batch script.
    """

    site: str
    options: tuple[BatchOption, ...]
    script: str

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments of sbatch, which reads the script from its standard input."""
        return [str(each) for each in self.options]

    @property
    def sent(self) -> list[str]:
        """The arguments and the script, as a part of the plan's identity.

        Which variables are set may differ between two login nodes, and is no part of it.
        """
        options = [str(each) for each in self.options if each.name != EXPORT or each.origin != OWN]
        return [*options, self.script]

    def to_document(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "site": self.site,
            "arguments": self.arguments,
            "origins": {each.name: each.origin for each in self.options},
            "script": self.script,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> BatchJob:
        """Return the batch job of `to_document`."""
        options = []
        for argument in document["arguments"]:
            name, has_value, value = str(argument).partition("=")
            origin = str(document["origins"].get(name, ""))
            options.append(BatchOption(name, value if has_value else None, origin))
        return cls(str(document["site"]), tuple(options), str(document["script"]))
