"""Runs on a Slurm cluster, submitted from one of its login nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cloudtrain.backends.base import Backend
    from cloudtrain.backends.context import BackendContext
    from cloudtrain.planning.targets import Target
    from cloudtrain.settings.slurm_sites import SlurmSite


def make_target(context: BackendContext) -> Target:
    """Return a site as the target of a plan.

    Raises:
        UserError: The settings have no such site, or several and none is named.
    """
    from cloudtrain.backends.slurm.target import SlurmTarget

    return SlurmTarget(context.load_settings(), _site(context), installs=context.installs)


def open_backend(context: BackendContext) -> Backend:
    """Return the backend of a site.

    Raises:
        UserError: The settings have no such site, or several and none is named.
        UntrustedSettingsError: A file beside the job gives the site, and the user has not agreed to it.
    """
    from cloudtrain.backends.slurm.backend import SlurmBackend

    site = _site(context)
    site.require_trust()
    return SlurmBackend(site, context.load_settings, installs=context.installs, steps=context.steps)


def find_backends(context: BackendContext) -> Iterator[Backend]:
    """Yield a backend for each site of the settings, and for others that this user has submitted to."""
    from cloudtrain.backends.slurm.known_sites import recorded_sites

    by_folder: dict[Path, SlurmSite] = {}
    # Sites may share a folder, such as one for each partition: their runs are listed once.
    for site in (*context.load_settings().slurm.values(), *recorded_sites(os.environ)):
        by_folder.setdefault(site.folder, site)
    if not by_folder:
        return
    from cloudtrain.backends.slurm.backend import SlurmBackend

    for site in by_folder.values():
        yield SlurmBackend(site, context.load_settings, steps=context.steps)


def _site(context: BackendContext) -> SlurmSite:
    from cloudtrain.settings.slurm_sites import SITE_VARIABLE, choose_site

    name = context.site or os.environ.get(SITE_VARIABLE) or None
    return choose_site(context.load_settings().slurm, name)
