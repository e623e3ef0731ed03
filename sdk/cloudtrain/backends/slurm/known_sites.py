"""The sites that this user has submitted to, so that commands in other folders find their runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from cloudtrain.settings.slurm_sites import SlurmSite
from cloudtrain.support.config_folder import config_folder
from cloudtrain.support.records import append_record, read_records

RECORDED = "recorded at a submit"
"""Origin of a site of which only the name and the folder are known."""

_FILE = "slurm-sites.jsonl"


def record_site(environ: Mapping[str, str], site: SlurmSite) -> None:
    """Append a site to the user's record, unless it is there; a failure is ignored."""
    if any(each.folder == site.folder for each in recorded_sites(environ)):
        return
    # The run has been queued, and the record only helps to find it.
    with contextlib.suppress(OSError):
        append_record(_record(environ), {"site": site.name, "folder": str(site.folder)})


def recorded_sites(environ: Mapping[str, str]) -> Iterator[SlurmSite]:
    """Yield the recorded sites whose folders exist."""
    for content in read_records(_record(environ)):
        with contextlib.suppress(KeyError, TypeError, OSError):
            folder = Path(content["folder"])
            if folder.is_absolute() and folder.is_dir():
                yield SlurmSite(str(content["site"]), folder, origin=RECORDED)


def _record(environ: Mapping[str, str]) -> Path:
    return config_folder(environ) / _FILE
