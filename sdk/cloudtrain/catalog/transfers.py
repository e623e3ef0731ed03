"""Assumed upload rate of a checkpoint to S3: a conservative value for estimates."""

from __future__ import annotations

from cloudtrain.catalog.instances import find_instance
from cloudtrain.catalog.source import Source, load, sources

_BYTES_PER_GBIT = 10**9 / 8
_SHARE_OF_NETWORK = 0.5
"""Share of an instance's baseline bandwidth, because collectives run during the upload."""


def s3_upload_bytes_per_second(instance_type: str) -> float:
    """Return the assumed rate: the rate measured with two cores, or less on a slower network."""
    measured = float(load("transfers")["s3_upload_mb_per_second"]["value"]) * 10**6
    instance = find_instance(instance_type)
    if instance is None or instance.network_gbps is None:
        return measured
    return min(measured, instance.network_gbps * _BYTES_PER_GBIT * _SHARE_OF_NETWORK)


def s3_upload_source() -> Source:
    """Return the source of that rate."""
    return sources("transfers")[load("transfers")["s3_upload_mb_per_second"]["source"]]
