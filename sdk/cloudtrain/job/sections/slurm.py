"""The `slurm` section of job.yaml: options of the batch job on a Slurm cluster. Other places ignore it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cloudtrain.job.fields import Section, matching, parsed_by
from cloudtrain.support.sbatch_options import parse_sbatch_option
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_WORD = lazy_pattern(r"[^\s=]+")
_NAME_FORM = matching(_WORD, "a name without spaces", "to list partitions and their limits: sinfo")
_CONSTRAINT_FORM = matching(
    _WORD, "a constraint without spaces", "for example a100, or [rack1|rack2]"
)


def _check_option(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected an option of sbatch, got {value}; such as --mem=0")  # noqa: TRY004 (a field's error)
    parse_sbatch_option(value)
    return value


SbatchOption = Annotated[str, parsed_by(_check_option)]
"""An option of sbatch in its long form."""


class Slurm(Section):
    """Options of the batch job on a Slurm cluster, before those of the site; other places ignore them."""

    partition: Annotated[str, _NAME_FORM] | None = Field(None, examples=["gpu"])
    """Partition of the cluster; default: the site's, or else the cluster's own."""
    qos: Annotated[str, _NAME_FORM] | None = Field(None, examples=["high"])
    """Quality of service; default: the site's, or else the cluster's own."""
    constraint: Annotated[str, _CONSTRAINT_FORM] | None = Field(None, examples=["a100"])
    """Features that the nodes must have."""
    reservation: Annotated[str, _NAME_FORM] | None = Field(None, examples=["course"])
    """Reservation whose nodes are used."""
    sbatch: tuple[SbatchOption, ...] = Field((), examples=[["--mem=0"]])
    """Further options of sbatch in their long form; the last one of a name counts, after those of the site."""
