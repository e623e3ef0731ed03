"""Settings and prices of the account."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from cloudtrain.catalog import Prices, bundled_prices, merge_newest, read_prices
from cloudtrain.job.spec import JobSpec
from cloudtrain.settings.settings import (
    Origin,
    Settings,
    find_origins,
    load_settings,
    prices_file,
)
from cloudtrain.settings.trust import has_agreed, has_agreed_to_site


def find_settings(
    job: JobSpec | str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
) -> Settings:
    """Return the settings that apply to a job: flags, environment, cloudtrain.toml beside the job, profile file.

    The last source of the region is the profile of AWS.

    A cloned repository may contain a cloudtrain.toml. So a role, bucket, key or Slurm site from one beside the job
    is used only after the user has agreed: with `trust`, or once with `cloudtrain --trust COMMAND`.

    Args:
        job: The job, or the path of its file; by default the working folder's settings.
        flags: Values given on the command line; None means not given.
        trust: Agree to the values of a cloudtrain.toml beside the job, for the settings that are returned.

    Raises:
        SettingsError: A file or value is malformed.
    """
    found = load_settings(os.environ, job_directory=_folder_of(job), flags=flags)
    sites = {
        name: dataclasses.replace(
            site, is_trusted=site.is_trusted or trust or has_agreed_to_site(os.environ, site)
        )
        for name, site in found.slurm.items()
    }
    is_trusted = bool(found.beside_job) and (trust or has_agreed(os.environ, found))
    return dataclasses.replace(found, slurm=sites, is_trusted=is_trusted)


def trace_settings(
    job: JobSpec | str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[Origin, ...]:
    """Return every place that gives a setting a value (see `find_settings`). The first one of a setting counts.

    Raises:
        SettingsError: A file is malformed.
    """
    return tuple(find_origins(os.environ, job_directory=_folder_of(job), flags=flags))


def known_prices() -> Prices:
    """Return the newest prices on this machine: from the package, or from the last refresh.

    Raises:
        SettingsError: The file that a refresh writes exists and cannot be read.
    """
    return merge_newest(bundled_prices(), read_prices(prices_file(os.environ)))


def refresh_prices(region: str | None = None, *, today: date | None = None) -> Prices:
    """Fetch a region's prices from the AWS Price List API and store them for later plans.

    Args:
        region: By default that of the settings, else the first region whose prices come with cloudtrain.
        today: Date of the new prices; by default today's in UTC.

    Returns:
        The newest prices on this machine after the refresh.

    Raises:
        CloudError: There are no credentials, AWS refused, or AWS has no prices for this region; nothing was written.
        SettingsError: The file cannot be read or written.
    """
    from cloudtrain.preflight.prices import refresh_prices as refresh

    wanted = region or find_settings().region or bundled_prices().regions[0]
    fetched = refresh(wanted, prices_file(os.environ), today=today or datetime.now(UTC).date())
    return merge_newest(bundled_prices(), fetched)


def _folder_of(job: JobSpec | str | Path | None) -> Path:
    if isinstance(job, JobSpec):
        return job.base
    return Path.cwd() if job is None else Path(job).parent
