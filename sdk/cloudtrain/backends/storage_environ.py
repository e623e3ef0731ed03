"""The environment of a process that reads checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract.bucket_owner import OWNERS_VARIABLE
from cloudtrain_runtime.contract.strict_json import dump_json


def make_storage_environ(environ: Mapping[str, str], settings: Settings, region: str | None = None) -> dict[str, str]:
    """Return an environment with a region, if given, and the accounts that own the buckets.

    Args:
        environ: The other variables.
        settings: The account.
        region: Region of the buckets, where the variables name none.
    """
    in_region = {"AWS_DEFAULT_REGION": region} if region else {}
    return {**environ, **in_region, OWNERS_VARIABLE: dump_json(settings.bucket_owners)}
