"""Instances, containers, prices and limits of AWS. In the data files, each value has a source and a date."""

from cloudtrain.catalog.images import Image, image_uri, images
from cloudtrain.catalog.instances import (
    Instance,
    classify,
    find_instance,
    instance_names,
    s3_upload_bytes_per_second,
    suggest,
)
from cloudtrain.catalog.prices import Price, Prices, bundled_prices, merge_newest, read_prices
from cloudtrain.catalog.source import Source

__all__ = [
    "Image",
    "Instance",
    "Price",
    "Prices",
    "Source",
    "bundled_prices",
    "classify",
    "find_instance",
    "image_uri",
    "images",
    "instance_names",
    "merge_newest",
    "read_prices",
    "s3_upload_bytes_per_second",
    "suggest",
]
